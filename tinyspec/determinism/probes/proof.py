"""The proof of the reference bucket, which a first deterministic token waits for, and that of any
other bucket.

The reference bucket is sound where linears, other functions of rows, attention and the model end to
end give a row the same bits in every place of it, the shapes of matmuls depend on no value, and
nothing turns autocast on. Another bucket is canonical where each of them has the reference bucket's
bits there. Knows models and passes, not requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from tinyspec.determinism.probe_results import BucketResult, ProbeResults, Unsound
from tinyspec.determinism.probes.attention import compare_more, probe_attention, summary
from tinyspec.determinism.probes.autocast import refuse_autocast
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.prober import Prober
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, data_dependent
from tinyspec.determinism.probes.row_functions import BucketInvariance
from tinyspec.model.cpu_linears import CpuLinear
from tinyspec.model.linears import is_plain, linear_kinds, linear_shape, linear_weight
from tinyspec.model.moe import kernel_in_all_passes
from tinyspec.runner.model_runner import ModelRunner

MODEL = "model"
NOT_FINITE = (
    "model: its passes on weights of the probe's own making give no finite keys and values, so "
    "that nothing could be compared"
)
# Passes end to end of the reference bucket: before the first token, and with the first further
# bucket. The one of number 0 is like the first of those that they are compared with.
FIRST_PASSES, ALL_PASSES = 2, 8
# Of another bucket, and of a large one, which costs most; of small ones for about so many rows.
PASSES, LARGE_PASSES, LEAST_ROWS = 2, 1, 4
# Bytes of which new tensors begin at a multiple, as far as libraries look at it.
ALIGNED = {"cpu": 64, "cuda": 256}
# Passes on scratch weights whose matmuls are compared, beside one on the model's own.
RECORDED_PASSES = 2


@dataclass
class ReferenceProof:
    """One proof, in two parts: between them the linear kernel may get what is broken."""

    prober: Prober
    functions: list[BucketInvariance] = field(default_factory=list)
    unsound: list[Unsound] = field(default_factory=list)

    def linears(self) -> list[str]:
        """The first names of the kinds of linears that are unsound."""
        prober = self.prober
        self.functions = [prober.function(name, proven=False) for name in prober.linears]
        return [f.name for f in self.functions if not f.position]

    def rest(self, kernel_linears: tuple[str, ...]) -> ProbeResults:
        """Everything else in turn; the results, which know one bucket.

        Raises DeterminismError where autocast is turned on.
        """
        prober = self.prober
        probe = prober.probe()
        recorders: list[OpRecorder] = []
        recording = prober.recording(prober.reference, recorders)

        def own_pass() -> None:
            with recording():
                probe.run_tokens(prober.reference, TOKEN_SETS[-1])

        # Routers of random numbers may send all rows one way, and the model's own another.
        refuse_autocast(prober.runner, own_pass)
        prober.on_scratch(lambda: self._scratch_passes(probe, recording, recorders))
        self.unsound += data_dependent(r.matmuls for r in recorders)
        self.unsound += [wrong for r in recorders for wrong in r.reads.unsound()][:1]
        assert prober.known is not None
        if not prober.known.comparable:
            self.unsound.append(Unsound(MODEL, NOT_FINITE))
        self.functions += [prober.function(name, proven=False) for name in prober.ops]
        self.unsound += [Unsound(f.name, str(f.position)) for f in self.functions if not f.position]
        attention, wrong = summary(probe_attention(prober.runner, pause=prober.pause))
        self.unsound += wrong
        self.unsound += compare(prober, probe, range(1, FIRST_PASSES + 1))
        seconds = probe.took.get(prober.reference, 0.0)
        own_way = _fast_mode_names(prober, prober.reference)
        bucket = BucketResult(prober.reference, not self.unsound, (), seconds, own_way)
        return ProbeResults(
            prober.reference,
            (bucket,),
            tuple(self.unsound),
            () if self.unsound else kernel_linears,
            attention=tuple(attention),
            compared=FIRST_PASSES,
        )

    def _scratch_passes(
        self,
        probe: ModelProbe,
        recording: Callable[[], AbstractContextManager[None]],
        recorders: list[OpRecorder],
    ) -> None:
        """The reference rows; meanwhile matmuls, which are compared with those of ``recorders``,
        and functions of rows are recorded."""
        prober = self.prober
        several = -(-probe.distinct // prober.reference)
        for tokens in TOKEN_SETS[: max(1, RECORDED_PASSES - several)]:
            with recording():
                probe.run_tokens(prober.reference, tokens)

        def few() -> AbstractContextManager[None]:
            return recording() if len(recorders) <= RECORDED_PASSES else nullcontext()

        prober.known = probe.compute_reference(few)
        prober.record(recorders[1])


def prove(
    prober: Prober, results: ProbeResults, sizes: Collection[int], attention_rows: int | None
) -> ProbeResults:
    """``results`` with these further buckets, and with what more is found about the reference
    bucket. attention_rows: to compare of each kind; None: of each some more, the first time."""
    prober.prepare()
    more = confirm(prober, results, attention_rows)
    if not more.unsound and max(sizes, default=0) > prober.reference and not more.routed:
        routed, unsound = routing(prober)
        more = replace(more, routed=routed).with_unsound(unsound)
    for rows in sorted(sizes):
        if not more.unsound and rows not in more.sizes:
            more = prove_bucket(prober, more, rows)
    return more


def confirm(prober: Prober, results: ProbeResults, attention_rows: int | None) -> ProbeResults:
    """More passes of the reference bucket and more rows of attention."""
    wrong: list[Unsound] = []
    first = results.compared < ALL_PASSES
    if first:
        wrong += compare(prober, prober.probe(), range(results.compared + 1, ALL_PASSES + 1))
        results = replace(results, compared=ALL_PASSES)
    kinds = []
    for known in results.attention:
        rows = known.checked + first if attention_rows is None else attention_rows
        kind, unsound = compare_more(prober.runner, known, rows, prober.pause)
        kinds.append(kind)
        wrong += unsound
    return replace(results, attention=tuple(kinds)).with_unsound(wrong)


def compare(prober: Prober, probe: ModelProbe, numbers: Collection[int]) -> list[Unsound]:
    """Passes of the reference bucket with these numbers, compared with the reference rows."""
    rows = prober.reference
    wrong = prober.on_scratch(lambda: _difference(probe, rows, numbers))
    why = f"{MODEL}: at {rows} rows {wrong} depend on a row's index or neighbours"
    return [Unsound(MODEL, why)] if wrong else []


def _difference(probe: ModelProbe, rows: int, numbers: Collection[int]) -> str | None:
    return next(filter(None, (probe.difference(rows, number) for number in numbers)), None)


def routing(prober: Prober) -> tuple[int, list[Unsound]]:
    """Rows of the passes that were compared, and the matmuls of theirs whose shapes depend on
    values, on scratch weights or the model's own."""
    probe = prober.probe()

    def passes() -> list[Unsound]:
        recorders: list[OpRecorder] = []
        recording = prober.recording(probe.distinct, recorders)
        for tokens in TOKEN_SETS:
            with recording():
                probe.run_tokens(probe.distinct, tokens)
        return data_dependent(r.matmuls for r in recorders)

    return probe.distinct, prober.on_scratch(passes) or passes()


def prove_bucket(prober: Prober, results: ProbeResults, rows: int) -> ProbeResults:
    """Whether bucket ``rows`` is canonical: its functions of rows, and then the model end to end.

    A plain linear with other bits in a larger bucket runs in tiles of the reference's rows there.
    """
    begun = time.perf_counter()
    names = (*prober.linears, *prober.ops)
    differing = [n for n in names if not prober.function(n, [rows]).canonical(rows)]
    broken = [name for name in differing if not _can_tile(prober, name, rows)]
    if differing and not broken:
        results = replace(results, tiled=tuple(dict.fromkeys((*results.tiled, *differing))))
        set_tiles(prober.runner, results.tiled)
    seconds = 0.0
    if not broken:
        probe = prober.probe(rows)
        few = PASSES if rows <= prober.reference else LARGE_PASSES
        numbers = range(max(few, LEAST_ROWS // rows))
        if prober.on_scratch(lambda: _difference(probe, rows, numbers)):
            broken = [MODEL]
        seconds = probe.took[rows]
    own_way = () if broken else (*differing, *_fast_mode_names(prober, rows))
    proof = time.perf_counter() - begun
    return results.with_bucket(
        BucketResult(rows, not broken, tuple(broken), seconds, own_way, proof)
    )


def _can_tile(prober: Prober, name: str, rows: int) -> bool:
    """Whether a plain linear's rows are a whole number of tiles, each of which begins in memory
    where a new tensor may: elsewhere a library might choose another kernel than was probed."""
    runner = prober.runner
    if name not in prober.linears or rows % prober.reference:
        return False
    module = runner.model.get_submodule(name)
    shape, weight = linear_shape(module), linear_weight(module)
    assert shape is not None
    itemsize = (runner.model.dtype if weight is None else weight.dtype).itemsize
    aligned = ALIGNED.get(runner.device.type, max(ALIGNED.values()))
    whole = prober.reference * shape[0] * itemsize % aligned == 0
    return whole and (is_plain(module) or runner.tiles.holds(module))


def set_tiles(runner: ModelRunner, names: Collection[str]) -> None:
    """Let linears of these kinds run in tiles of the reference's rows in larger canonical
    passes."""
    runner.tiles.unbind()
    kinds = linear_kinds(runner.model)
    modules = [runner.model.get_submodule(other) for name in names for other in kinds[name]]
    runner.tiles.bind([m for m in modules if is_plain(m)], runner.buckets.reference)


def _fast_mode_names(prober: Prober, rows: int) -> tuple[str, ...]:
    """The linears, and one expert for all, that run another way in fast mode."""
    experts = [name for name, module in prober.experts.items() if not kernel_in_all_passes(module)]
    modules = {name: prober.runner.model.get_submodule(name) for name in prober.linears}
    linears = (
        name
        for name, module in modules.items()
        if isinstance(module, CpuLinear) and module.differs_in_fast_mode(rows)
    )
    return (*experts[:1], *linears)
