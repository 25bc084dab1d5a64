"""The launches and bytes of a decode pass as a GPU would get them, recorded on a CPU.

    python -m benchmarks.launches --preset qwen3-0.6b --layers 2 --batch 1 64 --context 1024

An engine of the preset's shape runs one pass by the Triton kernels, whose launches are recorded
instead of run, beside every operator of torch but views and allocations (a cast is one). Copies
between host and device do not show here. Layers are equal, so a pass of fewer gives that of all.
Knows what is launched, not how long it takes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks import presets, roofline
from benchmarks.render import table
from benchmarks.workloads import of_shapes
from tinyspec import Engine, EngineConfig
from tinyspec.kernels import backend
from tinyspec.model import install
from tinyspec.model.linears import KernelLinear
from tinyspec.runner import batch as batches
from tinyspec.runner.device_queue import Pending

PAGE = 128
# Read as many rows of their first argument as they return.
GATHERS = ("embedding", "index_select", "gather")
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach")


@dataclass
class Launches:
    """counts, bytes: launches, and bytes of all tensors that they read or write, by name. fetches:
    how often the host waits for results.

    outside: storages that count nothing here, of the pages: a kernel is given all of them and reads
    some.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    fetches: int = 0
    outside: frozenset[int] = frozenset()

    def add(self, name: str, values: Any, times: int = 1) -> None:
        """One launch that reads or writes each tensor among ``values`` so many times."""
        self.counts[name] += 1
        found = {
            (x.data_ptr(), x.shape): x.numel() * x.itemsize
            for x in tree_leaves(values)
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.outside
        }
        self.bytes[name] += times * sum(found.values())

    def beside(self, fewer: Launches, times: int) -> Launches:
        """What a pass with ``times`` more of the layers that ``fewer`` lacks launches."""
        more = Launches(Counter(self.counts), Counter(self.bytes), self.fetches)
        for mine, theirs in ((more.counts, fewer.counts), (more.bytes, fewer.bytes)):
            for name in mine:
                mine[name] += times * (mine[name] - theirs[name])
        return more


def _storages(values: Any) -> frozenset[int]:
    """Addresses of the memory of all tensors among ``values``."""
    tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return frozenset(x.untyped_storage().data_ptr() for x in tensors)


class _Operators(TorchDispatchMode):
    """Runs operators, and adds those that launch something."""

    def __init__(self, found: Launches):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in GATHERS:
            self._found.add(f"aten.{name}", out, times=2)
        elif name not in ALLOCATIONS and not (func.is_view and _storages(out) <= _storages(args)):
            self._found.add(f"aten.{name}", (args, kwargs, out))
        return out


@contextmanager
def recorded(found: Launches) -> Iterator[None]:
    """Kernels of Triton are recorded and not run, operators of torch are both."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.add(kernel.fn.__name__, (args, kwargs))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(InterpretedFunction, "run", run),
        _Operators(found),
    ):
        yield


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Engines that are made here have the modules of a GPU's."""
    with (
        patch.object(install, "cpu_stand_ins", lambda *_: {}),
        patch.object(install, "fuses_layers", lambda _: True),
    ):
        yield


def decode_pass(model: Any, batch: int, context: int, linear: str = "auto") -> Launches:
    """What one pass launches that gives each of ``batch`` sequences one token, and its sampling.

    Prompts are not computed: the model's forward is stubbed until the pass. Tokens are 0. linear:
    as in ``EngineConfig``.
    """
    out = 5 + batch * context // 1000  # the first still decode when the last prompt is done
    pages = batch * -(-(context + out) // PAGE)
    sizes: dict[str, Any] = {"page_size": PAGE, "num_pages": pages, "max_sequences": batch}
    config = EngineConfig(overlap=False, prefix_cache=False, linear=linear, **sizes)
    with _as_on_a_gpu(), Engine(model, config=config) as one:
        vocab, runner = model.config.vocab_size, one.runner
        found = Launches(outside=_storages([runner.cache.k, runner.cache.v]))
        served, runner.model = (
            runner.model,
            lambda **asked: SimpleNamespace(logits=_zeros(asked, vocab)),
        )
        one.served.context.check = lambda: None  # that every layer called attention
        kernels = one.core.sampler.kernels
        one.core.sampler.kernels = replace(kernels, sample=_sample_zero(kernels.sample))
        work = of_shapes("launches", [(context - 1, out)] * batch, vocab)
        for prompt, params in zip(work.prompts, work.params(()), strict=True):
            one.add_request(list(prompt), params)
        while not one.records or one.records[-1].rows["decode"] < batch:
            assert one.has_unfinished()
            one.step()
        runner.model = served
        for launches in (Launches(), found):  # the first pass makes what all others use
            with _by_triton(one, launches):
                one.step()
    return found


def _zeros(asked: dict[str, Any], vocab: int) -> Tensor:
    """Logits of a stubbed forward."""
    kept = asked.get("logits_to_keep", 0)
    rows = len(kept) if isinstance(kept, Tensor) else asked["input_ids"].shape[1]
    return torch.zeros(1, 1, 1).expand(1, rows, vocab)


def _sample_zero(sample: Callable[..., Any]) -> Callable[..., Any]:
    """``sample``, all of whose tokens are 0."""

    def zero(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sample(logits, *args, **kwargs)
        return torch.zeros(len(logits), dtype=torch.int64), None

    return zero


@contextmanager
def _by_triton(engine: Engine, found: Launches) -> Iterator[None]:
    """Forwards and sampling of ``engine`` by the Triton kernels, recorded.

    Not from outside a step: it takes the caller's modes away while it runs.
    """
    runner, sampler = engine.runner, engine.core.sampler
    kernels, run = backend.load("triton"), runner.run

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorded(found):
                return function(*args, **kwargs)

        return call

    engine.served.context.kernels = kernels
    for module in runner.model.modules():
        if isinstance(module, KernelLinear):
            module.tinyspec_linear = kernels.linear
    sampler.kernels = replace(kernels, sample=_sample_zero(watched(kernels.sample)))
    fetch = Pending.fetch

    def counted(pending: Pending[Any]) -> Any:
        found.fetches += 1
        return fetch(pending)

    def sent(*args: Any) -> None:
        with _disable_current_modes():
            overwrite(*args)

    overwrite = batches.overwrite
    memory = batches.PassMemory(engine.config, runner.buckets, runner.device, fixed=True)
    with (
        patch.object(runner, "memory", memory),
        patch.object(runner, "run", watched(run)),
        patch.object(Pending, "fetch", counted),
        patch.object(batches, "overwrite", sent),
    ):
        yield


def of_preset(preset: str, batch: int, context: int, layers: int, linear: str = "auto") -> Launches:
    """Launches of a pass of a preset's whole model, from passes of ``layers`` and of one more."""
    passes = []
    for count in (layers, layers + 1):
        model: Any = presets.build(preset, torch.bfloat16, "cpu", count)
        passes.append(decode_pass(model, batch, context, linear))
    whole = presets.PRESETS[preset]["num_hidden_layers"]
    return passes[1].beside(passes[0], whole - layers - 1)


def page_bytes(shape: Any, batch: int, context: int) -> int:
    """Bytes of keys and values that a decode pass reads and writes in pages."""
    alone = replace(roofline.heads_of(shape), q=0)
    spans = [(context - 1, context)] * batch
    read, written = roofline.attention(alone, spans), roofline.attention(alone, [(0, 1)] * batch)
    return shape.num_hidden_layers * (read.bytes + written.bytes)


def launch_table(found: Launches, pages: int, least: int) -> str:
    """Launches and bytes by name, the most bytes first; then those of all, beside the least."""
    moved = {"pages": pages, **found.bytes}
    names = sorted(moved, key=lambda name: -moved[name])
    rows = [[name, str(found.counts[name] or ""), f"{moved[name] / 1e6:.4g}"] for name in names]
    rows.append(["all", str(found.counts.total()), f"{sum(moved.values()) / 1e6:.4g}"])
    text = table(["launched", "times", "MB"], rows)
    return text + f"\n\nThe least bytes of such a pass: {least / 1e6:.4g} MB.\n"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of decode passes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=presets.PRESETS, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=1, help="of the smaller of two models")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--linear", choices=("auto", "always"), default="auto")
    options = parser.parse_args(arguments)
    for batch in options.batch:
        print(f"### {options.preset}, batch {batch}, context {options.context}\n")
        asked = batch, options.context
        found = of_preset(options.preset, *asked, options.layers, options.linear)
        shape = roofline.preset_config(options.preset)
        least = sum(work.bytes for work in roofline.decode(shape, *asked).values())
        print(launch_table(found, page_bytes(shape, *asked), least))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
