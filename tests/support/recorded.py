"""All that a pass asks of torch and Triton; Triton's kernels are recorded and not run.

Of every operator, views and allocations too, and of every launch: its name, shapes, strides and
types of all tensors, all numbers, the grid.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tinyspec import Engine
from tinyspec.determinism import model_state
from tinyspec.kernels import backend
from tinyspec.kernels.backend import Kernels
from tinyspec.kernels.twins.layers import NAN
from tinyspec.runner.kv_cache import KVCache
from tinyspec.scheduler.step import Step


def described(values: Any) -> Any:
    """Tensors as what a launch could depend on but their address."""

    def describe(x: Any) -> Any:
        if isinstance(x, Tensor):
            return tuple(x.shape), x.stride(), str(x.dtype), x.data_ptr() % 16
        return x if isinstance(x, (bool, int, float, str)) else str(x)

    return tree_map(describe, values)


SHARED = {
    "kv_write_kernel": ("slot_ptr", "k_cache_ptr", "v_cache_ptr"),
    "attention_kernel": ("k_ptr", "v_ptr", "page_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr"),
}


@dataclass
class Recording:
    """calls: in order. addresses: of the arguments of kernels that passes share, by name."""

    calls: list[Any] = field(default_factory=list)
    addresses: set[tuple[str, int]] = field(default_factory=set)

    def launch(self, name: str, grid: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append((name, tuple(grid), described(kwargs)))
        for argument in SHARED.get(name, ()):
            self.addresses.add((f"{name}.{argument}", kwargs[argument].data_ptr()))


class _Operators(TorchDispatchMode):
    def __init__(self, found: Recording):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._found.calls.append((str(func), described((args, kwargs)), described(out)))
        return out


@contextmanager
def recording() -> Iterator[Recording]:
    """Operators run and are recorded, kernels are recorded."""
    found = Recording()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not args
        found.launch(kernel.fn.__name__, grid, kwargs)

    with (
        patch.object(JITFunction, "run", run),
        patch.object(InterpretedFunction, "run", run),
        _Operators(found),
    ):
        yield found


def _in_fp32(twin: Callable[..., Any]) -> Callable[..., Any]:
    def widened(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return twin(logits.float(), *args, **kwargs)

    return widened


def as_on_a_gpu(patches: pytest.MonkeyPatch) -> Kernels:
    """Engines with ``backend="triton"`` compute with the twins, in all else as with Triton; the
    kernels that they would have. Modules of the tests count as a library's."""
    load, pages = backend.load, KVCache.__init__
    twins = load("torch")
    of_logits = ("sample", "log_softmax", "softmax", "chosen_logprobs")
    # The kernels read logits in the model's dtype and compute in fp32; the twins get them in fp32.
    wide = {name: _in_fp32(getattr(twins, name)) for name in of_logits}
    twins = replace(twins, backend="triton", **wide)
    patches.setattr(backend, "load", lambda name: twins if name == "triton" else load(name))
    libraries = {*model_state.LIBRARIES, "tests"}
    patches.setattr(model_state, "LIBRARIES", libraries)

    def poisoned(cache: KVCache, *args: Any) -> None:
        # Pages are not zeroed; huge numbers, which may lie in memory, only the kernels stand.
        pages(cache, *args)
        for pool in (*cache.k, *cache.v):
            pool.fill_(torch.nan if pool.is_floating_point() else NAN)

    patches.setattr(KVCache, "__init__", poisoned)
    return load("triton")


def record_passes(engine: Engine, kernels: Kernels) -> dict[Any, list[tuple[Any, Recording]]]:
    """What ``kernels`` would launch for every pass of ``engine`` and its sampling, recorded before
    it runs: by shape, beside what the host has sent."""
    found: dict[Any, list[tuple[Any, Recording]]] = {}
    runner, context, sampler = engine.runner, engine.served.context, engine.core.sampler
    run, sample, own = runner.run, sampler.sample, context.kernels

    def recorded(key: Any, sent: Any, function: Callable[[], Any]) -> None:
        context.kernels = sampler.kernels = kernels
        try:
            with recording() as calls:
                function()
        finally:
            context.kernels = sampler.kernels = own
        found.setdefault(key, []).append((sent, calls))

    def run_recorded(step: Step, tokens: Tensor | None, hooks: Any) -> Tensor:
        # Page tables, of which few columns are sent, are written before the pass.
        runner.memory.send(step, tokens)
        key, once = (step.shape, tokens is not None), copy(step)
        once.page_table, once.num_logits = step.page_table[:0], step.shape.logit_rows
        recorded(key, step.values.tolist(), lambda: run(once, tokens))
        return run(once, tokens, hooks)[: step.num_logits]

    def sample_recorded(logits: Tensor, batch: Any) -> Any:
        filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
        if len(batch) and not batch.special and not filtered.any():
            key = "sample", len(batch), bool(batch.temperature.any()), batch.logprobs
            sent = [*batch.key.tolist(), *batch.position.tolist()]
            recorded(key, sent, lambda: sample(logits, batch))
        return sample(logits, batch)

    runner.run, sampler.sample = run_recorded, sample_recorded
    return found
