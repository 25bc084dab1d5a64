"""Which buckets are canonical for a patched model on this device, and what a pass in each costs.

Probes the linears, every element-wise module and attention by themselves, then the model end to
end: a bucket is canonical only if each of them has the bits of the reference bucket there. Knows
models and passes, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.determinism.probe_results import Alternative, BucketResult, ProbeResults, Unsound
from tinyspec.determinism.probes.attention import probe_attention, summary
from tinyspec.determinism.probes.linears import (
    direct_counts,
    probe_in_buckets,
    set_tiles,
    tile_counts,
)
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, RowOp, data_dependent
from tinyspec.determinism.probes.row_functions import BucketInvariance, probe_pool
from tinyspec.model.cpu.linears import CpuLinear
from tinyspec.model.install import patched_of
from tinyspec.model.moe import kernel_experts, kernel_in_all_passes, row_functions
from tinyspec.model.row_tiles import split_rows
from tinyspec.model.scratch_model import ScratchModel
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets, between

MODEL = "model"
NOT_FINITE = (
    "model: its passes on weights of the probe's own making give no finite keys and values, so "
    "that nothing could be compared"
)
# End-to-end passes: of the reference bucket, of others, and of large ones, which cost most.
REFERENCE_PASSES, PASSES, LARGE_PASSES = 8, 2, 1
LARGE = 1  # times the reference bucket
# Small buckets get passes for about so many rows.
LEAST_ROWS = 4


def _probe_ops(runner: ModelRunner, ops: list[RowOp]) -> list[BucketInvariance]:
    found = []
    for op in ops:
        pool = probe_pool(prod(op.shape), op.dtype, runner.device, op.weight)

        def shaped(rows: Tensor, op: RowOp = op) -> Tensor:
            return op.fn(rows.view(*rows.shape[:2], *op.shape))

        found.append(probe_in_buckets(runner, shaped, pool, op.name, search=op.weight is None))
    return found


def _probe_routing(
    runner: ModelRunner, probe: ModelProbe, cache: KVCache
) -> tuple[list[Unsound], list[RowOp]]:
    """Matmuls whose shapes depend on values; and all functions of rows but the linears: those in
    the model, and what experts compute between their matmuls."""
    experts = kernel_experts(runner.model)
    passes = []
    for tokens in TOKEN_SETS:
        recorder = OpRecorder(runner.model, probe.distinct, runner.buckets.reference, experts)
        with recorder.recording(patched_of(runner.model).context):
            probe.run_tokens(cache, tokens)
        passes.append(recorder.matmuls)
    of_experts = [
        RowOp(name, dtype, shape, fn) for name, fn, shape, dtype in row_functions(experts)
    ]
    return data_dependent(passes), [*recorder.row_ops, *of_experts]


def probe_buckets(
    runner: ModelRunner,
    scratch: ScratchModel,
    linears: list[BucketInvariance],
    config: EngineConfig,
) -> ProbeResults:
    """Probes all but the linears, which ``probe_linears`` did, and puts the results together.

    Everything is compared on scratch weights, and timed on the model's own: scratch weights share
    memory, and caches would hold all of them.
    """
    buckets = runner.buckets
    tiles = tile_counts(runner, linears)
    set_tiles(runner, tiles)
    probe = ModelProbe(runner, config, buckets.sizes[-1])
    with runner.scratch(probe.num_pages) as cache:

        def compare() -> tuple[list[Unsound], list[BucketInvariance], list[_Run]]:
            unsound, ops = _probe_routing(runner, probe, cache)
            probe.compute_reference(cache)
            if not probe.comparable:
                unsound.append(Unsound(MODEL, NOT_FINITE))
            functions = [*linears, *_probe_ops(runner, ops)]
            runs = _plan_runs(functions, tiles, _fast_mode_names(runner, linears), buckets)
            _compare(probe, runs)
            return unsound, functions, runs

        unsound, functions, runs = scratch.run(compare)
        if not unsound:
            # Random routers may send all rows the same way: the model's own are looked at as well.
            unsound, _ = _probe_routing(runner, probe, cache)
        unsound += [Unsound(f.name, str(f.position)) for f in functions if not f.position]
        attention, wrong = summary(probe_attention(runner))
        unsound += wrong
        fast_runs = _plan_times(runs)
        _time_interleaved(probe, [*runs, *fast_runs])
    timed = [run for run in (*runs, *fast_runs) if run.times]
    cost = {run.rows: run.seconds for run in timed if run.fast or not run.tiled}
    own_way = {run.rows: run.seconds for run in timed if run.tiled}
    unsound += [Unsound(MODEL, run.why) for run in runs if run.wrong and run.is_reference]
    results = [
        run.result(
            between(cost, run.rows), between(own_way if run.tiled else cost, run.rows), not unsound
        )
        for run in runs
    ]
    canonical = sum(result.canonical for result in results)
    return ProbeResults(
        buckets.reference,
        tuple(results),
        tuple(unsound),
        tuple(_alternatives(functions, buckets.sizes, buckets.reference, canonical)),
        tiles=tiles,
        direct=direct_counts(runner),
        attention=tuple(attention),
    )


def _fast_mode_names(
    runner: ModelRunner, linears: list[BucketInvariance]
) -> dict[int, tuple[str, ...]]:
    """By bucket: the linears, and one expert for all, that run another way in fast mode."""
    served = kernel_experts(runner.model).items()
    experts = [name for name, module in served if not kernel_in_all_passes(module)]
    modules = {c.name: runner.model.get_submodule(c.name) for c in linears}
    cpu_linears = {name: m for name, m in modules.items() if isinstance(m, CpuLinear)}
    return {
        rows: (
            *experts[:1],
            *(name for name, m in cpu_linears.items() if m.differs_in_fast_mode(rows)),
        )
        for rows in runner.buckets.sizes
    }


@dataclass
class _Run:
    """The end-to-end passes of one bucket.

    compare: with the reference rows. timed: whether they also are; others are interpolated. fast:
    in fast mode. broken_by, tiled: as of ``BucketResult``.
    """

    rows: int
    reference: int
    compare: bool
    fast: bool = False
    broken_by: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()
    wrong: str | None = None
    timed: bool = False
    times: list[float] = field(default_factory=list)

    @property
    def is_reference(self) -> bool:
        return self.rows == self.reference

    @property
    def passes(self) -> int:
        """Equally many of each size that are timed: the minimum of more would be lower."""
        return LARGE_PASSES if self.rows > LARGE * self.reference else PASSES

    @property
    def compared_passes(self) -> int:
        if not self.compare:
            return 0
        few = max(self.passes, LEAST_ROWS // self.rows)
        return REFERENCE_PASSES if self.is_reference else few

    @property
    def seconds(self) -> float:
        """Of the fastest pass."""
        return min(self.times)

    @property
    def why(self) -> str:
        """What is wrong in a reference bucket that is unsound."""
        return f"{MODEL}: at {self.rows} rows {self.wrong} depend on a row's index or neighbours"

    def result(self, seconds: float, canonical_seconds: float, sound: bool) -> BucketResult:
        """seconds: of a pass in fast mode. sound: whether the reference bucket is."""
        names = (*self.broken_by, MODEL) if self.wrong else self.broken_by
        canonical = sound and not names
        return BucketResult(self.rows, canonical, names, seconds, canonical_seconds, self.tiled)


def _plan_runs(
    functions: list[BucketInvariance],
    tiles: dict[str, tuple[int, ...]],
    fast_names: dict[int, tuple[str, ...]],
    buckets: Buckets,
) -> list[_Run]:
    """A run of every bucket; those that a function breaks are only timed.

    What differs in a bucket must be able to run its rows in tiles, without a rest: a padded row
    would cost what a larger bucket does.
    """
    runs = []
    for rows in buckets.sizes:
        differing = tuple(f.name for f in functions if not f.canonical(rows))
        if all(split_rows(rows, tiles.get(name, ())) for name in differing):
            tiled = (*differing, *fast_names[rows])
            runs.append(_Run(rows, buckets.reference, compare=True, tiled=tiled))
        else:
            fast = bool(fast_names[rows])
            runs.append(_Run(rows, buckets.reference, False, fast, broken_by=differing))
    return runs


def _plan_times(runs: list[_Run]) -> list[_Run]:
    """Marks the runs that are timed, of those with an own way and of those without: the reference
    bucket's, every second of smaller ones, every third of larger ones, and the last. Returns what
    those with an own way do in fast mode."""
    for own_way in (False, True):
        of_kind = [run for run in runs if bool(run.tiled) == own_way]
        small = [run for run in of_kind if run.rows < run.reference]
        large = [run for run in of_kind if run.rows > run.reference]
        reference = [run for run in of_kind if run.is_reference]
        for run in (*small[::2], *reference, *large[::3], *of_kind[-1:]):
            run.timed = True
    return [
        _Run(run.rows, run.reference, compare=False, fast=True, timed=True)
        for run in runs
        if run.timed and run.tiled
    ]


def _compare(probe: ModelProbe, runs: list[_Run]) -> None:
    """The passes of every run that is compared with the reference rows."""
    for run in runs:
        for number in range(run.compared_passes):
            run.wrong = run.wrong or probe.difference(run.rows, number)


def _time_interleaved(probe: ModelProbe, runs: list[_Run]) -> None:
    """One pass of every run, then the next of every run: a busy moment of the machine does not slow
    down all passes of one bucket."""
    for number in range(PASSES):
        for run in runs:
            if run.timed and number < run.passes:
                run.times.append(probe.seconds(run.rows, number, canonical=not run.fast))


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Where the results are known: compiles and loads what a first pass needs, before a request."""
    sizes = [runner.buckets.reference]
    if runner.device.type == "cuda":
        sizes = runner.buckets.sizes
    probe = ModelProbe(runner, config, sizes[-1])
    with runner.scratch(probe.num_pages) as cache:
        probe.warm_up(cache, sizes)


def _alternatives(
    functions: list[BucketInvariance], sizes: list[int], reference: int, canonical: int
) -> list[Alternative]:
    """Groups of buckets that agree in every function, larger than ``canonical``, without the
    reference bucket."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rows in sizes:
        labels = [f.labels[rows] for f in functions]
        known = tuple(label for label in labels if label is not None)
        if len(known) == len(labels):
            groups.setdefault(known, []).append(rows)
    found = [
        Alternative(tuple(rows for rows in members if rows >= 4), len(members))
        for members in groups.values()
        if len(members) > canonical and reference not in members
    ]
    return sorted((a for a in found if a.reference_rows), key=lambda a: -a.canonical)
