"""A model goes over to an engine and back in exchanges that may be cut off anywhere: by Ctrl-C at
any line, by real signals, by memory that runs out in any write. Afterwards the model is wholly its
own or wholly served, the next call works, and ``unpatch`` restores it.
"""

from __future__ import annotations

import _signal
import contextlib
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support import signals
from tests.support.drop_in import PAD, SMALL, portrait
from tests.support.moe import tiny_moe
from tests.support.tiny import config_of
from tinyspec import Engine
from tinyspec.engine import lock as interrupts
from tinyspec.model import exchange, torch_settings

pytestmark = pytest.mark.usefixtures("sigint")
ROOT = Path(tinyspec.__file__).parent
IDS = torch.tensor([[5, 17, 3]])
EXCHANGE = ("model/exchange", "model/patched_model", "model/lending", "model/row_tiles")
HELD = (
    *EXCHANGE,
    *("model/install", "model/config_views", "model/torch_state", "model/torch_settings"),
    *("engine/engine", "engine/lifetime", "engine/lock", "engine/request_tracker"),
    *("engine/core", "engine/launcher", "determinism/contract", "determinism/probes/steps"),
    *("drop_in/patched_generate", "drop_in/patching"),
    "runner/model_runner",
)


def files(names):
    return {str(ROOT / f"{name}.py") for name in names}


def small():
    config = config_of("llama")
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


class Scene:
    """A model, and what is done to it; ``check`` says whether all is well afterwards."""

    def __init__(self, model=None):
        self.model = small() if model is None else model
        self.before = portrait(self.model)
        self.logits = self.model(IDS).logits
        self.expected = self.generated()
        self.engine = None

    def generated(self, **settings):
        return self.model.generate(IDS, max_new_tokens=2, pad_token_id=PAD, **settings).tolist()

    def begin(self, deed):
        """What comes before ``deed``."""
        if deed in ("call", "fail", "prove", "unpatch"):
            tinyspec.patch(self.model, SMALL)
        elif deed not in ("patch", "make"):
            self.engine = Engine(self.model, config=SMALL)
        if deed == "resume":
            self.engine.suspend()

    def do(self, deed):
        if deed == "patch":
            tinyspec.patch(self.model, SMALL)
        elif deed == "unpatch":
            tinyspec.unpatch(self.model)
        elif deed == "call":
            self.generated()
        elif deed == "prove":
            self.generated(deterministic=True)
        elif deed == "make":
            self.engine = Engine(self.model, config=SMALL)
        elif deed == "lend":
            self.model(IDS)
        elif deed == "take over":
            self.engine = Engine(self.model, config=SMALL)
        else:
            getattr(self.engine, deed)()

    def check(self):
        model = self.model
        assert torch.equal(model(IDS).logits, self.logits), "served or not, a forward works"
        assert not torch.is_inference_mode_enabled() and not interrupts._guards
        assert not torch_settings._shared._threads
        if "generate" in vars(model):
            assert self.generated() == self.expected
            assert not self.others(self._locked)
        if self.engine is not None and self.engine.closed is None:
            assert self.engine.resume()
            output = self.engine.generate(IDS.tolist(), tinyspec.SamplingParams(max_new_tokens=2))
            assert [IDS[0].tolist() + output[0].completions[0].token_ids] == self.expected
        self.engine = None
        tinyspec.unpatch(model)
        assert portrait(model) == self.before
        with_ours = tinyspec.patch(model, SMALL) or self.generated()
        tinyspec.unpatch(model)
        assert with_ours == self.expected
        assert portrait(model) == self.before

    def _locked(self):
        lock = self.model.generate._lock
        if lock.acquire(timeout=1):
            lock.release()
            return False
        return True

    @staticmethod
    def others(function):
        """What another thread gets."""
        found = []
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found[0]


DEEDS = ("call", "patch", "unpatch", "make", "suspend", "resume", "close", "lend", "take over")


def lines(scene, deed, names):
    """The lines of these files that a deed runs, each once."""
    scene.begin(deed)
    with signals.lines_of(files(names) | {contextlib.__file__}) as found:
        scene.do(deed)
    scene.check()
    return sorted(set(found))


def cut_off(scene, deed, line, names):
    scene.begin(deed)
    before = signals.handler()
    interrupted = False
    try:
        with signals.interrupt_at_line(files(names) | {contextlib.__file__}, line):
            scene.do(deed)
    except KeyboardInterrupt:
        interrupted = True
    assert signals.handler() is before and sys.gettrace() is None
    scene.check()
    return interrupted


def run_lines(deed, names, count=None):
    scene = Scene()
    found = lines(scene, deed, names)
    assert len(found) > 20
    drawn = found if count is None else random.Random(deed).sample(found, count)
    assert any([cut_off(scene, deed, line, names) for line in drawn])


@pytest.mark.parametrize("deed", ["call", "patch", "suspend"])
def test_ctrl_c_at_some_lines(deed):
    run_lines(deed, HELD, 2)


@pytest.mark.slow("random use", 240)
@pytest.mark.parametrize("deed", DEEDS)
def test_ctrl_c_at_every_line(deed):
    run_lines(deed, HELD)


@pytest.mark.slow("random use", 600)
def test_ctrl_c_at_every_line_of_the_proof(no_results_on_disk):
    run_lines("prove", ("determinism/contract", "determinism/probes/steps", "engine/lock"))


@pytest.fixture
def nothing_is_held_back(monkeypatch):
    """As with a handler that is not Python's: the record alone counts."""
    monkeypatch.setattr(_signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signals, "handler", lambda: None)


@pytest.mark.parametrize("deed", ["call", "suspend"])
def test_ctrl_c_at_some_lines_of_an_exchange_that_is_not_held(deed, nothing_is_held_back):
    run_lines(deed, EXCHANGE, 2)


@pytest.mark.slow("random use", 60)
@pytest.mark.parametrize("deed", DEEDS)
def test_ctrl_c_at_every_line_of_an_exchange_that_is_not_held(deed, nothing_is_held_back):
    run_lines(deed, EXCHANGE)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """It could not be put back."""
    monkeypatch.setattr(_signal, "getsignal", lambda number: None)
    set_to = []
    monkeypatch.setattr(_signal, "signal", lambda *args: set_to.append(args))
    with interrupts.between_steps(), interrupts.at_once():
        pass
    assert set_to == []


def test_ctrl_c_at_once_while_transformers_runs():
    """A call that is not served takes no notice of what is held back for others."""
    scene = Scene()
    tinyspec.patch(scene.model, SMALL)

    def interrupts_itself(*_):
        signals.interrupt()
        raise AssertionError("went on")

    handle = scene.model.lm_head.register_forward_pre_hook(interrupts_itself)
    with pytest.raises(KeyboardInterrupt):
        scene.generated(num_beams=2)
    handle.remove()
    scene.check()


@pytest.mark.slow("random use", 120)
def test_300_real_signals():
    scene, rng = Scene(), random.Random(0)
    tinyspec.patch(scene.model, SMALL)
    came = 0
    for _ in range(300):
        thread = threading.Thread(target=late_signal, args=[rng.random() * 0.03])
        try:
            thread.start()
            while thread.is_alive():
                scene.generated()
            time.sleep(0.01)
        except KeyboardInterrupt:
            came += 1
        thread.join()
        assert scene.generated() == scene.expected
    assert came > 250
    scene.check()


def late_signal(seconds):
    time.sleep(seconds)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


class Failing:
    """``exchange.write``, whose ``number``-th call raises, before or after it writes."""

    def __init__(self, monkeypatch, number, late=False):
        self.left, self.late, self.failed = number, late, False
        self.write = exchange.write
        for module in list(sys.modules.values()):
            if vars(module).get("write") is self.write and module.__name__.startswith("tinyspec"):
                monkeypatch.setattr(module, "write", self)

    def __call__(self, table, key, value):
        self.left -= 1
        if self.left == 0 and self.late:
            self.write(table, key, value)
        if self.left == 0:
            self.failed = True
            raise MemoryError
        self.write(table, key, value)


AFTER = ("next call", "unpatch", "close")


def out_of_memory(scene, deed, number, late, after):
    """Whether the deed makes so many writes."""
    scene.begin(deed)
    with pytest.MonkeyPatch.context() as patches:
        write = Failing(patches, number, late)
        with contextlib.suppress(MemoryError):
            scene.do(deed)
    if write.failed:
        if after == "unpatch":
            tinyspec.unpatch(scene.model)
        elif after == "close" and scene.engine is not None:
            scene.engine.close()
            assert portrait(scene.model) == scene.before
    scene.check()
    return write.failed


def test_memory_runs_out_in_some_writes():
    scene, rng = Scene(), random.Random(0)
    for number, deed in enumerate(("call", "suspend", "close")):
        assert out_of_memory(scene, deed, rng.randint(1, 15), bool(number % 2), AFTER[number])


@pytest.mark.slow("random use", 120)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("deed", DEEDS)
def test_memory_runs_out_in_every_write(deed, late):
    scene = Scene()
    for number in range(1, 1000):
        if not all([out_of_memory(scene, deed, number, late, after) for after in AFTER]):
            break
    assert number > (1 if deed == "unpatch" else 10)


@pytest.mark.slow("random use", 60)
def test_memory_runs_out_while_experts_are_served():
    scene = Scene(tiny_moe())
    numbers = range(1, 400, 7)
    assert any([out_of_memory(scene, "call", n, False, "next call") for n in numbers])
