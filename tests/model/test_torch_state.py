"""What a caller may set in torch: passes have one state, and the caller's settings come back."""

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.ambient import can_round
from tests.support.cases import bits_of, drain, text
from tests.support.tiny import tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, determinism
from tinyspec.engine import core
from tinyspec.model import openmp, torch_settings
from tinyspec.model.torch_settings import moved, pin_again, pinned
from tinyspec.model.torch_state import TorchState
from tinyspec.runner import processors

PARAMS = SamplingParams(
    max_new_tokens=4, deterministic=True, logprobs=True, temperature=0.7, seed=1
)
CONFIG = EngineConfig(reference_rows=8, max_rows=32)
# The last one is longer than a tile of attention.
PROMPTS = [text(length) for length in (1, 17, 150)]
C = torch._C
META = torch.device("meta")
MHA = torch.backends.mha


@contextmanager
def changed(get: Callable, put: Callable, value: object) -> Iterator[None]:
    """A setting has another value, which passes leave as it is."""
    before = get()
    put(value)
    try:
        yield
        assert get() == value
    finally:
        put(before)


class Doubling(TorchFunctionMode):
    """Doubles the products of linears."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        doubled = func in (torch.nn.functional.linear, torch.ops.mkldnn._linear_pointwise)
        return found * 2 if doubled else found


class Negating(TorchDispatchMode):
    """Changes the sign of every sigmoid and every product."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        wrong = ("mul", "silu", "addmm", "mm", "_linear_pointwise")
        return -found if func.overloadpacket.__name__ in wrong else found


@contextmanager
def inside_of_grad() -> Iterator[None]:
    """As code within ``torch.func.grad`` runs."""
    C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        C._functorch._grad_decrement_nesting()


def default_device() -> torch.device | None:
    """None: not set."""
    return META if torch.empty(0).is_meta else None


def of_c(name: str) -> tuple[Callable, Callable]:
    return getattr(C, f"_get_{name}"), getattr(C, f"_set_{name}")


def precision(operator: str) -> tuple[Callable, Callable]:
    both = C._get_fp32_precision_getter, C._set_fp32_precision_setter
    return tuple(partial(each, "mkldnn", operator) for each in both)


MODE = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
# A getter, a setter, a value that passes do not have; or a context.
PINNED: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": (default_device, torch.set_default_device, META),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic algorithms": (*MODE, 1),
    "device context": lambda: META,
    "dispatch mode": Negating,
    "flush denormal": (openmp.flushes, torch.set_flush_denormal, True),
    "function mode": Doubling,
    "grad": torch.enable_grad,
    "matmul precision": (*of_c("float32_matmul_precision"), "medium"),
    "mkldnn": (*of_c("mkldnn_enabled"), False),
    "mkldnn bf16": (*precision("matmul"), "bf16"),
    "mkldnn conv bf16": (*precision("conv"), "bf16"),
    "mkldnn deterministic": (*of_c("mkldnn_deterministic"), True),
    "OpenMP dynamic": (openmp.is_dynamic, openmp.set_dynamic, True),
    "transform": inside_of_grad,
}
if platform.machine() in ("aarch64", "arm64"):  # others refuse to set it
    PINNED["fp16 reduction"] = (*of_c("cpu_allow_fp16_reduced_precision_reduction"), True)
HARMLESS: dict[str, Any] = {
    "anomaly mode": (torch.is_anomaly_enabled, C.set_anomaly_enabled, True),
    "attention kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    "autocast dtype": (
        partial(torch.get_autocast_dtype, "cpu"),
        partial(torch.set_autocast_dtype, "cpu"),
        torch.float16,
    ),
    "autograd threads": lambda: torch.autograd.set_multithreading_enabled(False),
    "inference mode": torch.inference_mode,
    "jit optimisation": lambda: torch.jit.optimized_execution(False),
    "math attention in 16 bits": (*of_c("math_sdp_allow_fp16_bf16_reduction"), True),
    "nnpack": (*of_c("nnpack_enabled"), False),
    "random numbers": torch.random.fork_rng,
    "TransformerEncoder's fast path": (MHA.get_fastpath_enabled, MHA.set_fastpath_enabled, False),
}
SETTINGS: dict[str, Callable[[], AbstractContextManager]] = {
    name: partial(changed, *how) if isinstance(how, tuple) else how
    for name, how in (PINNED | HARMLESS).items()
}


@cache
def served(family: str = "llama") -> tuple[Engine, list, str]:
    """An engine, the bits of its outputs, its fingerprint."""
    engine = Engine(tiny(family), config=CONFIG)
    return engine, bits_of(engine.generate(PROMPTS, PARAMS)), engine.fingerprint


def stepped(engine: Engine, setting: Callable[[], AbstractContextManager]) -> list:
    """Outputs of requests that run with a setting changed after their first steps."""
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    done = {output.request_id: output for _ in range(2) for output in engine.step()}
    with setting():
        done |= drain(engine)
    return [done[number] for number in ids]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_around_calls_and_steps(setting):
    engine, alone, fingerprint = served()
    with setting():
        torch.manual_seed(5)
        outputs = engine.generate(PROMPTS, PARAMS)
        found = engine.fingerprint
    assert bits_of(outputs) == alone
    assert {found, *(output.fingerprint for output in outputs)} == {fingerprint}
    assert bits_of(stepped(engine, setting)) == alone


NEW_ENGINES = ("default device", "default dtype", "mkldnn")


@pytest.mark.parametrize("name", NEW_ENGINES)
def test_settings_around_an_engine(name):
    _, alone, fingerprint = served()
    model = tiny()
    small = replace(CONFIG, max_rows=8)
    with SETTINGS[name](), Engine(model, config=small) as engine:
        engine.contract.probe(fresh=True)
        assert bits_of(engine.generate(PROMPTS, PARAMS)) == alone
        assert engine.fingerprint == fingerprint


# And families in which they do; llama has no linear that autocast knows.
CHANGES_BITS = {
    "autocast": "gpt2",
    "dispatch mode": "llama",
    "function mode": "llama",
    "mkldnn bf16": "llama",
}
OTHERS = [("autocast", "gemma2"), ("default device", "gpt2"), ("default dtype", "gpt_neox")]


@pytest.mark.parametrize(("name", "family"), OTHERS)
def test_settings_and_families(name, family):
    engine, alone, _ = served(family)
    with SETTINGS[name]():
        assert bits_of(engine.generate(PROMPTS, PARAMS)) == alone


@pytest.mark.parametrize(("name", "family"), CHANGES_BITS.items())
def test_control_unpinned_settings_change_bits(name, family, monkeypatch):
    """Without the pins, and without the modes set aside."""
    engine, alone, _ = served(family)
    monkeypatch.setattr(torch_settings, "_apply", lambda settings: False)
    monkeypatch.setattr(core, "moved", lambda *_: None)
    monkeypatch.setattr(torch._C, "_len_torch_function_stack", lambda: 0)
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    with SETTINGS[name]():
        assert bits_of(engine.generate(PROMPTS, PARAMS)) != alone


def test_code_of_the_user_has_the_callers_modes():
    """A processor and a criterion, called within a step."""
    seen = []

    def processor(ids, scores):
        seen.append(torch.empty(1).is_meta)
        return scores

    def criterion(ids, scores):
        seen.append(torch.empty(1).is_meta)
        return False

    code = {"logits_processors": [processor], "stopping_criteria": [criterion]}
    engine = served()[0]
    for meta in (True, False):
        with torch.device("meta") if meta else nullcontext():
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, **code))
        assert seen == [meta] * 6
        seen.clear()


UPWARDS = 0x800
rounds = pytest.mark.skipif(not can_round(), reason="no rounding mode to set")


@rounds
@pytest.mark.parametrize("ends", [True, False], ids=["", "control"])
def test_what_code_of_the_user_sets_ends_with_it(ends, monkeypatch):
    """Deterministic requests are sampled in one step with a plain one whose processor changes how
    the process rounds."""
    if not ends:
        monkeypatch.setattr(processors, "callers_modes", nullcontext)
    engine, alone, _ = served()

    def processor(ids, scores):
        openmp.set_rounding_mode(UPWARDS)
        return scores

    plain = SamplingParams(max_new_tokens=4, logits_processors=[processor])
    outputs = engine.generate([[5], *PROMPTS], [plain, *[PARAMS] * len(PROMPTS)])
    assert openmp.rounding_mode() == 0
    assert (bits_of(outputs[1:]) == alone) is ends


class Decoder:
    """A tokenizer that changes how the process rounds."""

    def decode(self, ids, **_):
        openmp.set_rounding_mode(UPWARDS)
        return str(ids)


@rounds
def test_what_a_tokenizer_sets_ends_with_it(monkeypatch):
    found = []
    with Engine(tiny(), Decoder(), CONFIG) as engine:
        inner = engine.runner.forward

        def forward(*args):
            found.append(openmp.rounding_mode())
            return inner(*args)

        monkeypatch.setattr(engine.runner, "forward", forward)
        try:
            params = SamplingParams(max_new_tokens=6, stop_strings=["!"])
            engine.generate([[1, 2, 3]], params)
        finally:  # the last text is made after the call's steps
            openmp.set_rounding_mode(0)
    assert found == [0] * 6


OF_SETTINGS = [name for name, how in PINNED.items() if isinstance(how, tuple)]
OF_SETTINGS.remove("default device")  # a mode


@pytest.mark.parametrize("name", [*OF_SETTINGS, *HARMLESS])
def test_a_setting_that_moved_during_a_pass(name):
    """One of the process is named until it is pinned again; what changes no bit is not, nor what
    no other thread can move."""
    with TorchState(torch.device("cpu"))():
        assert moved() is None
        with suppress(AssertionError), SETTINGS[name]():
            found = moved()
            pin_again("cpu")
            assert moved() is None
        assert moved() is None
    settings = [setting.name for setting in torch_settings._of_process()]
    of_thread = name in ("flush denormal", "autocast", "rounding mode", "OpenMP dynamic")
    assert (found in settings) is (name in OF_SETTINGS and not of_thread)


def test_a_setting_that_another_thread_sets_back_as_a_pass_ends(monkeypatch):
    """It is told at every moment: while the setting is another, and as soon as it is not."""
    apply, found = torch_settings._apply, []

    def slowly(settings):
        moved_at_all = apply(settings)
        asked = Thread(target=lambda: found.append(moved(before)))
        asked.start()
        asked.join()
        return moved_at_all

    with pinned("cpu"):
        before = torch_settings.moves()
        torch.set_default_dtype(torch.float64)
        assert moved(before) == "dtype"
        monkeypatch.setattr(torch_settings, "_apply", slowly)
        torch_settings.pin_process()
        assert torch.get_default_dtype() == torch.float32 and found == ["settings"]
        assert moved(before) == "settings" and moved(torch_settings.moves()) is None


@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_another_thread_sets_meanwhile_stays(meanwhile):
    """When the last block ends; the others come back (control)."""
    get, put = C._get_mkldnn_deterministic, C._set_mkldnn_deterministic
    torch.set_default_dtype(torch.float64)
    put(not meanwhile)
    try:
        with pinned("cpu"):
            with pinned("cpu"):
                assert (get(), torch.get_default_dtype()) == (False, torch.float32)
            if meanwhile:
                thread = Thread(target=put, args=(True,))
                thread.start()
                thread.join()
        assert (get(), torch.get_default_dtype()) == (True, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
        put(False)


def test_every_setting_is_in_the_table():
    """With why it is pinned."""
    table = Path(determinism.__file__).with_name("README.md").read_text()
    settings = (
        *torch_settings._of_process(),
        *torch_settings._of_gpus(),
        *torch_settings._of_thread("cpu"),
    )
    for name in {setting.name for setting in settings}:
        assert f"\n| {name} | " in table, name


def test_workers_that_flush(two_threads):
    """They inherit it from the thread that begins them; a pass turns it off in all of them."""
    numbers = torch.full((1 << 17,), 2.0**-140)
    found = []

    def begin_workers() -> None:
        torch.set_flush_denormal(True)
        found.append(int((numbers * 1.0).count_nonzero()))
        with TorchState(torch.device("cpu"))():
            found.append(int((numbers * 1.0).count_nonzero()))
        found.append(openmp.flushes())

    thread = Thread(target=begin_workers)
    thread.start()
    thread.join()
    assert found == [0, len(numbers), True]


def test_subnormal_numbers_are_kept():
    """Logits so small that flushing them would leave all tokens equally likely."""
    model = tiny()
    model.lm_head.weight.data.mul_(1e-39)
    params = SamplingParams(max_new_tokens=3, deterministic=True)
    with Engine(model, config=CONFIG) as engine:
        alone = bits_of(engine.generate(PROMPTS, params))
        with SETTINGS["flush denormal"]():
            assert not (model.lm_head.weight * 1.0).any(), "control"
            assert bits_of(engine.generate(PROMPTS, params)) == alone
    assert len({tuple(tokens) for ((tokens, *_),) in alone}) > 1


def test_hooks_on_all_modules_are_refused():
    engine, alone, fingerprint = served()
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(DeterminismError, match="a forward hook on all modules"):
            engine.generate(PROMPTS, PARAMS)
    finally:
        handle.remove()
    assert bits_of(engine.generate(PROMPTS, PARAMS)) == alone
    assert engine.fingerprint == fingerprint
