"""torch's settings that can change a bit, of the process and of a thread, and their values in
passes.

``determinism/README.md`` lists all of torch's global state and says why the rest is not here. Knows
neither models nor passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, local
from typing import Any, NamedTuple

import torch

from tinyspec.model import openmp

logger = logging.getLogger("tinyspec")
_C: Any = torch._C
# The newest that was tested. A later one may have settings that are not in the reviewed list of
# ``tests/model/test_torch_setters.py``.
NEWEST_TORCH = (2, 14)


class Setting(NamedTuple):
    """How a setting is read and written, and its value in passes."""

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
    """fp32 products in fp32, where torch holds the precision twice: by operator (``where``,
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


def _reduction(library: str, kind: str) -> Setting:
    """No sums in the 16-bit type ``kind``; cuBLAS's with another flag since torch 2.13, for
    split-K."""
    get = getattr(_C, f"_get_{library}_allow_{kind}_reduced_precision_reduction")
    whole = getattr(_C, f"_set_{library}_allow_{kind}_reduced_precision_reduction")

    def put(value: bool | tuple[bool, bool]) -> None:
        whole(*value) if isinstance(value, tuple) else whole(value)

    value = (False, True) if isinstance(get(), tuple) else False
    return Setting(f"{library} {kind} reduction", get, put, value)


@cache
def _of_process() -> Settings:
    """Settings that all threads share, of every kind of device that is here."""
    if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST_TORCH:
        logger.warning("torch %s is newer than any tested, %d.%d", torch.__version__, *NEWEST_TORCH)
    deterministic = _C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic
    algorithms = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    einsum: Any = torch.backends.opt_einsum
    # What was set as an attribute hides the module's own.
    own, hiding = vars(einsum.m), vars(einsum)

    def put(value: bool) -> None:
        (hiding if "enabled" in hiding else own)["enabled"] = value

    gpu = torch.cuda.is_available()
    return (
        Setting("dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        Setting("deterministic algorithms", *algorithms, 0),
        Setting("einsum", lambda: hiding.get("enabled", own["enabled"]), put, False),
        _precision("mkldnn", "conv"),
        Setting("mkldnn", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True),
        Setting("mkldnn deterministic", *deterministic, False),
        _reduction("cpu", "fp16"),  # where its instructions can (ARM)
        *(_of_gpus() if gpu else (_precision("mkldnn", "matmul"),)),
    )


def _of_gpus() -> Settings:
    """Those of cuBLAS and cuDNN; of products of a CPU as well, which one of them sets."""
    matmul = _C._get_float32_matmul_precision, _C._set_float32_matmul_precision
    tf32 = _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32
    fp16 = _C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation
    # Since torch 2.14.
    prefer = "cublaslt_prefer_grouped_gemm"
    grouped: Any = [getattr(_C, f"_{verb}_{prefer}", None) for verb in ("get", "set")]
    carveout = _C._get_sm_carveout_experimental, _C._set_sm_carveout_experimental
    return (
        _twofold("matmul", *matmul, "highest", "cuda matmul", "mkldnn matmul"),
        _twofold("cudnn", *tf32, False, "cuda conv", "cuda rnn"),
        _reduction("cublas", "bf16"),
        _reduction("cublas", "fp16"),
        Setting("fp16 accumulation", *fp16, False),
        # Of the multiprocessors, how many products of cuBLASLt leave free.
        Setting("multiprocessors", *carveout, None),
        *([Setting("grouped products", grouped[0], grouped[1], False)] if all(grouped) else []),
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


def _restore(settings: Settings, values: Iterable[Any]) -> bool:
    """Set what has another value than in ``values``; whether anything had."""
    others = [(put, v) for (_, get, put, _), v in zip(settings, values, strict=True) if get() != v]
    for put, value in others:
        put(value)
    return bool(others)


@cache
def _quick() -> tuple[list[Callable[[], Any]], list[Any]]:
    return [each.get for each in _of_process()], [each.value for each in _of_process()]


def _process_as_pinned() -> bool:
    """Whether all settings of the process have their values, found in a microsecond."""
    getters, values = _quick()
    return [get() for get in getters] == values


def moves() -> int:
    """How often others than the calling thread have moved settings so far, as far as is known."""
    return _Pinned.moves - _workers.moves


def moved(before: int | None = None) -> str | None:
    """After a pass, with the ``moves`` before it: a setting of the process that others have moved,
    or None."""
    if not _process_as_pinned():
        for name, get, _, value in _of_process():
            if get() != value:
                return name
    return "settings" if before not in (None, moves()) else None


def _apply(settings: Settings) -> bool:
    """Set what has another value than in passes; whether anything had."""
    return _restore(settings, [setting.value for setting in settings])


class _Pinned:
    """How many threads want the settings of the process pinned, what they were before, and how
    often some had to be set again."""

    threads = moves = 0
    before: list[Any]
    lock = Lock()


class _Workers(local):
    """How many threads the calling thread had when its workers were last looked at, and how often
    its own code moved settings."""

    threads, moves = 1, 0


_workers = _Workers()


def pin_process(own: bool = False) -> None:
    """Within ``pinned``: set again what of the process was changed meanwhile. own: by code of the
    user's that the calling thread has run for its pass.

    Counted before it is set: another thread's pass that ends in between would see neither.
    """
    if not _process_as_pinned():
        with _Pinned.lock:
            _Pinned.moves += 1
        _workers.moves += own
        _apply(_of_process())


def pin_again(device_type: str, own: bool = False) -> None:
    """As ``pin_process``, and what of the thread was changed."""
    pin_process(own)
    _apply(_of_thread(device_type))
    if (threads := torch.get_num_threads()) != _workers.threads:
        openmp.settle()
        _workers.threads = threads


@contextmanager
def pinned(device_type: str) -> Iterator[None]:
    """The values that passes have, while the block runs; those of the process until the last thread
    has left its block."""
    shared, own = _of_process(), _of_thread(device_type)
    with _Pinned.lock:
        if not _Pinned.threads:
            _Pinned.before = [setting.get() for setting in shared]
        _Pinned.threads += 1
    before = [setting.get() for setting in own]
    try:
        pin_again(device_type)
        yield
    finally:
        _restore(own, before)
        with _Pinned.lock:
            _Pinned.threads -= 1
            if not _Pinned.threads:
                for setting, value in zip(shared, _Pinned.before, strict=True):
                    if setting.get() == setting.value != value:  # what was set meanwhile stays
                        setting.set(value)
