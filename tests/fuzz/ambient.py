"""torch's global state, the processor's, and what else goes on in the process, for the table of
influences.

A setting is (put, get, values): ``put(get())`` restores it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams

Setting = tuple[Callable[[Any], Any], Callable[[], Any], tuple[Any, ...]]


@contextmanager
def default_dtype(rng: random.Random) -> Iterator[None]:
    """Another dtype for tensors that are made without one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(rng.choice((torch.float64, torch.bfloat16, torch.float16)))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_device() -> torch.device:
    """Tensors made without a device have no data."""
    return torch.device("meta")


def autocast(rng: random.Random) -> torch.autocast:
    """Linears in another dtype."""
    return torch.autocast("cpu", dtype=rng.choice((torch.bfloat16, torch.float16)))


@contextmanager
def grad_mode(rng: random.Random) -> Iterator[None]:
    """Gradients recorded, forbidden or checked."""
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    with rng.choice(modes)(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def denormals_are_flushed() -> bool:
    """Whether this thread makes zeros of denormal numbers."""
    return not bool(torch.tensor([2.0**-140], dtype=torch.float32).mul(0.5).item())


FLUSH: Setting = (torch.set_flush_denormal, denormals_are_flushed, (True,))
MATMUL_PRECISION: Setting = (
    torch.set_float32_matmul_precision,
    torch.get_float32_matmul_precision,
    ("high", "medium"),
)
THREADS: Setting = (torch.set_num_threads, torch.get_num_threads, (2, 3))
DETERMINISTIC_ALGORITHMS: Setting = (
    torch.use_deterministic_algorithms,
    torch.are_deterministic_algorithms_enabled,
    (True,),
)
FLASH: Setting = (
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cuda.flash_sdp_enabled,
    (False,),
)


def _attribute(owner: Any, name: str, values: tuple[Any, ...]) -> Setting:
    return lambda value: setattr(owner, name, value), lambda: getattr(owner, name), values


MKLDNN = _attribute(torch.backends.mkldnn, "enabled", (False,))
MKLDNN_MATMUL = _attribute(
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    "fp32_precision",
    ("bf16", "tf32"),
)


def _disturb(state: Tensor | int) -> None:
    if isinstance(state, int):
        torch.manual_seed(state)
    else:
        torch.set_rng_state(state)


RANDOM_STATE: Setting = (_disturb, torch.get_rng_state, (1, 2, 3))

# <fenv.h> on x86-64: to nearest, down, up, towards zero.
NEAREST, OTHERS = 0x000, (0x400, 0x800, 0xC00)


def can_round() -> bool:
    """Whether the rounding mode can be set here."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


ROUNDING: Setting = (
    lambda mode: _libm().fesetround(mode),
    lambda: _libm().fegetround(),
    OTHERS,
)


def _nudged(value: Any) -> Any:
    """Floating-point results a little larger, so that their bits are others."""
    return value * (1 + 2**-5) if isinstance(value, Tensor) else value


_PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "_linear_pointwise")


class OtherFunctions(TorchFunctionMode):
    """Linear layers with other results."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _nudged(result) if getattr(func, "__name__", "") in _PRODUCTS else result


class OtherOperators(TorchDispatchMode):
    """Matrix products with other results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        product = func.__name__.partition(".")[0] in _PRODUCTS
        return _nudged(result) if product else result


@contextmanager
def hook_of_all_modules() -> Iterator[None]:
    """A forward hook of every module of the process that gives linears other results."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return _nudged(output) if hasattr(module, "in_features") else None

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def state() -> dict[str, object]:
    """What a run must leave as it was."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "flush denormal": denormals_are_flushed(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "mkldnn matmul": "ieee" if precision == "none" else precision,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "rounding": ROUNDING[1]() if can_round() else NEAREST,
    }


@contextmanager
def _thread(work: Callable[[], object]) -> Iterator[None]:
    """``work`` over and over in another thread; its error, if any, is raised at the end."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]


def busy_thread() -> Any:
    """Matrix products in another thread."""
    a = torch.randn(160, 160)
    return _thread(lambda: a @ a)


@cache
def _other() -> Engine:
    config = EngineConfig(reference_rows=8, max_rows=16, page_size=16, num_pages=32)
    return Engine(tiny("gpt2"), config=config)


def engine_in_a_thread() -> Any:
    """Plain requests of another engine in another thread."""
    engine, params = _other(), SamplingParams(max_new_tokens=3)
    return _thread(lambda: engine.generate([[1, 2, 3]], params))


@contextmanager
def allocations(rng: random.Random) -> Iterator[None]:
    """Memory of many sizes, half of it given back."""
    kept = [torch.empty(rng.randrange(1, 1 << 14)) for _ in range(400)]
    del kept[::2]
    yield
    kept.clear()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """NaN in the memory that is given out next."""
    sizes = [16 << n for n in range(13)] * 8
    made = [torch.full((size,), torch.nan) for size in sizes]
    made.clear()
    yield


@contextmanager
def one_core() -> Iterator[None]:
    """All threads on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
