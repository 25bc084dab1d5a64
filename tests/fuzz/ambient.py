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
from concurrent.futures import ThreadPoolExecutor
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
HALVES = (torch.bfloat16, torch.float16)
cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn


@contextmanager
def grad_mode(rng: random.Random) -> Iterator[None]:
    """Gradients recorded, forbidden or checked."""
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    with rng.choice(modes)(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def denormals_are_flushed() -> bool:
    """Whether this thread makes zeros of denormal numbers."""
    return not bool(torch.tensor([2.0**-140], dtype=torch.float32).mul(0.5).item())


def _attribute(owner: Any, name: str, values: tuple[Any, ...]) -> Setting:
    return lambda value: setattr(owner, name, value), lambda: getattr(owner, name), values


def _disturb(state: Tensor | int) -> None:
    if isinstance(state, int):
        torch.manual_seed(state)
    else:
        torch.set_rng_state(state)


# <fenv.h> on x86-64: to nearest, down, up, towards zero.
NEAREST, OTHERS = 0x000, (0x400, 0x800, 0xC00)


def can_round() -> bool:
    """Whether the rounding mode can be set here."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


def _rounding() -> int:
    return _libm().fegetround() if can_round() else NEAREST


SETTINGS: dict[str, Setting] = {
    "default dtype": (torch.set_default_dtype, torch.get_default_dtype, (torch.float64, *HALVES)),
    "flush denormal": (torch.set_flush_denormal, denormals_are_flushed, (True,)),
    "matmul precision": (
        *(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision),
        ("high", "medium"),
    ),
    "threads": (torch.set_num_threads, torch.get_num_threads, (2, 3)),
    "deterministic algorithms": (
        *(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
        (True,),
    ),
    "flash attention off": (cuda.enable_flash_sdp, cuda.flash_sdp_enabled, (False,)),
    "mkldnn off": _attribute(mkldnn, "enabled", (False,)),
    "mkldnn matmul precision": _attribute(
        mkldnn.matmul,  # type: ignore[attr-defined]
        "fp32_precision",
        ("bf16", "tf32"),
    ),
    "global random state": (_disturb, torch.get_rng_state, (1, 2, 3)),
    "rounding mode": (lambda mode: _libm().fesetround(mode), _rounding, OTHERS),
    # All threads on one core.
    "one core": (
        lambda cores: os.sched_setaffinity(0, cores),
        lambda: os.sched_getaffinity(0),
        ({min(os.sched_getaffinity(0))},),
    ),
}


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


def hook_all_modules() -> Callable[[], None]:
    """A forward hook of every module of the process that gives linears other results; how it is
    removed."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return _nudged(output) if hasattr(module, "in_features") else None

    return register_module_forward_hook(hook).remove


def state() -> dict[str, object]:
    """What a run must leave as it was."""
    found = {name: get() for name, (_, get, _) in SETTINGS.items()}
    del found["global random state"]
    if found["mkldnn matmul precision"] == "none":
        found["mkldnn matmul precision"] = "ieee"
    return found | {
        "default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
    }


def _thread(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` over and over in another thread; how it is ended, where its error is raised."""
    ended, pool = threading.Event(), ThreadPoolExecutor(1)

    def run() -> None:
        while not ended.is_set():
            work()

    future = pool.submit(run)

    def end() -> None:
        ended.set()
        pool.shutdown()
        future.result()

    return end


def busy_thread() -> Callable[[], None]:
    """Matrix products in another thread."""
    a = torch.randn(160, 160)
    return _thread(lambda: a @ a)


@cache
def _other() -> Engine:
    config = EngineConfig(reference_rows=8, max_rows=16, page_size=16, num_pages=32)
    return Engine(tiny("gpt2"), config=config)


def engine_in_a_thread() -> Callable[[], None]:
    """Plain requests of another engine in another thread."""
    engine, params = _other(), SamplingParams(max_new_tokens=3)
    return _thread(lambda: engine.generate([[1, 2, 3]], params))


def allocate(rng: random.Random) -> Callable[[], None]:
    """Memory of many sizes, half of it given back; how the rest is."""
    kept = [torch.empty(rng.randrange(1, 1 << 14)) for _ in range(400)]
    del kept[::2]
    return kept.clear


def poison_memory() -> Callable[[], None]:
    """NaN in the memory that is given out next."""
    made = [torch.full((16 << n,), torch.nan) for n in range(13) for _ in range(8)]
    made.clear()
    return made.clear
