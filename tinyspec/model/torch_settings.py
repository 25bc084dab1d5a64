"""torch's settings that can change a bit, of the process and of a thread, and their values in
passes.

``determinism/README.md`` lists all of torch's global state and says why the rest is not here. Knows
neither models nor passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, local
from typing import Any, NamedTuple

import torch

from tinyspec.model import openmp

_C: Any = torch._C


class Setting(NamedTuple):
    """How a setting is read and written, and a value for it.

    name: equal for two of which writing one can change the other. Kinds of devices want the same
    of those that they share, so neither of two has to wait for the other.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    value: Any


Settings = tuple[Setting, ...]


def _precision(backend: str, operator: str) -> Setting:
    """fp32 products and sums in fp32: no TF32, no bf16."""
    where = backend, operator
    get = partial(_C._get_fp32_precision_getter, *where)
    return Setting(operator, get, partial(_C._set_fp32_precision_setter, *where), "ieee")


def _twofold(
    name: str, get: Callable[[], Any], put: Callable[[Any], Any], off: Any, *where: str
) -> Setting:
    """fp32 products on CUDA in fp32, where torch holds the precision twice: by operator (``where``,
    "backend operator"), and in an older setting (``get``, ``put``; ``off``: no TF32), which it
    refuses to read while the two contradict each other. Read and written are (older, *newer)."""
    newer = [_precision(*operator.split()) for operator in where]

    def older_beside_ieee() -> Any:
        try:
            return get()
        except RuntimeError:  # of the two values that such a setting has, the other
            return not off

    def read() -> tuple[Any, ...]:
        values = [setting.get() for setting in newer]
        try:
            return get(), *values
        except RuntimeError:  # the caller has set them apart
            _apply(tuple(newer))
            older = older_beside_ieee()
            _restore(tuple(newer), values)
            return older, *values

    def write(values: tuple[Any, ...]) -> None:
        put(values[0])  # sets the newer ones as well
        _restore(tuple(newer), list(values[1:]))

    return Setting(name, read, write, (off, *(setting.value for setting in newer)))


def _deterministic() -> tuple[bool, bool]:
    return (
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    mode, warn_only = value
    _C._set_deterministic_algorithms(mode, warn_only=warn_only)


def _reduction(kind: str) -> Setting:
    """No sums in the 16-bit type ``kind``; since torch 2.13 with another flag, for split-K."""
    get = getattr(_C, f"_get_cublas_allow_{kind}_reduced_precision_reduction")
    whole = getattr(_C, f"_set_cublas_allow_{kind}_reduced_precision_reduction")

    def put(value: bool | tuple[bool, bool]) -> None:
        whole(*value) if isinstance(value, tuple) else whole(value)

    value = (False, True) if isinstance(get(), tuple) else False
    return Setting(f"{kind} reduction", get, put, value)


@cache
def _common() -> Settings:
    """Of those, the ones that passes on every device look at."""
    einsum: Any = torch.backends.opt_einsum
    return (
        Setting("dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        Setting("deterministic algorithms", _deterministic, _set_deterministic, (False, False)),
        Setting("einsum", einsum._get_enabled, einsum._set_enabled, False),
    )


@cache
def _of_process(device_type: str) -> Settings:
    """Settings that all threads share."""
    if device_type != "cuda":
        deterministic = _C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic
        return (
            *_common(),
            _precision("mkldnn", "matmul"),
            _precision("mkldnn", "conv"),
            Setting("mkldnn", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True),
            Setting("mkldnn deterministic", *deterministic, False),
        )
    matmul = _C._get_float32_matmul_precision, _C._set_float32_matmul_precision
    tf32 = _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32
    fp16 = _C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation
    carveout = _C._get_sm_carveout_experimental, _C._set_sm_carveout_experimental
    return (
        *_common(),
        _twofold("matmul", *matmul, "highest", "cuda matmul", "mkldnn matmul"),
        _twofold("cudnn", *tf32, False, "cuda conv", "cuda rnn"),
        _reduction("bf16"),
        _reduction("fp16"),
        Setting("fp16 accumulation", *fp16, False),
        # Of the multiprocessors, how many products of cuBLASLt leave free.
        Setting("multiprocessors", *carveout, None),
        Setting("cudnn benchmark", _C._get_cudnn_benchmark, _C._set_cudnn_benchmark, False),
    )


@cache
def _of_thread(device_type: str) -> Settings:
    """Settings that every thread has for itself."""
    return (
        Setting(
            "autocast",
            partial(torch.is_autocast_enabled, device_type),
            partial(torch.set_autocast_enabled, device_type),
            False,
        ),
        Setting("subnormal numbers", openmp.flushes, torch.set_flush_denormal, False),
        Setting("rounding", openmp.rounding_mode, openmp.set_rounding_mode, 0),
        Setting("OpenMP dynamic", openmp.is_dynamic, openmp.set_dynamic, False),
    )


def _apply(settings: Settings) -> None:
    """Set what has another value."""
    for _, get, put, value in settings:
        if get() != value:
            put(value)


def _restore(settings: Settings, values: list[Any]) -> None:
    """Set what has another value than in ``values``."""
    for (_, get, put, _), value in zip(settings, values, strict=True):
        if get() != value:
            put(value)


class _Shared:
    """The settings of the process, each pinned while any thread on any kind of device asks for it;
    when the last one ends it is as before the first."""

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}  # by kind of device
        self._before: list[tuple[Setting, Any]] = []  # in the order in which they were pinned
        self._lock = Lock()

    def acquire(self, device_type: str) -> None:
        with self._lock:
            threads = self._threads.get(device_type, 0)
            if not threads:
                known = [setting for setting, _ in self._before]
                fresh = [s for s in _of_process(device_type) if s not in known]
                self._before += [(setting, setting.get()) for setting in fresh]
            self._threads[device_type] = threads + 1

    def release(self, device_type: str) -> None:
        with self._lock:
            self._threads[device_type] -= 1
            if self._threads[device_type]:
                return
            del self._threads[device_type]
            asked = {s.name for kind in self._threads for s in _of_process(kind)}
            # The last first: of two with one name the first has what was there before both.
            for setting, value in reversed(self._before):
                if setting.name not in asked and setting.get() != value:
                    setting.set(value)
            self._before = [pair for pair in self._before if pair[0].name in asked]


_shared = _Shared()


class _Workers(local):
    """How many threads the calling thread had when its workers were last looked at."""

    threads = 1


_workers = _Workers()


def pin_again(device_type: str) -> None:
    """Within ``pinned``: set again what was changed meanwhile."""
    _apply(_of_process(device_type))
    _apply(_of_thread(device_type))
    if (threads := torch.get_num_threads()) != _workers.threads:
        openmp.settle()
        _workers.threads = threads


@contextmanager
def pinned(device_type: str) -> Iterator[None]:
    """The values that passes have, while the block runs."""
    shared = _shared
    shared.acquire(device_type)
    own = _of_thread(device_type)
    before = [setting.get() for setting in own]
    try:
        pin_again(device_type)
        yield
    finally:
        _restore(own, before)
        shared.release(device_type)
