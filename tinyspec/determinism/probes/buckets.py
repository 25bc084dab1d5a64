"""Whether one more bucket is canonical for a patched model on this device, and what a pass costs.

A bucket is canonical only if the linears and every element-wise module by themselves, and then the
model end to end, have the bits of the reference bucket there. Each part in steps. Knows models and
passes, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from tinyspec.determinism.probe_results import (
    OTHER,
    BucketResult,
    Labels,
    ProbeResults,
    Unsound,
)
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.reference import MODEL
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, data_dependent
from tinyspec.determinism.probes.steps import Steps, within
from tinyspec.determinism.probes.workspace import Workspace
from tinyspec.model.cpu.linears import CpuLinear
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.moe import kernel_in_all_passes
from tinyspec.model.row_tiles import split_rows

T = TypeVar("T")
# End-to-end passes of a bucket that are compared, and of large ones, which cost most.
PASSES, LARGE_PASSES = 2, 1
# They are timed as well; those of small buckets more often, up to MOST_TIMED times, until they have
# taken so many seconds: the fastest of a few is what an idle machine takes.
TIMED_SECONDS, MOST_TIMED = 0.1, 4
# Bytes of which new tensors begin at a multiple, as far as libraries look at it.
ALIGNED = {"cpu": 64, "cuda": 256}
# Small buckets get passes for about so many rows.
LEAST_ROWS = 4


def label_steps(
    work: Workspace, name: str, sizes: Collection[int], all_sizes: Collection[int]
) -> Steps[tuple[Labels, tuple[int, ...], list[Unsound]]]:
    """Labels of a function of rows in the buckets ``sizes``, those in which its operands are
    swapped from now on, and what is wrong with the reference bucket after all.

    all_sizes: the buckets to know; labels of other bits are told apart if ``sizes`` are all.
    """
    found, swapped = yield from work.function_steps(name, sizes)
    unsound = [] if found.position else [Unsound(name, str(found.position))]
    whole = {*sizes, work.reference} >= {*all_sizes}
    labels = {
        rows: label if whole or label in (0, None) else OTHER
        for rows, label in found.labels.items()
    }
    return labels, swapped, unsound


def routing_steps(work: Workspace) -> Steps[tuple[int, list[Unsound]]]:
    """Rows of the passes that were compared, and the matmuls of theirs whose shapes depend on
    values, on scratch weights or the model's own."""
    probe = work.probe()
    unsound: list[Unsound] = []

    def passes() -> Steps[list[OpRecorder]]:
        recorders: list[OpRecorder] = []
        recording = work.recording(probe.distinct, recorders)
        for tokens in TOKEN_SETS:
            with recording():
                probe.run_tokens(probe.distinct, tokens)
            yield
        return recorders

    for steps in (work.on_scratch(passes()), passes()):
        recorders = yield from steps
        unsound = unsound or data_dependent(r.matmuls for r in recorders)
    return probe.distinct, unsound


def cannot_tile(results: ProbeResults, rows: int) -> tuple[str, ...]:
    """The functions of rows that break bucket ``rows``.

    What differs there must be able to run its rows in tiles, without a rest: a padded row would
    cost what a larger bucket does.
    """
    differing = tuple(results.differing(rows))
    tiled = all(split_rows(rows, results.tiles.get(name, ())) for name in differing)
    return () if tiled else differing


def bucket_steps(work: Workspace, results: ProbeResults, rows: int) -> Steps[BucketResult]:
    """The bucket's result, where all functions of rows were probed in it and linears run in tiles
    as ``results`` say."""
    broken = cannot_tile(results, rows) or (yield from _broken_in_tiles(work, results, rows))
    own_way = _fast_mode_names(work, rows)
    tiled = () if broken else (*results.differing(rows), *own_way)
    if not broken and rows != work.reference:
        wrong = yield from _compare_steps(work, work.probe(rows), rows)
        broken = (MODEL,) if wrong else ()
    passes = PASSES if rows <= work.reference else LARGE_PASSES
    most = passes if rows > work.reference else MOST_TIMED
    bucket = BucketResult(rows, not broken, broken, 0.0, 0.0, tiled)
    if _is_timed(work, rows):
        bucket = yield from timing_steps(work, bucket, passes, most)
    return bucket


def timing_steps(
    work: Workspace, bucket: BucketResult, least: int = 1, most: int = 1
) -> Steps[BucketResult]:
    """``bucket`` with the seconds of ``least`` to ``most`` more passes, or fewer if it had fewer:
    what else a machine does only makes passes slower."""
    probe = work.probe(bucket.rows)
    own_way = bucket.tiled or _fast_mode_names(work, bucket.rows)
    # Fast mode and the own way in turns: a busy moment of the machine does not slow down one.
    ways = (False, True) if bucket.tiled else (not own_way,)
    times: dict[bool, list[float]] = {canonical: [] for canonical in ways}
    for number in range(most):
        if number >= least and sum(map(sum, times.values())) > TIMED_SECONDS:
            break
        for canonical in ways:
            times[canonical].append(probe.seconds(bucket.rows, number, canonical))
            yield
    before = {False: bucket.seconds, True: bucket.canonical_seconds}
    fastest = {way: min(filter(None, (*found, before[way]))) for way, found in times.items()}
    own = fastest.get(True, fastest.get(False, 0.0))
    seconds = fastest.get(False, own)
    return replace(bucket, seconds=seconds, canonical_seconds=own, timed=bucket.timed + 1)


def _broken_in_tiles(work: Workspace, results: ProbeResults, rows: int) -> Steps[tuple[str, ...]]:
    """The linears that have other bits in tiles of the bucket than in a pass of the tile's size.

    A tile is a part of a tensor: a library may choose another kernel for one that begins elsewhere
    than new tensors do. Where none does, the tiles are what was probed.
    """
    runner = work.runner
    aligned = ALIGNED.get(runner.device.type, max(ALIGNED.values()))
    broken = []

    def in_tiles(step: Callable[[], list[T]]) -> list[T]:
        runner.tiles.on = True
        try:
            return step()
        finally:
            runner.tiles.on = False

    for name in results.differing(rows):
        module = runner.model.get_submodule(name)
        shape, weight = linear_shape(module), getattr(module, "weight", None)
        assert shape is not None
        # Rows have the weight's dtype, where it is one of theirs.
        own = isinstance(weight, Tensor) and weight.is_floating_point()
        dtype = weight.dtype if own and weight is not None else runner.model.dtype
        row = shape[0] * dtype.itemsize
        tiles = split_rows(rows, results.tiles[name])
        if any(start * row % aligned for start in accumulate(tiles[:-1])):
            found, _ = yield from within(in_tiles, work.function_steps(name, [rows]), 0.0)
            if not found.canonical(rows):
                broken.append(name)
    return tuple(broken)


def _is_timed(work: Workspace, rows: int) -> bool:
    """Whether a bucket's passes are timed: of those larger than the reference bucket every third,
    and the last; the others are interpolated."""
    large = [size for size in work.runner.buckets.sizes if size > work.reference]
    return rows not in large or rows in (*large[::3], large[-1])


def _compare_steps(work: Workspace, probe: ModelProbe, rows: int) -> Steps[bool]:
    """Whether anything end to end differs from the reference bucket."""
    few = PASSES if rows <= work.reference else LARGE_PASSES

    def passes() -> Steps[bool]:
        wrong = False
        for number in range(max(few, LEAST_ROWS // rows)):
            wrong = wrong or probe.difference(rows, number) is not None
            yield
        return wrong

    return (yield from work.on_scratch(passes()))


def _fast_mode_names(work: Workspace, rows: int) -> tuple[str, ...]:
    """The linears, and one expert for all, that run another way in fast mode."""
    experts = [name for name, module in work.experts.items() if not kernel_in_all_passes(module)]
    modules = {name: work.runner.model.get_submodule(name) for name in work.linears}
    linears = (
        name
        for name, module in modules.items()
        if isinstance(module, CpuLinear) and module.differs_in_fast_mode(rows)
    )
    return (*experts[:1], *linears)
