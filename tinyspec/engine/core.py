"""One step: propose drafts, schedule a pass, run it, sample, commit. Knows no user and no text."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index

from torch import Tensor

from tinyspec.engine.commit import CommitResult, Committer
from tinyspec.engine.drafter import Drafter, FastPath, NgramDrafter
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import Sampled, Sampler, SampleRow, chosen_logprobs
from tinyspec.scheduler.passes import DRAFT, KINDS, EngineStats, Pass, PassRecord, Work
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class EngineCore:
    """Runs scheduler, runner, sampler and committer in turn; keeps a record of each pass."""

    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    committer: Committer
    drafter: Drafter
    records: deque[PassRecord]
    stats: EngineStats = field(default_factory=EngineStats)
    _proposed: int = 0

    @property
    def drafts_by_user(self) -> bool:
        """Whether drafts come from the user's drafter or model."""
        return type(self.drafter) not in (FastPath, NgramDrafter)

    def step(self, before_pass: Callable[[], None] | None = None) -> list[CommitResult]:
        """Run one pass; what it committed, sequence by sequence. before_pass: called once drafts
        are proposed."""
        with self.runner.torch_state():
            began = time.perf_counter()
            self._propose()
            if before_pass is not None:
                before_pass()
            work_pass = self.scheduler.schedule()
            if work_pass is None:
                return self.committer.take_results()
            record = self._record(work_pass)
            try:
                logits, firsts = self._run(work_pass)
            except Exception as error:
                self._isolate_failure(work_pass, error)
            else:
                self._commit(self._sample(work_pass, logits, firsts))
            results = self.committer.take_results()
            self._close(record, results, time.perf_counter() - began)
        return results

    def recover(self) -> list[CommitResult]:
        """After a step that raised: all running sequences are computed again. Returns what the step
        had committed, which stays."""
        self.scheduler.preempt_all()
        return self.committer.take_results()

    def _isolate_failure(self, work_pass: Pass, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        sequences = [work.sequence for work in work_pass.works]
        if len(sequences) > 1:
            self.scheduler.isolate(sequences)
        elif sequences[0].drafts:
            sequences[0].draft_free = True
            self.scheduler.isolate(sequences)
        elif work_pass.rows > 1:
            self.scheduler.isolate(sequences, row_limit=work_pass.rows // 2)
        else:
            why = f"the pass raised {type(error).__name__}: {error}"
            self.committer.fail(sequences[0], why, error)

    def _propose(self) -> None:
        """Draft for sequences without drafts: their given tokens, or what the drafter proposes.
        Plain sequences get drafts from a real drafter only, not from the fast path."""
        asked: list[tuple[Sequence, int]] = []
        fast_path = isinstance(self.drafter, FastPath)
        for sequence in self.scheduler.running:
            if sequence.drafts or (fast_path and not sequence.deterministic):
                continue
            limit = self.scheduler.draft_limit(sequence)
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
            if not sequence.finished:
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
        for token in proposal:
            if not 0 <= token < self.runner.vocab_size:
                break
            sequence.drafts.append(token)
        sequence.proposed = bool(sequence.drafts)
        sequence.stats.drafted += len(sequence.drafts)
        self._proposed += len(sequence.drafts)

    def _run(self, work_pass: Pass) -> tuple[Tensor, list[int]]:
        """Run the pass; its logits, and for each work the first row that yields a token."""
        unscored = [_unscored(work) for work in work_pass.works]
        wanted = [
            [p - work.start for p in positions] + list(range(work.count - work.yields, work.count))
            for work, positions in zip(work_pass.works, unscored, strict=True)
        ]
        logits = self.runner.run(work_pass, self.scheduler.pool.take_fresh(), wanted)
        first, firsts = 0, []
        for work, positions, rows in zip(work_pass.works, unscored, wanted, strict=True):
            if positions:
                _score_prompt(work.sequence.request, positions, logits[first:])
            firsts.append(first + len(positions))
            first += len(rows)
        return logits, firsts

    def _advance(self, work: Work, canonical: bool) -> list[Sequence]:
        """Mark what a work has computed, and start the siblings that wait for its prompt; returns
        the sequences that its tokens are for."""
        sequence = work.sequence
        if work.kind == DRAFT:
            return [sequence]
        sequence.computed = min(work.end, len(sequence.tokens))
        if canonical and sequence.canonical >= work.start:
            sequence.canonical = sequence.computed
        if not work.yields:
            return []
        started = [sequence]
        while sequence.siblings:
            sibling = sequence.siblings.pop(0)
            if not self.scheduler.can_fork(sequence):
                self.scheduler.add(sibling)
                continue
            if (copy := self.scheduler.fork(sequence, sibling)) is not None:
                self.runner.cache.copy_page(*copy)
            started.append(sibling)
        return started

    def _sample(
        self, work_pass: Pass, logits: Tensor, firsts: list[int]
    ) -> list[tuple[Sequence, bool, list[Sampled]]]:
        """(sequence, whether it is a draft, its tokens) for every work that yields."""
        rows: list[SampleRow] = []
        spans = []
        for work, first in zip(work_pass.works, firsts, strict=True):
            begin = work.end - work.yields + 1
            for sequence in self._advance(work, work_pass.canonical):
                spans.append((sequence, work.kind == DRAFT, work.yields))
                rows += [_sample_row(sequence, first + n, begin + n) for n in range(work.yields)]
        found = iter(self.sampler.sample(logits, rows))
        return [(s, draft, [next(found) for _ in range(count)]) for s, draft, count in spans]

    def _commit(self, outcomes: list[tuple[Sequence, bool, list[Sampled]]]) -> None:
        """Commit tokens; keep drafts, whose errors are left to the verify."""
        tokens = []
        for sequence, is_draft, sampled in outcomes:
            if not is_draft:
                tokens.append((sequence, sampled))
            elif sampled[0].error is not None:
                sequence.draft_ended = True
            else:
                sequence.drafts.append(sampled[0].token)
                sequence.stats.drafted += 1
                sequence.draft_ended = sampled[0].token in sequence.params.stop_ids
        self.committer.commit(tokens, self.runner.cache)

    def _record(self, work_pass: Pass) -> PassRecord:
        rows = dict.fromkeys(KINDS, 0)
        for work in work_pass.works:
            rows[work.kind] += work.count
        return PassRecord(
            number=sum(self.stats.passes.values()),
            bucket=work_pass.bucket,
            canonical=work_pass.canonical,
            rows=rows,
            sequences=dict(Counter(work.kind for work in work_pass.works)),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            left_out=len(self.scheduler.running) - len(work_pass.works),
            pages_held=self.scheduler.pool.num_held,
            way=work_pass.way,
        )

    def _close(self, record: PassRecord, results: list[CommitResult], seconds: float) -> None:
        record.seconds = seconds
        record.drafted = record.sequences.get(DRAFT, 0) + self._proposed
        self._proposed = 0
        for result in results:
            record.committed += result.committed
            record.accepted += result.accepted
            record.rolled_back += result.rolled_back
            record.rollbacks += 1 if result.rolled_back else 0
        self.stats.preemptions = self.scheduler.preemptions
        self.stats.cached_prompt_tokens = self.scheduler.cached_prompt_tokens
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.acceptance = (self.stats.accepted + 1) / (self.stats.drafted + 2)


def _unscored(work: Work) -> list[int]:
    """Positions of prompt rows whose logits give a prompt log-probability that is missing."""
    request = work.sequence.request
    if not request.prompt_logprobs:
        return []
    positions = range(work.start, min(work.end, request.num_prompt - 1))
    return [p for p in positions if request.prompt_logprobs[p + 1] is None]


def _score_prompt(request: Request, positions: list[int], logits: Tensor) -> None:
    """Log-probabilities of the prompt tokens after ``positions``, from the leading ``logits``."""
    targets = [request.prompt[p + 1] for p in positions]
    values = chosen_logprobs(logits[: len(positions)], targets)
    for position, value in zip(positions, values, strict=True):
        request.prompt_logprobs[position + 1] = value


def _sample_row(sequence: Sequence, logits_row: int, position: int) -> SampleRow:
    request, params = sequence.request, sequence.params
    generated = position - request.num_prompt
    forced = sequence.given_tokens if sequence.teacher_forced else None
    return SampleRow(
        logits_row,
        params,
        sequence.key,
        position,
        generated,
        sequence.before(position) if params.needs_history else [],
        -1 if forced is None else forced[generated],
        request.keeps_scores,
        request.keeps_logits,
    )
