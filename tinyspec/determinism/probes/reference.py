"""What a first deterministic token waits for: that the reference bucket is sound.

Linears, other functions of rows, attention and the model end to end give a row the same bits in
every place of the reference bucket, the shapes of matmuls depend on no value, and nothing turns
autocast on. Knows models and passes, not requests.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from tinyspec.determinism.probe_results import BucketResult, ProbeResults, Unsound
from tinyspec.determinism.probes.attention import probe_attention, summary
from tinyspec.determinism.probes.autocast import refuse_autocast
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.routing import TOKEN_SETS, OpRecorder, data_dependent
from tinyspec.determinism.probes.row_functions import BucketInvariance
from tinyspec.determinism.probes.steps import Steps
from tinyspec.determinism.probes.workspace import Workspace

MODEL = "model"
NOT_FINITE = (
    "model: its passes on weights of the probe's own making give no finite keys and values, so "
    "that nothing could be compared"
)
# Passes end to end: before the first token, and with those that follow while requests run. The one
# of number 0 is like the first of those that they are compared with.
FIRST_PASSES, ALL_PASSES = 2, 8
# Passes on scratch weights whose matmuls are compared, beside one on the model's own.
RECORDED_PASSES = 2


@dataclass
class ReferenceProof:
    """One proof, in two parts: between them the linear kernel may get what is broken. stage: what
    it is at, for users to read."""

    workspace: Workspace
    functions: list[BucketInvariance] = field(default_factory=list)
    unsound: list[Unsound] = field(default_factory=list)
    stage: str = ""

    def linears(self) -> Steps[list[str]]:
        """The first names of the kinds of linears that are unsound."""
        self.functions = yield from self._of(self.workspace.linears, "1 of 4, linear layers")
        return [f.name for f in self.functions if not f.position]

    def rest(self, kernel_linears: tuple[str, ...]) -> Steps[ProbeResults]:
        """Everything else in turn; the facts, which know one bucket.

        Raises DeterminismError where autocast is turned on.
        """
        work = self.workspace
        probe = work.probe()
        recorders: list[OpRecorder] = []
        recording = work.recording(work.reference, recorders)

        def own_pass() -> None:
            with recording():
                probe.run_tokens(work.reference, TOKEN_SETS[-1])

        # Routers of random numbers may send all rows one way, and the model's own another.
        refuse_autocast(work.runner, own_pass)
        yield
        yield from self._scratch_passes(probe, recorders)
        self.unsound += [Unsound(f.name, str(f.position)) for f in self.functions if not f.position]
        self.stage = "3 of 4, attention"
        attention, wrong = summary(probe_attention(work.runner))
        self.unsound += wrong
        yield
        self.stage = "4 of 4, whole passes"
        yield from self._compare(probe)
        seconds = probe.seconds(work.reference, 0, canonical=True)
        bucket = BucketResult(work.reference, not self.unsound, (), seconds, seconds)
        return ProbeResults(
            work.reference,
            (bucket,),
            tuple(self.unsound),
            () if self.unsound else kernel_linears,
            attention=tuple(attention),
            labels={f.name: {work.reference: 0 if f.position else None} for f in self.functions},
            compared=FIRST_PASSES,
        )

    def _of(self, names: Collection[str], stage: str) -> Steps[list[BucketInvariance]]:
        found = []
        for number, name in enumerate(names, start=1):
            self.stage = f"{stage}: {number} of {len(names)}"
            function, _ = yield from self.workspace.function_steps(name, (), proven=False)
            found.append(replace(function, name=name))
        return found

    def _scratch_passes(self, probe: ModelProbe, recorders: list[OpRecorder]) -> Steps[None]:
        """The reference rows; meanwhile matmuls, which are compared with those of ``recorders``,
        and functions of rows are recorded."""
        work = self.workspace
        self.stage = "2 of 4, passes of the reference bucket"
        recording = work.recording(work.reference, recorders)

        def passes() -> Steps[None]:
            several = -(-probe.distinct // work.reference)
            for tokens in TOKEN_SETS[: max(1, RECORDED_PASSES - several)]:
                with recording():
                    probe.run_tokens(work.reference, tokens)
                yield
            work.known = yield from probe.compute_reference(few)

        def few() -> AbstractContextManager[None]:
            return recording() if len(recorders) <= RECORDED_PASSES else nullcontext()

        yield from work.on_scratch(passes())
        self.unsound += data_dependent(r.matmuls for r in recorders)
        self.unsound += [wrong for r in recorders for wrong in r.reads.unsound()][:1]
        work.record(recorders[1])
        assert work.ops is not None and work.known is not None
        if not work.known.comparable:
            self.unsound.append(Unsound(MODEL, NOT_FINITE))
        self.functions += yield from self._of(work.ops, "2 of 4, functions of rows")

    def _compare(self, probe: ModelProbe) -> Steps[None]:
        wrong = yield from compare_steps(self.workspace, probe, range(1, FIRST_PASSES + 1))
        if wrong:
            self.unsound.append(wrong)


def compare_steps(
    work: Workspace, probe: ModelProbe, numbers: Collection[int]
) -> Steps[Unsound | None]:
    """Passes of the reference bucket with these numbers, compared with the reference rows."""
    rows = work.reference

    def passes() -> Steps[str | None]:
        wrong = None
        for number in numbers:
            wrong = wrong or probe.difference(rows, number)
            yield
        return wrong

    wrong = yield from work.on_scratch(passes())
    why = f"{MODEL}: at {rows} rows {wrong} depend on a row's index or neighbours"
    return Unsound(MODEL, why) if wrong else None
