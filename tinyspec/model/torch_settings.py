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
    """How a setting is read and written, and a value for it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    value: Any


Settings = tuple[Setting, ...]


def _precision(backend: str, operator: str) -> Setting:
    """fp32 products and sums in fp32: no TF32, no bf16."""
    where = backend, operator
    get = partial(_C._get_fp32_precision_getter, *where)
    return Setting(get, partial(_C._set_fp32_precision_setter, *where), "ieee")


def _twofold(get: Callable[[], Any], put: Callable[[Any], Any], off: Any, *where: str) -> Setting:
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

    return Setting(read, write, (off, *(setting.value for setting in newer)))


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

    return Setting(get, put, (False, True) if isinstance(get(), tuple) else False)


@cache
def _of_process(device_type: str) -> Settings:
    """Settings that all threads share."""
    einsum: Any = torch.backends.opt_einsum
    common = (
        Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        Setting(_deterministic, _set_deterministic, (False, False)),
        Setting(einsum._get_enabled, einsum._set_enabled, False),
    )
    if device_type != "cuda":
        return (
            *common,
            _precision("mkldnn", "matmul"),
            _precision("mkldnn", "conv"),
            Setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True),
            Setting(_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic, False),
        )
    return (
        *common,
        _twofold(
            _C._get_float32_matmul_precision,
            _C._set_float32_matmul_precision,
            "highest",
            "cuda matmul",
            "mkldnn matmul",
        ),
        _twofold(
            _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32, False, "cuda conv", "cuda rnn"
        ),
        _reduction("bf16"),
        _reduction("fp16"),
        Setting(
            _C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation, False
        ),
        # Of the multiprocessors, how many products of cuBLASLt leave free.
        Setting(_C._get_sm_carveout_experimental, _C._set_sm_carveout_experimental, None),
        Setting(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark, False),
    )


@cache
def _of_thread(device_type: str) -> Settings:
    """Settings that every thread has for itself."""
    return (
        Setting(
            partial(torch.is_autocast_enabled, device_type),
            partial(torch.set_autocast_enabled, device_type),
            False,
        ),
        Setting(openmp.flushes, torch.set_flush_denormal, False),
        Setting(openmp.rounding_mode, openmp.set_rounding_mode, 0),
        Setting(openmp.is_dynamic, openmp.set_dynamic, False),
    )


def _apply(settings: Settings) -> None:
    """Set what has another value."""
    for get, put, value in settings:
        if get() != value:
            put(value)


def _restore(settings: Settings, values: list[Any]) -> None:
    """Set what has another value than in ``values``."""
    for (get, put, _), value in zip(settings, values, strict=True):
        if get() != value:
            put(value)


class _Shared:
    """The settings of the process for one kind of device, pinned while any thread asks for it; when
    the last one ends they are as before."""

    def __init__(self, device_type: str):
        self._wanted = _of_process(device_type)
        self._before: list[Any] = []
        self._holders = 0
        self._lock = Lock()

    def acquire(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = [get() for get, _, _ in self._wanted]
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _restore(self._wanted, self._before)


_shared = cache(_Shared)


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
    shared = _shared(device_type)
    shared.acquire()
    own = _of_thread(device_type)
    before = [get() for get, _, _ in own]
    try:
        pin_again(device_type)
        yield
    finally:
        _restore(own, before)
        shared.release()
