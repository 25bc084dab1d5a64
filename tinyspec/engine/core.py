"""One step: propose drafts, schedule a pass, run it, sample, commit. Knows no user and no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index

import numpy as np
from torch import Tensor

from tinyspec.engine.commit import Commits, Committer
from tinyspec.engine.drafter import Drafter, FastPath, NgramDrafter
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import SampleBatch, Sampled, Sampler, SpecialRow, chosen_logprobs
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, KINDS, EngineStats, Pass, PassRecord, spread
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.scheduler.sequence_table import Array


@dataclass(eq=False)
class EngineCore:
    """Runs scheduler, runner, sampler and committer in turn; keeps a record of each pass."""

    admission: Admission
    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    committer: Committer
    drafter: Drafter
    records: deque[PassRecord]
    stats: EngineStats = field(default_factory=EngineStats)
    _proposed: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.table = self.admission.table

    @property
    def drafts_by_user(self) -> bool:
        """Whether drafts come from the user's drafter or model."""
        return type(self.drafter) not in (FastPath, NgramDrafter)

    def step(self, before_pass: Callable[[], None] | None = None) -> Commits:
        """Run one pass, in the state of ``runner.torch_state``; what it committed. before_pass:
        called once drafts are proposed."""
        began = time.perf_counter()
        self._propose()
        if before_pass is not None:
            before_pass()
        work_pass = self.scheduler.schedule()
        if work_pass is None:
            return self.committer.take()
        record = self._record(work_pass)
        try:
            logits, firsts = self._run(work_pass)
        except Exception as error:
            self._isolate_failure(work_pass, error)
        else:
            self._commit(work_pass, *self._sample(work_pass, logits, firsts))
        commits = self.committer.take()
        self._close(record, commits, time.perf_counter() - began)
        return commits

    def recover(self) -> Commits:
        """After a step that raised: all running sequences are computed again. Returns what the step
        had committed, which stays."""
        self.admission.preempt_all()
        return self.committer.take()

    def _isolate_failure(self, work_pass: Pass, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        sequences = work_pass.sequences
        if len(sequences) > 1:
            self.admission.isolate(sequences)
        elif sequences[0].num_drafts:
            sequences[0].forbid_drafts()
            self.admission.isolate(sequences)
        elif work_pass.rows > 1:
            self.admission.isolate(sequences, row_limit=work_pass.rows // 2)
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
            if sequence.running:  # the drafter may have ended it, or changed the model
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
        unknown = (n for n, token in enumerate(proposal) if not 0 <= token < vocab_size)
        drafts = proposal[: next(unknown, len(proposal))]
        sequence.drafts = drafts
        sequence.proposed = bool(drafts)
        sequence.stats.drafted += len(drafts)
        self._proposed += len(drafts)

    def _run(self, work_pass: Pass) -> tuple[Tensor, Array]:
        """Run the pass; its logits, and for each work the first row that yields a token."""
        works = work_pass.works
        offsets = works.yields.cumsum() - works.yields
        wanted, ends = offsets, works.counts.cumsum()
        if not works.single:
            wanted = spread(ends - works.yields, works.yields)
        unscored = _unscored(work_pass)
        fresh = self.admission.pool.take_fresh()
        if not unscored:
            return self.runner.run(work_pass, fresh, wanted), offsets
        # Rows of prompts whose logits give a missing log-probability come first.
        more = [ends[n] - works.counts[n] + p - works.starts[n] for n, p in unscored]
        logits = self.runner.run(work_pass, fresh, np.array([*more, *wanted.tolist()]))
        self._score_prompts(work_pass, unscored, logits)
        return logits[len(unscored) :], offsets

    @staticmethod
    def _score_prompts(work_pass: Pass, unscored: list[tuple[int, int]], logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens after the positions ``unscored``, (work, position)
        each, from the leading ``logits``."""
        requests = [sequence.request for sequence in work_pass.sequences]
        targets = [requests[n].prompt[p + 1] for n, p in unscored]
        values = chosen_logprobs(logits[: len(unscored)], targets)
        for (n, position), value in zip(unscored, values, strict=True):
            requests[n].prompt_logprobs[position + 1] = value

    def _advance(self, work_pass: Pass) -> list[tuple[int, Sequence]]:
        """Mark what the works have computed, and start the siblings that wait for a prompt; returns
        these, and which work computed it."""
        works = work_pass.works
        final = works.take(works.kinds != DRAFT) if work_pass.has_drafts else works
        self.table.advance(final.rows, final.ends, work_pass.canonical)
        started = []
        # Where siblings wait, nothing is drafted.
        waits = self.table.draft_free[works.rows] & (works.yields > 0)
        for n in waits.nonzero()[0].tolist():
            leader = self.table.sequences[works.rows[n]]
            while leader.siblings:
                sibling = leader.siblings.pop(0)
                if not self.admission.can_fork(leader):
                    self.admission.add(sibling)
                    continue
                if (copy := self.admission.fork(leader, sibling)) is not None:
                    self.runner.cache.copy_page(*copy)
                started.append((n, sibling))
            leader.forbid_drafts(leader.draft_free)
        return started

    def _sample(
        self, work_pass: Pass, logits: Tensor, firsts: Array
    ) -> tuple[Array, Array, Sampled]:
        """A token for every row that yields one, and one for each sibling that starts. Returns
        rows of the sequence table, how many of the tokens are each one's, and the tokens."""
        works = work_pass.works
        started = self._advance(work_pass)
        rows, yields, ends = works.rows, works.yields, works.ends
        if works.single and not started:
            return rows, yields, self.sampler.sample(logits, self._batch(rows, firsts, ends))
        some = yields > 0
        rows, yields, ends, firsts = (x[some] for x in (rows, yields, ends, firsts))
        if started:
            leaders = np.searchsorted(np.flatnonzero(some), [n for n, _ in started])
            rows = np.append(rows, [sibling.row for _, sibling in started])
            yields, ends, firsts = (np.append(x, x[leaders]) for x in (yields, ends, firsts))
        batch = self._batch(
            rows.repeat(yields), spread(firsts, yields), spread(ends - yields + 1, yields)
        )
        return rows, yields, self.sampler.sample(logits, batch)

    def _batch(self, row: Array, logits_row: Array, position: Array) -> SampleBatch:
        """What the sampler needs to know of the sequences in ``row`` [N] of the table."""
        table = self.table
        names = ("key", "temperature", "top_k", "top_p", "min_p")
        key, temperature, top_k, top_p, min_p = (getattr(table, name)[row] for name in names)
        wanted = bool(table.places("logprobs_wanted", row))
        special = {
            n: _special_row(table.sequences[row[n]], int(position[n]))
            for n in table.places("special_sampling", row)
        }
        return SampleBatch(
            logits_row, key, position, temperature, top_k, top_p, min_p, wanted, special
        )

    def _commit(self, work_pass: Pass, rows: Array, counts: Array, found: Sampled) -> None:
        """Commit tokens; keep drafts, whose errors are left to the verify."""
        firsts = counts.cumsum() - counts
        if work_pass.has_drafts:
            drafting = np.isin(rows, work_pass.works.rows[work_pass.works.kinds == DRAFT])
            self.table.draft(rows[drafting], found.tokens[firsts[drafting]])
            rows, firsts, counts = (x[~drafting] for x in (rows, firsts, counts))
        if len(rows):
            self.committer.commit(rows, firsts, counts, found, self.runner.cache)

    def _record(self, work_pass: Pass) -> PassRecord:
        works, running = work_pass.works, len(self.table)
        rows = np.bincount(works.kinds, works.counts, len(KINDS)).astype(int).tolist()
        sequences = np.bincount(works.kinds, minlength=len(KINDS)).tolist()
        return PassRecord(
            number=self._number,
            bucket=work_pass.bucket,
            canonical=work_pass.canonical,
            rows=dict(zip(KINDS, rows, strict=True)),
            sequences={kind: n for kind, n in zip(KINDS, sequences, strict=True) if n},
            running=running,
            waiting=len(self.admission.waiting),
            left_out=running - len(works),
            pages_held=self.admission.pool.num_held,
            way=work_pass.way,
        )

    def _close(self, record: PassRecord, commits: Commits, seconds: float) -> None:
        record.seconds = seconds
        record.drafted = record.sequences.get(KINDS[DRAFT], 0) + self._proposed
        self._proposed = 0
        for name in ("committed", "accepted", "rolled_back", "rollbacks"):
            setattr(record, name, getattr(commits, name))
        self._number += 1
        self.stats.preemptions = self.admission.preemptions
        self.stats.cached_prompt_tokens = self.admission.cached_prompt_tokens
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.acceptance = (self.stats.accepted + 1) / (self.stats.drafted + 2)


def _unscored(work_pass: Pass) -> list[tuple[int, int]]:
    """(work, position) of prompt rows whose logits give a log-probability that is missing."""
    table, works = work_pass.table, work_pass.works
    found = []
    for n in table.places("scores_prompt", works.rows):
        request: Request = table.sequences[works.rows[n]].request
        last = min(int(works.ends[n]), request.num_prompt - 1)
        positions = range(int(works.starts[n]), last)
        found += [(n, p) for p in positions if request.prompt_logprobs[p + 1] is None]
    return found


def _special_row(sequence: Sequence, position: int) -> SpecialRow:
    request, params = sequence.request, sequence.params
    generated = position - request.num_prompt
    forced = sequence.given_tokens if sequence.teacher_forced else None
    return SpecialRow(
        params,
        generated,
        sequence.before(position) if params.needs_history else [],
        -1 if forced is None else forced[generated],
        request.keeps_scores,
        request.keeps_logits,
    )
