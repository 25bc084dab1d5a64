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
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
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
from tinyspec.determinism.proving import Meanwhile
from tinyspec.determinism.recorder import (
    Matmul,
    PassRecorder,
    RowOp,
    data_dependent,
    reads_rows,
    token_sets,
)
from tinyspec.determinism.results import BucketResult, ComparedRows, ProbeResults, Unsound
from tinyspec.determinism.rows import agree, keeps_places, probe_pool, sensitive_pool
from tinyspec.errors import DeterminismError
from tinyspec.interrupts import flush
from tinyspec.model.cpu_linears import CpuLinear
from tinyspec.model.fused_layer import fused_functions
from tinyspec.model.linears import TRANSPOSED, linear_kinds, linear_shape, linear_weight
from tinyspec.model.moe import kernel_experts, row_functions
from tinyspec.model.one_dnn import COPIED_ROWS
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


# Whether a function of rows is a module that runs code of the user's, it as a function of [R, N],
# and pools of rows.
Function = tuple[bool, Callable[[Tensor], Tensor], list[Tensor]]
# By name, shape and dtype of a function of rows, the rows that show most of it, which take long to
# find: for the further proofs of the same modules, on the same threads.
Found = dict[tuple[Any, ...], list[Tensor]]


class Subject(NamedTuple):
    """What a proof is of: a runner, in which modes its linears run, and what was found by proofs
    before. meanwhile: what others do in between."""

    runner: ModelRunner
    modes: LinearModes
    found: Found
    meanwhile: Meanwhile


class Prober:
    """Probes one model's linears, other functions of rows and passes, for as long as a proof lasts,
    as it takes memory; all while its ``scratch`` weights are in place.

    probe: its passes, of up to ``rows`` rows. linears: the first name of every kind. ops: other
    functions of rows, by name, after ``prepare``. seconds: that it took by itself.

    Raises DeterminismError where memory does not suffice.
    """

    def __init__(self, subject: Subject, rows: int = 0):
        self._begun = self._resumed = time.perf_counter()
        self._rest = self._rests = 0.0  # seconds of the last pause, of all
        self.runner, self.modes, self._found, self._meanwhile = subject
        self.reference = self.runner.buckets.reference
        self._autocast = self.runner.served.autocast
        self.scratch = ScratchModel(self.runner.model)
        refuse_shortage(self.scratch.nbytes, self.runner.device)
        self.probe = ModelProbe(self.runner, rows)
        self.linears = list(linear_kinds(self.runner.model))
        self.ops: dict[str, RowOp] = {}
        self._known: dict[str, Function] = {}

    def pause(self) -> None:
        """Between passes: let others use the engine, for half of the time."""
        now = time.perf_counter()
        if now - self._resumed >= self._rest:
            self._meanwhile(self.scratch.aside())
            self._resumed = time.perf_counter()
            self._rest = self._resumed - now
            self._rests += self._rest

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun - self._rests

    def matmuls(self, tokens: Iterable[Tensor]) -> list[list[Matmul]]:
        """Of passes with each of these tokens, on the weights that are in place."""
        found = []
        for ids in tokens:
            self.pause()
            found.append(record(self.runner, self.probe, ids).matmuls)
        return found

    def prepare(self) -> PassRecorder:
        """Compute the reference rows, and take the functions of rows from the first of their
        passes: those in the model, and what experts and fused modules compute between their
        matmuls."""
        self.pause()
        model, recorder = self.runner.model, PassRecorder(self.runner, self.reference)
        self.probe.compute_reference(recorder.recording())
        hidden = (*row_functions(kernel_experts(model)), *fused_functions(model))
        more = [RowOp(name, dtype, shape, fn) for name, fn, shape, dtype in hidden]
        seen = Counter[str]()
        for op in (*recorder.row_ops, *more):
            seen[op.name] += 1
            number = f" ({seen[op.name]})" if seen[op.name] > 1 else ""
            self.ops[op.name + number] = op
        return recorder

    def moved(self, names: Iterable[str]) -> list[str]:
        """Those of linears and other functions of rows that break fact 1 in the reference
        bucket."""
        return [name for name in names if not self.keeps_places(name)]

    def keeps_places(self, name: str) -> bool:
        """Fact 1 of one of them."""
        self.pause()
        users, of_rows, pools = self._function(name)
        if users:
            # Small rows beside much larger ones: what compares all rows with a number of its own
            # shows there. Its operators are probed by themselves.
            pools[0][::2] *= SMALL
        return keeps_places(of_rows, pools, self.reference)

    def agrees(self, name: str, rows: int, transposed: bool = False) -> bool:
        """Fact 2: whether its rows have the reference bucket's bits in passes of ``rows`` rows;
        there ``transposed``, which only some linears can be."""
        self.pause()
        if name not in self._known:  # of another bucket
            self._known[name] = self._function(name)
        users, of_rows, pools = self._known[name]
        other = of_rows
        if transposed:
            linear = self.runner.model.get_submodule(name)
            if not isinstance(linear, CpuLinear):
                return False
            other = linear.transposed
        return users or agree(of_rows, pools, rows, self.reference, other)

    def copies_agree(self, rows: int) -> bool:
        """Whether prepacked weights have the bits of the weights themselves in passes of so many
        rows."""
        if rows > COPIED_ROWS:
            return False
        modules = {name: self.runner.model.get_submodule(name) for name in self.linears}
        own = {name: m for name, m in modules.items() if isinstance(m, CpuLinear)}
        for name, linear in own.items():
            self.pause()
            *_, (pool, *_) = self._known.get(name) or self._function(name)
            x = pool[torch.arange(rows) % (len(pool) - 1)]
            if not linear.copy_keeps_bits(x, self.runner.prepacked):
                return False
        return bool(own)

    def _function(self, name: str) -> Function:
        """One of them, and pools of rows to probe it with."""
        op = self.ops[name] if name in self.ops else self._linear(name)
        # Operators were recorded behind autocast.
        is_module, fn, shape = name not in self.ops or isinstance(op.fn, nn.Module), op.fn, op.shape

        def of_rows(rows: Tensor) -> Tensor:
            flush()
            with self._autocast.on() if is_module else nullcontext():
                return fn(rows.view(1, -1, *shape))[0]

        pools = [probe_pool(prod(op.shape), op.dtype, self.runner.device, op.weight)]
        if name in self.ops and op.weight is None and not op.users:
            key = name, op.shape, op.dtype
            if key not in self._found:
                self._found[key] = sensitive_pool(of_rows, pools[0])
            pools += self._found[key]
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

    def difference(self, rows: int, numbers: Collection[int]) -> str | None:
        """As the probe's."""
        for number in numbers:
            self.pause()
            if (wrong := self.probe.difference(rows, [number])) is not None:
                return wrong
        return None

    def differs(self, rows: int, numbers: Collection[int]) -> list[Unsound]:
        """What passes of ``rows`` rows with these numbers show against the reference rows."""
        wrong = self.difference(rows, numbers)
        why = f"{MODEL}: at {rows} rows {wrong} depend on a row's index or neighbours"
        return [Unsound(MODEL, why)] if wrong else []


def check_pass(runner: ModelRunner, probe: ModelProbe) -> PassRecorder:
    """A pass on the model's own weights, recorded. Raises DeterminismError where an operator runs
    under an autocast of the forward's own, or writes to a parameter or buffer."""
    served, rows = runner.served, runner.buckets.reference
    with other_weights({}, runner.model):
        before = served.marks()
        recorder = record(runner, probe, token_sets(runner.vocab_size, rows)[-1])
        written = served.written_since(before)
    refuse_written(written)
    return recorder


def record(runner: ModelRunner, probe: ModelProbe, ids: Tensor) -> PassRecorder:
    """A recorded pass. Raises as ``refuse_autocast``."""
    recorder = PassRecorder(runner, len(ids))
    try:
        with recorder.recording():
            probe.run_tokens(ids)
    finally:  # what the forward raises may follow from it, as of another dtype
        refuse_autocast(recorder)
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


def prove_reference(subject: Subject) -> ProbeResults:
    """The results, which know one bucket; the linear kernel gets the linears that are unsound,
    unless the config fixes whom it serves. Raises as ``check_pass``."""
    runner, modes, prober = subject.runner, subject.modes, Prober(subject)
    probe, rows = prober.probe, prober.reference
    with prober.scratch.in_place():
        moved = prober.moved(prober.linears)
    every = linear_kinds(runner.model) if runner.config.linear == "auto" else {}
    served = modes.serve([n for name in moved for n in every.get(name, ())])
    # Routers of random numbers may send all rows one way, and the model's own another.
    recorders = [check_pass(runner, probe)]
    with prober.scratch.in_place():
        if served:
            moved = prober.moved(prober.linears)
        recorders.append(record(runner, probe, token_sets(runner.vocab_size, rows)[0]))
        recorders.append(prober.prepare())
        unsound = data_dependent(r.matmuls for r in recorders)
        unsound += [read for r in recorders for read in reads_rows(r)][:1]
        if not probe.sound.any():
            unsound.append(Unsound(MODEL, NOT_FINITE))
        moved += prober.moved(prober.ops)
        unsound += [Unsound(name, f"{name}: {PLACES.format(rows)}") for name in moved]
        kinds = attention_kinds(runner, far=runner.kernels.backend == "triton")
        limits = MANY_ROWS, ATTENTION_SECONDS, prober.pause, lambda: prober.seconds
        attention = compare_attention(runner, kinds, (), *limits)
        unsound += unsound_attention(attention)
        unsound += prober.differs(rows, range(1, FIRST_PASSES + 1))
    took, seconds = prober.seconds, probe.took.get(rows, 0.0)
    bucket = BucketResult(
        rows, not unsound, (), seconds, copies=prober.copies_agree(rows), proof=took
    )
    kept = () if unsound else served
    return ProbeResults(rows, (bucket,), tuple(unsound), kept, attention=tuple(attention))


def see_to_hold(subject: Subject, results: ProbeResults) -> ProbeResults:
    """The results, which were kept. What one pass shows is looked at all the same, which compiles
    and loads what a first pass needs. Raises as ``check_pass``."""
    runner, modes = subject.runner, subject.modes
    modes.serve(() if results.unsound else results.kernel_linears)
    check_pass(runner, ModelProbe(runner))
    return results


def prove_buckets(
    subject: Subject, results: ProbeResults, sizes: Collection[int], attention_rows: int | None
) -> ProbeResults:
    """``results`` with these further buckets, and with what a second look at the reference bucket
    shows, the first time. attention_rows: to compare of each kind; None: the first time of each
    some more."""
    first, unsound, runner = not results.confirmed, list[Unsound](), subject.runner
    prober = Prober(subject, max(sizes, default=0))
    # On the model's own weights, and on scratch weights.
    tokens = token_sets(runner.vocab_size, prober.probe.distinct) if first else []
    own = prober.matmuls(tokens)
    with prober.scratch.in_place():
        if first:
            unsound += data_dependent(prober.matmuls(tokens)) or data_dependent(own)
        if first or sizes:
            prober.prepare()
        if first:
            unsound += prober.differs(prober.reference, range(FIRST_PASSES + 1, ALL_PASSES + 1))
        if first or attention_rows is not None:
            kinds = attention_kinds(runner)
            known = results.attention
            attention = compare_attention(runner, kinds, known, attention_rows, None, prober.pause)
            unsound += unsound_attention(attention)
            results = replace(results, attention=tuple(attention))
        results = replace(results, confirmed=True).with_unsound(unsound)
        for rows in sorted(sizes):
            if not results.unsound:
                results = prove_bucket(prober, results, rows)
    return results


def unsound_attention(found: Iterable[ComparedRows]) -> list[Unsound]:
    """Kinds whose rows differed by their places."""
    why = f"{PLACES.format(LENGTH)} ({{0.differing}} of {{0.checked}})"
    return [Unsound(f.name, f"{f.name}: {why.format(f)}", REMEDY) for f in found if not f]


def prove_bucket(prober: Prober, results: ProbeResults, rows: int) -> ProbeResults:
    """Whether bucket ``rows`` is canonical: its functions of rows, and then the model end to end.

    A plain linear with other bits in a larger bucket runs transposed there if it has the
    reference's then, or else in tiles, of the largest bucket's rows in which it has them.
    """
    begun, modes = prober.seconds, prober.modes
    names = (*prober.linears, *prober.ops)
    differing = [name for name in names if not prober.agrees(name, rows)]
    linears = [name for name in differing if name in prober.linears]
    tiles = {n: TRANSPOSED for n in linears if prober.agrees(n, rows, transposed=True)}
    for name in linears:
        if name not in tiles and modes.can_tile(name, rows):
            tiles[name] = results.tile_of(name, rows)
    broken = [name for name in differing if name not in tiles]
    copies = not broken and prober.copies_agree(rows)
    found = BucketResult(rows, not broken, tuple(broken), 0.0, tiles, copies)
    if not broken:
        modes.tile(results.with_bucket(found).tiles)
        few = PASSES if rows <= prober.reference else LARGE_PASSES
        numbers = range(max(few, LEAST_ROWS // rows))
        broken = [MODEL] if prober.difference(rows, numbers) else []
    proof, seconds = prober.seconds - begun, prober.probe.took.get(rows, 0.0)
    if broken:
        found = BucketResult(rows, False, tuple(broken), seconds)
    return results.with_bucket(replace(found, seconds=seconds, proof=proof))
