"""Probes one model: its linears, its other functions of rows, and how rows reach them.

Weights are scratch weights. What is found holds for all values of weights: kernel, tiling and order
of additions are chosen by shapes, strides, dtypes and alignment before a number is read, and two
orders that are not the same give other bits on inputs and weights made so that roundings show.
Knows passes, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import TypeVar

from torch import Tensor, nn

from tinyspec.config import EngineConfig
from tinyspec.determinism.probes.bits import PositionResult, position_invariant
from tinyspec.determinism.probes.model import ModelProbe, ReferenceRows
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, RowOp
from tinyspec.determinism.probes.row_functions import (
    REFERENCE_PASSES,
    BucketInvariance,
    probe_function,
    probe_pool,
)
from tinyspec.model.fused_layer import fused_functions
from tinyspec.model.linear_kinds import linear_kinds, linear_shape, linear_weight
from tinyspec.model.moe import kernel_experts, row_functions
from tinyspec.model.scratch_model import ScratchModel
from tinyspec.model.served_model import served_of
from tinyspec.runner.capacity import refuse_shortage
from tinyspec.runner.model_runner import ModelRunner

# Times the needles of other probes, so that neighbours of ordinary size are larger.
SMALL = 2.0**-10
# Linears defined here compute more than their product: routers.
ROUTERS = "transformers.models."
T = TypeVar("T")


class Prober:
    """Of one model, for as long as a proof lasts, as it takes memory.

    pause: called between passes; what it raises ends the proof. linears: the first name of every
    kind. ops: other functions of rows, by name, once ``record`` was called. known: the reference
    rows, once they are computed.

    Raises DeterminismError where memory does not suffice.
    """

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, pause: Callable[[], None] = lambda: None
    ):
        self.runner, self.config, self.pause = runner, config, pause
        self._scratch = ScratchModel(runner.model)
        refuse_shortage(self._scratch.nbytes, runner.device)
        self.experts = kernel_experts(runner.model)
        self.linears = list(linear_kinds(runner.model))
        self.ops: dict[str, RowOp] = {}
        self.known: ReferenceRows | None = None

    @property
    def reference(self) -> int:
        return self.runner.buckets.reference

    def on_scratch(self, function: Callable[[], T]) -> T:
        """``function()`` on scratch weights."""
        return self._scratch.run(function)

    def probe(self, rows: int = 0) -> ModelProbe:
        """Of passes of up to so many rows."""
        return ModelProbe(self.runner, self.config, rows, self.known, self.pause)

    def recording(
        self, rows: int, recorders: list[OpRecorder]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Contexts that record a pass of ``rows`` rows each, in one more of ``recorders``."""

        def begin() -> AbstractContextManager[None]:
            logit_rows = min(rows, self.reference)
            recorders.append(OpRecorder(self.runner.model, rows, logit_rows, self.experts))
            return recorders[-1].recording(served_of(self.runner.model).context)

        return begin

    def record(self, recorder: OpRecorder) -> None:
        """Take the functions of rows from a pass on scratch weights: those in the model, and what
        experts and fused modules compute between their matmuls."""
        hidden = (*row_functions(self.experts), *fused_functions(self.runner.model))
        ops = [RowOp(name, dtype, shape, fn) for name, fn, shape, dtype in hidden]
        self.ops = dict(_named([*recorder.row_ops, *ops]))

    def prepare(self) -> None:
        """The functions of rows and the reference rows, where the reference bucket is proven."""

        def passes() -> None:
            probe = self.probe()
            recorders: list[OpRecorder] = []
            with self.recording(self.reference, recorders)():
                probe.run_tokens(self.reference, TOKEN_SETS[0])
            self.record(recorders[0])
            self.known = probe.compute_reference()

        self.on_scratch(passes)

    def function(
        self, name: str, sizes: Collection[int] = (), proven: bool = True
    ) -> BucketInvariance:
        """Facts 1 and 2 of a linear or another function of rows in the reference bucket and
        ``sizes``. proven: fact 1 in the reference bucket is."""
        counts = [self.reference, *(rows for rows in sizes if rows != self.reference)]
        position = PositionResult(name, self.reference, 0, 0, -1, -1) if proven else None
        return self.on_scratch(lambda: self._function(name, counts, position))

    def _function(
        self, name: str, counts: list[int], position: PositionResult | None
    ) -> BucketInvariance:
        op = self.ops[name] if name in self.ops else self._linear(name)
        pool = probe_pool(prod(op.shape), op.dtype, self.runner.device, op.weight)

        def of_rows(rows: Tensor) -> Tensor:
            self.pause()
            return op.fn(rows.view(1, -1, *op.shape))[0]

        if op.users:
            # Small rows beside much larger ones in the reference bucket: what compares all rows
            # with a number of its own shows there. Its operators are probed in every bucket.
            small = pool[::2] * SMALL
            found = position_invariant(of_rows, small, self.reference, name, REFERENCE_PASSES)
            return BucketInvariance(
                name, self.reference, found, dict.fromkeys(counts, 0 if found else None)
            )
        search = name in self.ops and op.weight is None
        return probe_function(of_rows, pool, counts, self.reference, name, search, position)

    def _linear(self, name: str) -> RowOp:
        """A linear of the model as a function of rows."""
        module = self.runner.model.get_submodule(name)
        shape, weight = linear_shape(module), linear_weight(module)
        assert shape is not None
        dtype = self.runner.model.dtype if weight is None else weight.dtype
        product: Callable[[Tensor], Tensor] = module
        if isinstance(module, nn.Linear) and type(module).__module__.startswith(ROUTERS):
            product = partial(nn.Linear.forward, module)
        return RowOp(name, dtype, shape[:1], product, weight)


def _named(ops: list[RowOp]) -> Iterator[tuple[str, RowOp]]:
    """By names that are all different."""
    seen: dict[str, int] = {}
    for op in ops:
        seen[op.name] = count = seen.get(op.name, 0) + 1
        yield (op.name if count == 1 else f"{op.name} ({count})"), op
