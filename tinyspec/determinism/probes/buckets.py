"""Which buckets are canonical for a patched model on this device, and what a pass in each costs.

Beside the linears every element-wise module by itself, attention, then the model end to end: a
bucket is canonical only if none of them tells it from the reference bucket. Knows models and
passes, not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.config import EngineConfig
from tinyspec.determinism.probe_results import Alternative, BucketResult, ProbeResults, Unsound
from tinyspec.determinism.probes.attention import probe_attention
from tinyspec.determinism.probes.linears import classes_of, find_direct, find_tiles, run_in_tiles
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.routing import TOKEN_SETS, Matmuls, routed
from tinyspec.determinism.probes.row_functions import BucketClasses, probe_pool
from tinyspec.model.cpu.linears import CpuLinear
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.moe import kernel_experts, kernel_in_all_passes, row_functions
from tinyspec.model.row_tiles import split_rows
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import between

MODEL = "model"
# End-to-end passes: of the reference bucket, of others, and of large ones, which cost most.
REFERENCE_TURNS, TURNS, LARGE_TURNS = 8, 2, 1
LARGE = 1  # times the reference bucket
# Small buckets get passes for about so many rows.
LEAST_ROWS = 4


@dataclass(frozen=True)
class _Op:
    """What maps rows to rows beside the linears: [1, R, *shape] in its dtype. weight: [out, in] of
    a matmul."""

    module: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Tensor | None = None


def _probe_ops(runner: ModelRunner, ops: dict[str, _Op]) -> list[BucketClasses]:
    found = []
    for name, op in ops.items():
        pool = probe_pool(prod(op.shape), op.dtype, runner.device, op.weight)

        def shaped(rows: Tensor, op: _Op = op) -> Tensor:
            return op.module(rows.view(*rows.shape[:2], *op.shape))

        found.append(classes_of(runner, shaped, pool, name, search=op.weight is None))
    return found


def find_ops(model: nn.Module, rows: int, run: Callable[[], object]) -> dict[str, _Op]:
    """The distinct element-wise modules (activations, norms) that ``run`` calls in passes of
    ``rows`` rows: those that have no module in them, are no linear, and turn one tensor of rows
    into another."""
    found: dict[tuple[Any, ...], tuple[str, _Op]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], more: Any, output: Any) -> None:
            x = inputs[0] if len(inputs) == 1 and not more else None
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
                return
            if isinstance(output, Tensor) and output.shape[:2] == x.shape[:2] == (1, rows):
                op = _Op(module, tuple(x.shape[2:]), x.dtype)
                key = (type(module), repr(module), op.shape, op.dtype)
                found.setdefault(key, (name, op))

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
        if linear_shape(module) is None and not any(True for _ in module.children())
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return dict(found.values())


def _probe_routing(
    runner: ModelRunner, probe: ModelProbe, cache: KVCache
) -> tuple[list[Unsound], dict[str, _Op]]:
    """What is routed by value, and what of rows no linear and no element-wise module does: steps of
    other modules (routers), and what experts do between their matmuls."""
    experts = kernel_experts(runner.model)
    passes = []
    for tokens in TOKEN_SETS:
        noted = Matmuls(runner.model, probe.distinct, experts)
        with noted.following():
            probe.retell(cache, tokens)
        passes.append(noted.calls)
    ops = {s.name: _Op(s.run, tuple(s.shape), s.dtype, s.weight) for s in noted.steps}
    for name, fn, shape, dtype in row_functions(experts):
        ops[name] = _Op(fn, shape, dtype)
    return routed(passes), ops


def probe_buckets(
    runner: ModelRunner, linears: list[BucketClasses], config: EngineConfig
) -> ProbeResults:
    """Everything else, and what follows from all of it; ``linears`` from ``probe_linears``."""
    buckets = runner.buckets
    tiles = find_tiles(runner, linears)
    run_in_tiles(runner, tiles)
    probe = ModelProbe(runner, config, buckets.sizes[-1])
    with runner.scratch(probe.num_pages) as cache:
        unsound, ops = _probe_routing(runner, probe, cache)
        ops |= find_ops(runner.model, buckets.reference, lambda: probe.learn(cache))
        classes = [*linears, *_probe_ops(runner, ops)]
        unsound += [Unsound(c.name, str(c.position)) for c in classes if not c.position]
        unsound += [Unsound(p.name, str(p)) for p in probe_attention(runner) if not p]
        others = {
            rows: [c.name for c in classes if not c.canonical(rows)] for rows in buckets.sizes
        }
        broken = {rows: _without_tiles(rows, others[rows], tiles) for rows in buckets.sizes}
        quick = _quick(runner, linears)
        tiled = {
            rows: () if broken[rows] else (*others[rows], *quick.get(rows, ()))
            for rows in buckets.sizes
        }
        runs = [
            _Run(rows, not broken[rows], buckets.reference, bool(broken[rows] and quick.get(rows)))
            for rows in buckets.sizes
        ]
        # What passes cost without tiles: of every second such bucket, and of the last.
        rare = [rows for rows in buckets.sizes if tiled[rows]]
        plain = [_Run(n, False, buckets.reference, fast=True) for n in {*rare[::2], *rare[-1:]}]
        _take_turns(probe, [*runs, *plain])
    cost = {run.rows: run.seconds for run in (*runs, *plain) if run.fast or not tiled[run.rows]}
    facts = []
    for run in runs:
        rows = run.rows
        if run.wrong is not None:
            broken[rows].append(MODEL)
            if rows == buckets.reference:
                why = f"{MODEL}: at {rows} rows {run.wrong} depend on a row's index or neighbours"
                unsound.append(Unsound(MODEL, why))
        names, seconds = tuple(broken[rows]), between(cost, rows)
        facts.append(BucketResult(rows, not names, names, seconds, run.seconds, tiled[rows]))
    if unsound:
        facts = [replace(fact, canonical=False) for fact in facts]
    canonical = sum(fact.canonical for fact in facts)
    alternatives = _alternatives(classes, buckets.sizes, buckets.reference, canonical)
    return ProbeResults(
        buckets.reference,
        tuple(facts),
        tuple(unsound),
        tuple(alternatives),
        tiles=tiles,
        direct=find_direct(runner),
    )


def _quick(runner: ModelRunner, linears: list[BucketClasses]) -> dict[int, list[str]]:
    """By bucket: the linears and, one for all, the experts that run another way in a pass that need
    not be canonical."""
    served = kernel_experts(runner.model).items()
    experts = [name for name, module in served if not kernel_in_all_passes(module)]
    found = {rows: experts[:1] for rows in runner.buckets.sizes if experts}
    for c in linears:
        module = runner.model.get_submodule(c.name)
        for rows in runner.buckets.sizes:
            if isinstance(module, CpuLinear) and module.differs_in_fast_mode(rows):
                found.setdefault(rows, []).append(c.name)
    return found


def _without_tiles(rows: int, names: list[str], tiles: dict[str, tuple[int, ...]]) -> list[str]:
    """Those of ``names`` that cannot run ``rows`` rows in tiles; all of them if any cannot.

    Tiles must come out even: a row added in a linear would cost what a larger bucket does.
    """
    stuck = [name for name in names if not split_rows(rows, tiles.get(name, ()))]
    return names if stuck else []


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Where facts are known already: whatever a first pass compiles or loads, before a request."""
    sizes = [runner.buckets.reference]
    if runner.device.type == "cuda":
        sizes = runner.buckets.sizes
    probe = ModelProbe(runner, config, sizes[-1])
    with runner.scratch(probe.num_pages) as cache:
        probe.warm_up(cache, sizes)


@dataclass
class _Run:
    """The end-to-end passes of one bucket. fast: as of requests that need not be canonical."""

    rows: int
    compare: bool
    reference: int
    fast: bool = False
    wrong: str | None = None
    times: list[float] = field(default_factory=list)

    @property
    def turns(self) -> int:
        if self.compare and self.rows == self.reference:
            return REFERENCE_TURNS
        few = LARGE_TURNS if self.rows > LARGE * self.reference else TURNS
        return max(few, LEAST_ROWS // self.rows) if self.compare else few

    @property
    def seconds(self) -> float:
        """Of the quickest pass, of equally many in every bucket: the best of many looks quicker
        than the best of two."""
        return min(self.times[-TURNS:])


def _take_turns(probe: ModelProbe, runs: list[_Run]) -> None:
    """All passes, the second of any bucket after the first of all: so that what slows the machine
    for a moment does not slow all passes of a bucket."""
    for turn in range(max(run.turns for run in runs)):
        for run in runs:
            if turn < run.turns:
                seconds, wrong = probe.run(run.rows, turn, not run.fast, run.compare)
                run.times.append(seconds)
                run.wrong = run.wrong or wrong


def _alternatives(
    classes: list[BucketClasses], sizes: list[int], reference: int, canonical: int
) -> list[Alternative]:
    """Larger classes than the reference's of buckets that agree in every linear and op."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rows in sizes:
        labels = [c.labels[rows] for c in classes]
        known = tuple(label for label in labels if label is not None)
        if len(known) == len(labels):
            alike.setdefault(known, []).append(rows)
    found = [
        Alternative(tuple(rows for rows in members if rows >= 4), len(members))
        for members in alike.values()
        if len(members) > canonical and reference not in members
    ]
    return sorted((a for a in found if a.reference_rows), key=lambda a: -a.canonical)
