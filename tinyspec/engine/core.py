"""One step: propose drafts, schedule a pass, launch it, fetch its results, commit. Knows no user
and no text.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from tinyspec.engine.commit import Committer
from tinyspec.engine.drafter import OWN, Drafter, FastPath, NgramDrafter, proposals
from tinyspec.engine.launcher import InFlightPass, Launcher
from tinyspec.engine.trace import Trace
from tinyspec.errors import named
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import Sampler
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import PassRecord
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.thinking.thinker import Thinker

# Columns of the sequence table: code of the user's, or more than ids, has part in sampling or
# committing what a sequence gets.
SPECIAL = ("special_sampling", "special_commit", "scores_prompt")


@dataclass(eq=False)
class EngineCore:
    """Runs scheduler, runner, sampler and committer in turn; keeps a record of each pass, and with
    ``trace`` what became of its rows."""

    admission: Admission
    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    committer: Committer
    drafter: Drafter
    records: deque[PassRecord]
    overlap: bool = False
    trace: Trace | None = None
    thinker: Thinker | None = None
    _under_way: InFlightPass | None = None
    _proposed: int = 0
    _looked_up: int = 0

    def __post_init__(self) -> None:
        self.table, self.stats = self.admission.table, self.admission.stats
        self.launcher = Launcher(self.admission, self.runner, self.sampler, self.thinker)

    @property
    def drafts_by_user(self) -> bool:
        """Whether drafts come from the user's drafter or model."""
        return not isinstance(self.drafter, OWN)

    def propose(self) -> None:
        """Before a step: draft for sequences without drafts, their given tokens or what the drafter
        proposes, unless the step's pass is under way. Plain sequences get drafts from a real
        drafter only, not from the fast path."""
        table, rows = self.table, self.table.rows
        if self._is_under_way:
            return
        if isinstance(self.drafter, OWN) and self.drafter.pauses:
            if not table.any("given"):
                return
            rows = rows[table.given[rows]]
        rows = rows[table.num_drafts[rows] == 0]
        limits = table.draft_limits(rows)
        rows, limits = rows[limits > 0], limits[limits > 0]
        if not len(rows):
            return
        asked: list[tuple[Sequence, int]] = []
        for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
            sequence = table.sequences[row]
            if (given := sequence.given_tokens) is not None:
                place = sequence.num_generated
                self._draft(sequence, given[place : place + limit])
            elif sequence.pending == 1:
                asked.append((sequence, limit))
        if not asked:
            return
        histories, most = [one.history for one, _ in asked], max(limit for _, limit in asked)
        found = proposals(self.drafter, histories, most)
        for (sequence, limit), drafts in zip(asked, found, strict=True):
            if isinstance(drafts, Exception):
                self.committer.fail(sequence, f"the drafter raised {named(drafts)}", drafts)
            else:
                self._looked_up += self._draft(sequence, drafts[:limit])

    def _draft(self, sequence: Sequence, drafts: list[int]) -> int:
        """Let these be drafts, up to the first that may not follow; how many there are."""
        drafts = list(takewhile(range(self.runner.vocab_size).__contains__, drafts))
        if sequence.grammar is not None and sequence.given_tokens is None:
            drafts = sequence.grammar.beginning(sequence.generated, drafts)
        sequence.drafts = drafts
        sequence.proposed = bool(drafts)
        sequence.stats.drafted += len(drafts)
        self._proposed += len(drafts)
        return len(drafts)

    def step(self) -> None:
        """Run one pass, in the state of ``runner.torch_state``, and commit what it found. With
        ``overlap`` the pass after it is under way then."""
        began, own = time.perf_counter(), time.process_time()
        done, committer = self._next(), self.committer
        if done is None:
            return
        if self.overlap:
            self._under_way = self._look_ahead(done)
        before = [] if self.trace is None else self.trace.before(done)
        results = None
        try:
            results = done.fetch()
            committer.commit(done, results)
        except Exception as error:
            self._isolate_failure(done, error)
        seconds = time.perf_counter() - began
        if results is not None:  # a CPU is not charged with waiting for another process
            of_process = time.process_time() - own
            charged = min(seconds, of_process) if self.runner.device.type == "cpu" else seconds
            self.scheduler.buckets.ran(done.record.bucket, done.record.canonical, charged)
            if isinstance(self.drafter, NgramDrafter):
                counts = self._looked_up, committer.looked_up
                self.drafter.account(done.record, *counts, self.scheduler.buckets)
        self._record(done.record, seconds)
        if self.trace is not None:
            self.trace.after(done, before, results, began, committer.ended)

    @property
    def _is_under_way(self) -> bool:
        return self._under_way is not None and bool(self._under_way.alive.any())

    def _next(self) -> InFlightPass | None:
        """The pass to be committed next: the one that is under way, or a new one."""
        if self._is_under_way:
            launched, self._under_way = self._under_way, None
            return launched
        self.drain()
        work_pass = self.scheduler.schedule()
        if work_pass is None:
            return None
        return self.launcher.launch(*self.launcher.pack(work_pass))

    def _look_ahead(self, launched: InFlightPass) -> InFlightPass | None:
        """Launch the pass after ``launched``, whose results are not in, where it can be drawn up
        without them: what they would change is left out when they are committed."""
        ahead = isinstance(self.drafter, FastPath) and launched.predictable
        # A plan that is not launched would leave its mark on the next one: nothing that may not
        # be in the pass is planned.
        if not ahead or any(map(self.table.any, SPECIAL)) or not launched.alive.all():
            return None
        with launched.committed_ahead():
            if not self.admission.settled or (work_pass := self.scheduler.schedule()) is None:
                return None
            packed = self.launcher.pack(work_pass, launched)
        # Code of the user's in the model may end requests: the table is set back by then.
        return self.launcher.launch(*packed)

    def drain(self) -> None:
        """Wait for a pass that is under way, and drop it: whoever goes on runs it again. What it
        raised concerns no other."""
        launched, self._under_way = self._under_way, None
        if launched is not None:
            with self.runner.torch_state(), suppress(Exception):
                launched.pending.fetch()

    def _isolate_failure(self, failed: InFlightPass, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        table, works = self.table, failed.works
        sequences: list[Sequence] = [table.sequences[n] for n in works.rows[failed.alive].tolist()]
        if len(works) > 1:
            self.admission.isolate(sequences)
        elif not sequences:
            return
        elif sequences[0].num_drafts:
            sequences[0].forbid_drafts()
            self.admission.isolate(sequences)
        elif works.num_rows > 1:
            self.admission.isolate(sequences, row_limit=works.num_rows // 2)
        else:
            why = f"the pass raised {named(error)}"
            self.committer.fail(sequences[0], why, error)

    def _record(self, record: PassRecord, seconds: float) -> None:
        record.number, record.seconds = sum(self.stats.passes.values()), seconds
        record.drafted += self._proposed
        self._proposed = self._looked_up = 0
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.observe(record.accepted, record.rollbacks)
