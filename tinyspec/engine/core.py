"""One step: propose drafts, schedule a pass, launch it, fetch its results, commit. Knows no user
and no text.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import index

import numpy as np

from tinyspec.engine.commit import Commits, Committer
from tinyspec.engine.drafter import Drafter, FastPath, NgramDrafter
from tinyspec.engine.in_flight import InFlightPass, is_special
from tinyspec.engine.launcher import FailedPass, Launcher
from tinyspec.engine.thought_commits import ThoughtCommitter
from tinyspec.engine.trace import Trace
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import Sampled, Sampler
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, DRAFTING, EngineStats, Pass, PassRecord
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.scheduler.sequence_table import Array
from tinyspec.thinking.thinker import Thinker


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
    stats: EngineStats = field(default_factory=EngineStats)
    _under_way: InFlightPass | None = None
    _proposed: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.table = self.admission.table
        self.launcher = Launcher(self.admission, self.runner, self.sampler, self.thinker)
        self.committer.trace = self.trace
        thinker = self.thinker
        self.thoughts = None if thinker is None else ThoughtCommitter(self.committer, thinker)

    @property
    def drafts_by_user(self) -> bool:
        """Whether drafts come from the user's drafter or model."""
        return type(self.drafter) not in (FastPath, NgramDrafter)

    def step(self) -> Commits:
        """Run one pass, in the state of ``runner.torch_state``; what it committed. With ``overlap``
        the pass after it is under way then."""
        began, own = time.perf_counter(), time.process_time()
        launched = self._next()
        if launched is None:
            return self.committer.new_commits()
        if self.overlap:
            self._under_way = self._look_ahead(launched)
        if self.trace is not None:
            self.trace.begin(launched, self._under_way)
        try:
            results = launched.fetch()
            ends = self.thoughts.commit(launched) if self.thoughts else launched.works.ends
        except FailedPass as failure:
            assert isinstance(failure.__cause__, Exception)
            self._isolate_failure(launched, failure.__cause__)
        else:
            self._commit(launched, ends, *results)
            seconds = time.perf_counter() - began
            if self.runner.device.type == "cpu":  # not charged with waiting for another process
                seconds = min(seconds, time.process_time() - own)
            record = launched.record
            self.scheduler.buckets.ran(record.bucket, record.canonical, seconds)
        commits = self.committer.new_commits()
        self._close(launched.record, commits, time.perf_counter() - began)
        if self.trace is not None:
            self.trace.close(launched, began, commits.ended)
        return commits

    def propose(self) -> None:
        """Before a step: let the drafter propose, unless its pass is under way."""
        if not self._is_under_way:
            self._propose()

    @property
    def _is_under_way(self) -> bool:
        return self._under_way is not None and bool(self._under_way.alive.any())

    def _next(self) -> InFlightPass | None:
        """The pass to be committed next: the one that is under way, or a new one."""
        if self._is_under_way:
            launched, self._under_way = self._under_way, None
            return launched
        self._drop_under_way()
        work_pass = self.scheduler.schedule()
        if work_pass is None:
            return None
        return self.launcher.launch(work_pass, self._record(work_pass))

    def _look_ahead(self, launched: InFlightPass) -> InFlightPass | None:
        """Launch the pass after ``launched``, whose results are not in, where it can be drawn up
        without them: what they would change is left out when they are committed."""
        ahead = isinstance(self.drafter, FastPath) and launched.predictable
        # A plan that is not launched would leave its mark on the next one: nothing that may not
        # be in the pass is planned.
        if not ahead or is_special(self.table) or not launched.alive.all():
            return None
        with launched.committed_ahead():
            if not self.admission.settled or (work_pass := self.scheduler.schedule()) is None:
                return None
            packed = self.launcher.pack(work_pass, self._record(work_pass), launched)
        # Code of the user's in the model may end requests: the table is set back by then.
        return self.launcher.start(*packed)

    def drain(self) -> None:
        """Wait for a pass that is under way, and drop it: whoever goes on runs it again."""
        if self._under_way is not None:
            with self.runner.torch_state():
                self._drop_under_way()

    def end(self, sequences: list[Sequence], reasons: list[str]) -> Commits:
        """After tokens from outside: those with a reason end with it; what was committed."""
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason:
                self.committer.end(sequence, reason)
        commits = self.committer.new_commits()
        self.stats.committed += commits.committed
        if self.records:
            self.records[-1].committed += commits.committed
        if self.trace is not None:
            self.trace.supplied(commits.ended)
        return commits

    def _drop_under_way(self) -> None:
        """Wait for a pass whose sequences are gone; what it raised concerns no other."""
        launched, self._under_way = self._under_way, None
        if launched is not None:
            with suppress(Exception):
                launched.pending.fetch()

    def recover(self) -> Commits:
        """After a step that raised: all running sequences are computed again. Returns what the step
        had committed, which stays."""
        self.admission.preempt_all()
        return self.committer.new_commits()

    def _isolate_failure(self, launched: InFlightPass, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        work_pass = launched.work_pass
        table, rows = work_pass.table, work_pass.works.rows[launched.alive]
        sequences: list[Sequence] = [table.sequences[row] for row in rows.tolist()]
        if len(work_pass.works) > 1:
            self.admission.isolate(sequences)
        elif not sequences:
            return
        elif sequences[0].num_drafts:
            sequences[0].forbid_drafts()
            self.admission.isolate(sequences)
        elif work_pass.works.num_rows > 1:
            self.admission.isolate(sequences, row_limit=work_pass.works.num_rows // 2)
        else:
            why = f"the pass raised {type(error).__name__}: {error}"
            self.committer.fail(sequences[0], why, error)

    def _propose(self) -> None:
        """Draft for sequences without drafts: their given tokens, or what the drafter proposes.
        Plain sequences get drafts from a real drafter only, not from the fast path."""
        table, rows = self.table, self.table.rows
        if isinstance(self.drafter, FastPath):
            if not table.any("given"):
                return
            rows = rows[table.given[rows] & table.deterministic[rows]]
        rows = rows[table.num_drafts[rows] == 0]
        if not len(rows):
            return
        asked: list[tuple[Sequence, int]] = []
        for row, limit in zip(rows.tolist(), table.draft_limits(rows).tolist(), strict=True):
            sequence = table.sequences[row]
            if limit > 0 and sequence.given_tokens is not None:
                place = sequence.num_generated
                self._add_proposal(sequence, sequence.given_tokens[place : place + limit])
            elif limit > 0 and sequence.pending == 1:
                asked.append((sequence, limit))
        if not asked:
            return
        longest = max(limit for _, limit in asked)
        try:
            proposals = self._ask([sequence for sequence, _ in asked], longest)
        except Exception:
            proposals = [self._ask_alone(sequence, longest) for sequence, _ in asked]
        for (sequence, limit), proposal in zip(asked, proposals, strict=True):
            if sequence.running:  # unless the drafter raised for it
                self._add_proposal(sequence, proposal[:limit])

    def _ask(self, sequences: list[Sequence], n: int) -> list[list[int]]:
        """The drafter's proposals, checked."""
        with callers_modes():
            proposals = self.drafter.propose([s.history for s in sequences], n)
        checked = [[index(token) for token in proposal] for proposal in proposals]
        if len(checked) != len(sequences):
            raise ValueError(f"{len(checked)} proposals for {len(sequences)} sequences")
        return checked

    def _ask_alone(self, sequence: Sequence, n: int) -> list[int]:
        """The drafter raised for several sequences: those for which it raises alone fail."""
        try:
            return self._ask([sequence], n)[0]
        except Exception as error:
            why = f"the drafter raised {type(error).__name__}: {error}"
            self.committer.fail(sequence, why, error)
            return []

    def _add_proposal(self, sequence: Sequence, proposal: list[int]) -> None:
        vocab_size = self.runner.vocab_size
        drafts = list(takewhile(lambda token: 0 <= token < vocab_size, proposal))
        sequence.drafts = drafts
        sequence.proposed = bool(drafts)
        sequence.stats.drafted += len(drafts)
        if self.trace is not None:
            self.trace.proposed(sequence, drafts)
        self._proposed += len(drafts)

    def _commit(
        self,
        launched: InFlightPass,
        ends: Array,
        found: Sampled,
        decisions: Array | None,
        prompt_logprobs: Array | None,
    ) -> None:
        """Mark what the works have computed, start the siblings that wait for it, and commit tokens
        or keep them as drafts, whose errors are left to the verify. What is not alive is left out,
        and tokens of works that are not good to their end."""
        table, works, alive = self.table, launched.works, launched.alive
        for result in found.special.values():
            self.runner.torch_state.stream.hand_out(result.scores, result.logits)
        final = alive & (works.kinds != DRAFT)
        table.advance(works.rows[final], ends[final], launched.work_pass.canonical)
        if prompt_logprobs is not None:
            launched.keep_prompt_logprobs(alive, ends, prompt_logprobs)
        if ends is not works.ends:  # what was thought about
            alive &= ends == works.ends
        rows, firsts, counts = launched.rows, launched.firsts, launched.counts
        kept = (final & alive)[launched.work]
        if launched.leads:
            rows = self._start_siblings(launched, alive)
            kept &= rows >= 0
        if launched.work_pass.way == DRAFTING:
            drafting = (alive & (works.kinds == DRAFT))[launched.work]
            # What follows a draft that ended the drafts was drafted before that was known.
            drafting &= ~table.draft_ended[rows]
            drafting_rows, tokens = rows[drafting], found.tokens[firsts[drafting]]
            table.draft(drafting_rows, tokens)
            if self.trace is not None:
                self.trace.drafted(drafting_rows, tokens)
            launched.record.drafted = int(drafting.sum())
        if np.count_nonzero(kept) < len(kept):
            rows, firsts, counts = rows[kept], firsts[kept], counts[kept]
            decisions = None if decisions is None else decisions[:, kept]
        if supplied := table.places("supplied", rows):
            self.committer.keep_logits(rows[supplied], firsts[supplied], found)
            others = np.delete(np.arange(len(rows)), supplied)
            rows, firsts, counts = rows[others], firsts[others], counts[others]
            decisions = None if decisions is None else decisions[:, others]
        if len(rows):
            self.committer.commit(rows, firsts, counts, found, decisions)

    def _start_siblings(self, launched: InFlightPass, alive: Array) -> Array:
        """Start the siblings of prompts that are computed, those without a place wait; the rows of
        ``launched``, siblings' own among them, -1 for those that do not start."""
        places = {sibling: place for place, sibling in launched.siblings}
        rows = launched.rows.copy()
        rows[list(places.values())] = -1
        works = launched.works
        waits = alive & self.table.draft_free[works.rows] & (works.yields > 0)
        for row in works.rows[waits].tolist():
            leader = self.table.sequences[row]
            while leader.siblings:
                sibling = leader.siblings.pop(0)
                if sibling not in places or not self.admission.can_fork(leader):
                    self.admission.add(sibling)
                    continue
                if (copy := self.admission.fork(leader, sibling)) is not None:
                    self.runner.cache.copy_page(*copy)
                rows[places[sibling]] = sibling.row
            leader.forbid_drafts(leader.draft_free)
        return rows

    def _record(self, planned: Pass) -> PassRecord:
        return PassRecord.of(planned, len(self.admission.waiting), self.admission.pool.num_held)

    def _close(self, record: PassRecord, commits: Commits, seconds: float) -> None:
        record.number, record.seconds = self._number, seconds
        record.drafted, self._proposed = record.drafted + self._proposed, 0
        for name in ("committed", "accepted", "rolled_back", "rollbacks"):
            setattr(record, name, getattr(commits, name))
        self._number += 1
        self.stats.preemptions = self.admission.preemptions
        self.stats.cached_prompt_tokens = self.admission.cached_prompt_tokens
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.observe(commits.accepted, commits.rollbacks)
