"""What the probes of one model share: scratch weights, its functions of rows, the reference rows.

Memory that lasts as long as there is something to find. Knows passes, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import TypeVar

from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.determinism.probes.bits import PositionResult, position_invariant
from tinyspec.determinism.probes.linears import linear_steps, steps_in_buckets
from tinyspec.determinism.probes.model import ModelProbe, ReferenceRows
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, RowOp
from tinyspec.determinism.probes.row_functions import (
    REFERENCE_PASSES,
    BucketInvariance,
    probe_pool,
)
from tinyspec.determinism.probes.steps import Steps, within
from tinyspec.model.fused_layer import fused_functions
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.moe import kernel_experts, row_functions
from tinyspec.model.patched_model import patched_of
from tinyspec.model.scratch_model import ScratchModel
from tinyspec.runner.capacity import refuse_shortage
from tinyspec.runner.model_runner import ModelRunner

# Times the needles of other probes, so that neighbours of ordinary size are larger.
SMALL = 2.0**-10
T = TypeVar("T")
Found = tuple[BucketInvariance, tuple[int, ...]]


class Workspace:
    """Of one model. seconds: of a step on scratch weights, about; None: it need not end soon.

    linears: the first name of every kind. ops: other functions of rows, by name; None before
    ``record``. known: the reference rows; None before ``compute_reference``.

    Raises DeterminismError where memory does not suffice.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, seconds: float | None = None):
        self.runner = runner
        self.config = config
        self.seconds = seconds
        self._scratch = ScratchModel(runner.model)
        refuse_shortage(self._scratch.nbytes, runner.device)
        self.experts = kernel_experts(runner.model)
        self.ops: dict[str, RowOp] | None = None
        self.known: ReferenceRows | None = None

    @property
    def reference(self) -> int:
        return self.runner.buckets.reference

    @property
    def linears(self) -> list[str]:
        return list(linear_kinds(self.runner.model))

    def on_scratch(self, steps: Steps[T]) -> Steps[T]:
        """Steps on scratch weights."""
        return within(self._scratch.run, steps, self.seconds)

    def probe(self, rows: int = 0) -> ModelProbe:
        """Of passes of up to so many rows."""
        return ModelProbe(self.runner, self.config, rows, self.known)

    def recording(
        self, rows: int, recorders: list[OpRecorder]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Contexts that record a pass of ``rows`` rows each, in one more of ``recorders``."""

        def begin() -> AbstractContextManager[None]:
            logit_rows = min(rows, self.reference)
            recorders.append(OpRecorder(self.runner.model, rows, logit_rows, self.experts))
            return recorders[-1].recording(patched_of(self.runner.model).context)

        return begin

    def record(self, recorder: OpRecorder) -> None:
        """Take the functions of rows from a pass on scratch weights: those in the model, and what
        experts and fused modules compute between their matmuls."""
        hidden = (*row_functions(self.experts), *fused_functions(self.runner.model))
        ops = [RowOp(name, dtype, shape, fn) for name, fn, shape, dtype in hidden]
        self.ops = dict(_named([*recorder.row_ops, *ops]))

    def prepare(self) -> Steps[None]:
        """The functions of rows and the reference rows, where they are not known."""
        probe = self.probe()
        recorders: list[OpRecorder] = []
        recording = self.recording(self.reference, recorders)

        def passes() -> Steps[None]:
            if self.ops is None:
                with recording():
                    probe.run_tokens(self.reference, TOKEN_SETS[0])
                self.record(recorders[0])
                yield
            if self.known is None:
                self.known = yield from probe.compute_reference()

        yield from self.on_scratch(passes())

    def function_steps(
        self, name: str, sizes: Collection[int], proven: bool = True
    ) -> Steps[Found]:
        """Facts 1 and 2 of a linear or another function of rows in the reference bucket and
        ``sizes``, and the buckets in which its operands are swapped from now on.

        proven: fact 1 in the reference bucket is.
        """
        reference = self.reference
        position = PositionResult(name, reference, 0, 0, -1, -1) if proven else None
        counts = [reference, *(rows for rows in sizes if rows != reference)]
        if self.ops is None or name not in self.ops:
            found = yield from self.on_scratch(linear_steps(self.runner, name, counts, position))
            return found
        op = self.ops[name]
        steps = self._users_steps(op, counts) if op.users else self._op_steps(op, counts, position)
        return (yield from self.on_scratch(steps)), ()

    def _users_steps(self, op: RowOp, sizes: list[int]) -> Steps[BucketInvariance]:
        """Small rows beside much larger ones in the reference bucket: what compares all rows with
        a number of its own shows there. Its operators are probed in every bucket."""
        pool = probe_pool(prod(op.shape), op.dtype, self.runner.device)[::2] * SMALL

        def of_rows(rows: Tensor) -> Tensor:
            return op.fn(rows.view(1, -1, *op.shape))[0]

        found = position_invariant(of_rows, pool, self.reference, op.name, REFERENCE_PASSES)
        yield
        labels: dict[int, int | None] = dict.fromkeys(sizes, 0 if found else None)
        return BucketInvariance(op.name, self.reference, found, labels)

    def _op_steps(
        self, op: RowOp, sizes: list[int], proven: PositionResult | None
    ) -> Steps[BucketInvariance]:
        pool = probe_pool(prod(op.shape), op.dtype, self.runner.device, op.weight)

        def shaped(rows: Tensor) -> Tensor:
            return op.fn(rows.view(*rows.shape[:2], *op.shape))

        search = op.weight is None
        return (
            yield from steps_in_buckets(self.runner, shaped, sizes, pool, op.name, search, proven)
        )


def _named(ops: list[RowOp]) -> Iterator[tuple[str, RowOp]]:
    """By names that are all different."""
    seen: dict[str, int] = {}
    for op in ops:
        seen[op.name] = count = seen.get(op.name, 0) + 1
        yield (op.name if count == 1 else f"{op.name} ({count})"), op


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Where the results are known: compiles and loads what a first pass needs, before a request."""
    sizes = runner.buckets.sizes if runner.device.type == "cuda" else [runner.buckets.reference]
    ModelProbe(runner, config, sizes[-1]).warm_up(sizes)
