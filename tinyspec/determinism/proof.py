"""The proof of the reference bucket, which a first deterministic token waits for, and that of any
other bucket.

The reference bucket is sound where linears, other functions of rows, attention and the model end to
end give a row the same bits in every place of it, the shapes of matmuls depend on no value, and
nothing turns autocast on. Another bucket is canonical where each of them has the reference bucket's
bits there.

Weights are scratch weights. What is found holds for all values of weights: kernel, tiling and order
of additions are chosen by shapes, strides, dtypes and alignment before a number is read, and two
orders that are not the same give other bits on inputs and weights made so that roundings show.
Knows models and passes, not requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod

from torch import Tensor, nn

from tinyspec.determinism.attention_probe import (
    LENGTH,
    MANY_ROWS,
    REMEDY,
    attention_kinds,
    compare_attention,
)
from tinyspec.determinism.linear_modes import LinearModes
from tinyspec.determinism.model_probe import ModelProbe
from tinyspec.determinism.recorder import (
    PassRecorder,
    RowOp,
    data_dependent,
    reads_rows,
    token_sets,
)
from tinyspec.determinism.results import BucketResult, ComparedRows, ProbeResults, Unsound
from tinyspec.determinism.rows import (
    agree,
    keeps_places,
    probe_pool,
    sensitive_pool,
)
from tinyspec.errors import DeterminismError
from tinyspec.interrupts import flush
from tinyspec.model.fused_layer import fused_functions
from tinyspec.model.linears import linear_kinds, linear_shape, linear_weight
from tinyspec.model.moe import kernel_experts, row_functions
from tinyspec.model.scratch_weights import ScratchModel, other_weights
from tinyspec.runner.kv_cache import refuse_shortage
from tinyspec.runner.model_runner import ModelRunner

MODEL = "model"
NOT_FINITE = (
    "model: its passes on weights of the probe's own making give no finite keys and values, so "
    "that nothing could be compared"
)
PLACES = "at {} rows a row's result depends on its row index or its neighbours"
# Passes end to end of the reference bucket: before the first token, and with the first further
# bucket. The one of number 0 is like the first of those that they are compared with.
FIRST_PASSES, ALL_PASSES = 2, 8
# Seconds for a kind of attention calls after its first round, before the first token.
ATTENTION_SECONDS = 0.05
# Of another bucket, and of a large one, which costs most; of small ones for about so many rows.
PASSES, LARGE_PASSES, LEAST_ROWS = 2, 1, 4
# Times the needles of other probes, so that neighbours of ordinary size are larger.
SMALL = 2.0**-10
# Linears defined here compute more than their product: routers.
ROUTERS = "transformers.models."


class Prober:
    """Probes one model's linears, other functions of rows and passes, for as long as a proof lasts,
    as it takes memory.

    modes: in which its linears run. scratch: its scratch weights. linears: the first name of every
    kind. ops: other functions of rows, by name, after ``prepare``.

    Raises DeterminismError where memory does not suffice.
    """

    def __init__(self, runner: ModelRunner, modes: LinearModes):
        self.runner, self.modes = runner, modes
        self.reference = runner.buckets.reference
        self._autocast = runner.served.autocast
        self.scratch = ScratchModel(runner.model)
        refuse_shortage(self.scratch.nbytes, runner.device)
        self.linears = list(linear_kinds(runner.model))
        self.ops: dict[str, RowOp] = {}

    def record(self, probe: ModelProbe, tokens: Iterable[Tensor]) -> list[PassRecorder]:
        """Recorded passes, one with each set of tokens."""
        found = []
        for ids in tokens:
            found.append(PassRecorder(self.runner, len(ids)))
            with found[-1].recording():
                probe.run_tokens(ids)
        return found

    def prepare(self, probe: ModelProbe) -> PassRecorder:
        """Compute the reference rows, and take the functions of rows from the first of their
        passes: those in the model, and what experts and fused modules compute between their
        matmuls."""
        model, recorder = self.runner.model, PassRecorder(self.runner, self.reference)
        with self.scratch.in_place():
            probe.compute_reference(recorder.recording())
        hidden = (*row_functions(kernel_experts(model)), *fused_functions(model))
        more = [RowOp(name, dtype, shape, fn) for name, fn, shape, dtype in hidden]
        self.ops, seen = {}, dict[str, int]()
        for op in (*recorder.row_ops, *more):
            seen[op.name] = count = seen.get(op.name, 0) + 1
            self.ops[op.name if count == 1 else f"{op.name} ({count})"] = op
        return recorder

    def keeps_places(self, name: str) -> bool:
        """Fact 1 of a linear or another function of rows in the reference bucket."""
        with self.scratch.in_place():
            users, of_rows, pools = self._function(name)
            if users:
                # Small rows beside much larger ones: what compares all rows with a number of its
                # own shows there. Its operators are probed by themselves.
                pools[0][::2] *= SMALL
            return keeps_places(of_rows, pools, self.reference)

    def agrees(self, name: str, rows: int) -> bool:
        """Fact 2: whether its rows have the reference bucket's bits in passes of ``rows`` rows."""
        with self.scratch.in_place():
            users, of_rows, pools = self._function(name)
            return users or agree(of_rows, pools, rows, self.reference)

    def _function(self, name: str) -> tuple[bool, Callable[[Tensor], Tensor], list[Tensor]]:
        """Whether it is a module that runs code of the user's, it as a function of [R, N], and
        pools of rows to probe it with."""
        op = self.ops[name] if name in self.ops else self._linear(name)
        # Operators were recorded behind autocast.
        is_module = name not in self.ops or isinstance(op.fn, nn.Module)

        def of_rows(rows: Tensor) -> Tensor:
            flush()
            with self._autocast.on() if is_module else nullcontext():
                return op.fn(rows.view(1, -1, *op.shape))[0]

        pools = [probe_pool(prod(op.shape), op.dtype, self.runner.device, op.weight)]
        if name in self.ops and op.weight is None and not op.users:
            pools += sensitive_pool(of_rows, pools[0])
        return op.users, of_rows, pools

    def _linear(self, name: str) -> RowOp:
        """A linear of the model as a function of rows."""
        module = self.runner.model.get_submodule(name)
        shape, (weight,) = linear_shape(module), self._autocast.cast(linear_weight(module))
        assert shape is not None
        dtype = self.runner.dtype if weight is None else weight.dtype
        product: Callable[[Tensor], Tensor] = module
        if isinstance(module, nn.Linear) and type(module).__module__.startswith(ROUTERS):
            product = partial(nn.Linear.forward, module)
        return RowOp(name, dtype, shape[:1], product, weight)


def check_pass(runner: ModelRunner, probe: ModelProbe) -> PassRecorder:
    """A pass on the model's own weights, recorded. Raises DeterminismError where an operator runs
    under an autocast of the forward's own, or writes to a parameter or buffer."""
    served, rows = runner.served, runner.buckets.reference
    recorder = PassRecorder(runner, rows)
    try:
        with other_weights({}, runner.model):
            before = served.marks()
            with recorder.recording():
                probe.run_tokens(token_sets(runner.vocab_size, rows)[-1])
            now = dict(served.marks())
    finally:  # what the forward raises may follow from it, as of another dtype
        refuse_autocast(recorder)
    refuse_written({name for name, mark in before if now.get(name, mark) != mark})
    return recorder


def refuse_autocast(recorder: PassRecorder) -> None:
    """Raise DeterminismError where something ran under another autocast than the pass."""
    if recorder.autocast is not None:
        operator, where = recorder.autocast
        raise DeterminismError(
            f"{where or MODEL} turns autocast on or off inside the model's forward ({operator} ran "
            "under another than the call): load the model in the dtype that it is to compute in, "
            "and remove the autocast, to use deterministic=True"
        )


def refuse_written(names: Collection[str]) -> None:
    """Raise DeterminismError if there are tensors that passes of the model write to."""
    if names:
        raise DeterminismError(
            f"{min(names)} is written to by the model's own passes, as by observers for "
            "quantization; use model.apply(torch.ao.quantization.disable_observer), or remove the "
            "module, to use deterministic=True"
        )


def prove_reference(prober: Prober) -> ProbeResults:
    """The results, which know one bucket; the linear kernel gets the linears that are unsound,
    unless the config fixes whom it serves. Raises as ``check_pass``."""
    begun = time.perf_counter()
    runner, modes = prober.runner, prober.modes
    moved = [name for name in prober.linears if not prober.keeps_places(name)]
    every = linear_kinds(runner.model) if runner.config.linear == "auto" else {}
    served = modes.serve([n for name in moved for n in every.get(name, ())])
    if served:
        moved = [name for name in prober.linears if not prober.keeps_places(name)]
    probe = ModelProbe(runner)
    # Routers of random numbers may send all rows one way, and the model's own another.
    recorders = [check_pass(runner, probe)]
    rows = prober.reference
    with prober.scratch.in_place():
        recorders += prober.record(probe, token_sets(runner.vocab_size, rows)[:1])
    recorders.append(prober.prepare(probe))
    unsound = data_dependent(r.matmuls for r in recorders)
    unsound += [wrong for r in recorders for wrong in reads_rows(r)][:1]
    if not probe.sound.any():
        unsound.append(Unsound(MODEL, NOT_FINITE))
    moved += [name for name in prober.ops if not prober.keeps_places(name)]
    unsound += [Unsound(name, f"{name}: {PLACES.format(rows)}") for name in moved]
    kinds = attention_kinds(runner, far=runner.kernels.backend == "triton")
    attention = compare_attention(runner, kinds, (), MANY_ROWS, ATTENTION_SECONDS)
    unsound += unsound_attention(attention)
    unsound += compare_passes(prober, probe, range(1, FIRST_PASSES + 1))
    took, seconds = time.perf_counter() - begun, probe.took.get(rows, 0.0)
    bucket = BucketResult(rows, not unsound, (), seconds, modes.other_in_fast_mode(rows), took)
    kept = () if unsound else served
    return ProbeResults(rows, (bucket,), tuple(unsound), kept, attention=tuple(attention))


def prove_buckets(
    prober: Prober, results: ProbeResults, sizes: Collection[int], attention_rows: int | None
) -> ProbeResults:
    """``results`` with these further buckets, and with what a second look at the reference bucket
    shows, the first time. attention_rows: to compare of each kind; None: the first time of each
    some more."""
    first, unsound, runner = not results.confirmed, list[Unsound](), prober.runner
    probe = ModelProbe(runner, max(sizes, default=0))
    if first:
        unsound += routing(prober, probe)
    if first or sizes:
        prober.prepare(probe)
    if first:
        unsound += compare_passes(prober, probe, range(FIRST_PASSES + 1, ALL_PASSES + 1))
    if first or attention_rows is not None:
        kinds = attention_kinds(runner)
        attention = compare_attention(runner, kinds, results.attention, attention_rows)
        unsound += unsound_attention(attention)
        results = replace(results, attention=tuple(attention))
    results = replace(results, confirmed=True).with_unsound(unsound)
    for rows in sorted(sizes):
        if not results.unsound:
            results = prove_bucket(prober, probe, results, rows)
    return results


def unsound_attention(found: Iterable[ComparedRows]) -> list[Unsound]:
    """Kinds whose rows differed by their places."""
    why = PLACES.format(LENGTH)
    return [
        Unsound(f.name, f"{f.name}: {why} ({f.differing} of {f.checked})", REMEDY)
        for f in found
        if not f
    ]


def compare_passes(prober: Prober, probe: ModelProbe, numbers: Collection[int]) -> list[Unsound]:
    """Passes of the reference bucket with these numbers, compared with the reference rows."""
    rows = prober.reference
    with prober.scratch.in_place():
        wrong = probe.difference(rows, numbers)
    why = f"{MODEL}: at {rows} rows {wrong} depend on a row's index or neighbours"
    return [Unsound(MODEL, why)] if wrong else []


def routing(prober: Prober, probe: ModelProbe) -> list[Unsound]:
    """Matmuls of larger passes whose shapes depend on values, on scratch weights or the model's
    own."""
    tokens = token_sets(prober.runner.vocab_size, probe.distinct)
    with prober.scratch.in_place():
        found = data_dependent(r.matmuls for r in prober.record(probe, tokens))
    return found or data_dependent(r.matmuls for r in prober.record(probe, tokens))


def prove_bucket(
    prober: Prober, probe: ModelProbe, results: ProbeResults, rows: int
) -> ProbeResults:
    """Whether bucket ``rows`` is canonical: its functions of rows, and then the model end to end.

    A plain linear with other bits in a larger bucket runs in tiles of the reference's rows there.
    """
    begun, modes = time.perf_counter(), prober.modes
    differing = [n for n in (*prober.linears, *prober.ops) if not prober.agrees(n, rows)]
    broken = [
        name for name in differing if not (name in prober.linears and modes.can_tile(name, rows))
    ]
    if differing and not broken:
        results = replace(results, tiled=tuple(dict.fromkeys((*results.tiled, *differing))))
        modes.tile(results.tiled)
    if not broken:
        few = PASSES if rows <= prober.reference else LARGE_PASSES
        numbers = range(max(few, LEAST_ROWS // rows))
        with prober.scratch.in_place():
            wrong = probe.difference(rows, numbers)
        broken = [MODEL] if wrong else []
    own_way = () if broken else (*differing, *modes.other_in_fast_mode(rows))
    proof = time.perf_counter() - begun
    seconds = probe.took.get(rows, 0.0)
    found = BucketResult(rows, not broken, tuple(broken), seconds, own_way, proof)
    return results.with_bucket(found)
