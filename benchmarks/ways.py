"""The optimizations of a CPU that change no deterministic bit, and how to switch each of them off.

Of the benchmarks only this file and ``bench_host.py`` use internals of the package. Knows a patched
model, and no workload.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from huggingface_hub import constants
from torch import nn

from tinyspec.determinism.probes import linears as linear_probes
from tinyspec.kernels.twins import attention_plain
from tinyspec.model.cpu.linears import CpuLinear, OneDnnLinear, TransposedLinear
from tinyspec.model.install import patched_of
from tinyspec.runner import model_runner
from tinyspec.scheduler.page_pool import PagePool

FP32, BF16 = "float32", "bfloat16"
Off = Callable[[Any], AbstractContextManager[object]]


@dataclass(frozen=True)
class Way:
    """One optimization.

    off: given a patched model, switches the way off while the context lasts. applies: whether the
    model has what the way needs.
    """

    name: str
    dtypes: tuple[str, ...]
    off: Off
    applies: Callable[[Any], bool] = lambda model: True

    def __str__(self) -> str:
        return self.name


def _stand_ins(model: nn.Module, kind: type) -> list[Any]:
    return [module for *_, module in patched_of(model).swapped if isinstance(module, kind)]


def _has(kind: type) -> Callable[[Any], bool]:
    return lambda model: bool(_stand_ins(model, kind))


def _with(kind: type, attribute: str, value: Any) -> Off:
    """Another value of an attribute of all stand-ins of a kind."""

    @contextmanager
    def off(model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for module in _stand_ins(model, kind):
                stack.enter_context(patch.object(module, attribute, value))
            yield

    return off


@contextmanager
def _canonical_attention(model: Any) -> Iterator[None]:
    """The reduction of canonical passes for all rows."""
    context = patched_of(model).context
    kernels = context.kernels

    def attend(q: Any, k: Any, v: Any, metadata: Any, **scores: Any) -> Any:
        metadata.exact = True
        return kernels.paged_attention(q, k, v, metadata, **scores)

    with patch.object(context, "kernels", replace(kernels, paged_attention=attend)):
        yield


def _no_runs(model: Any) -> AbstractContextManager[object]:
    """A page for a sequence is the lowest that is free."""
    return patch.object(PagePool, "_run", lambda pool, wanted: [])


def _together(model: Any) -> AbstractContextManager[object]:
    """Rows of a prompt attend to all their keys in one call."""
    return patch.object(attention_plain, "APART", sys.maxsize)


def never_swapped(model: Any) -> AbstractContextManager[object]:
    """Neither fast mode nor canonical passes swap the operands of linears."""
    stack = ExitStack()
    # Of the class: another attribute of a module would be another model, to be probed anew.
    stack.enter_context(patch.object(OneDnnLinear, "faster_swapped", lambda self, rows: False))
    for module in _stand_ins(model, CpuLinear):
        stack.enter_context(patch.object(module, "swapped", ()))
    return stack


WAYS = (
    # fp32: up to 12 rows by MKL in fast mode, not by oneDNN.
    Way("mkl", (FP32,), _with(OneDnnLinear, "fast_rows", range(0)), _has(OneDnnLinear)),
    # fp32: oneDNN with the weight as its first operand where that is faster.
    Way("swapped", (FP32,), never_swapped, _has(OneDnnLinear)),
    # Rows of a prompt behind a long context attend to it in a call of their own, without a mask.
    Way("keys-apart", (FP32, BF16), _together),
    # Attention of plain passes by other calls than that of canonical ones.
    Way("plain-attention", (FP32, BF16), _canonical_attention),
    # The pages of a sequence lie in a run where there is room.
    Way("page-runs", (FP32, BF16), _no_runs),
    # bf16 with AMX, in fast mode: up to 16 rows transposed; more than that by torch's default.
    Way(
        "few-rows-transposed",
        (BF16,),
        _with(TransposedLinear, "fast_rows", range(1, sys.maxsize)),
        _has(TransposedLinear),
    ),
    Way(
        "many-rows-default",
        (BF16,),
        _with(TransposedLinear, "fast_rows", range(0)),
        _has(TransposedLinear),
    ),
)


def without_keeping_the_heap() -> AbstractContextManager[object]:
    """Engines made while this lasts leave the C library's settings alone.

    They hold for a process: what an engine has set before stays.
    """
    return patch.object(model_runner, "keep_freed_memory", lambda: False)


class _NoLinear:
    """The type of no linear."""


@contextmanager
def separate_probes(folder: str) -> Iterator[None]:
    """Probe results are kept in, and read from, ``folder``."""
    with patch.object(constants, "HF_HOME", folder):
        yield


def without_swapping() -> AbstractContextManager[object]:
    """Engines probed while this lasts swap the operands of linears in no canonical bucket."""
    return patch.object(linear_probes, "CpuLinear", _NoLinear)


def swaps(model: Any) -> bool:
    """Whether any linear of a model swaps its operands in any canonical bucket."""
    return any(module.swapped for module in _stand_ins(model, CpuLinear))
