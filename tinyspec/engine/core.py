"""The loop's one step: propose, schedule, run, sample, commit. Knows no user and no text."""

from __future__ import annotations

import time
from collections import Counter, deque
from operator import index

from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.engine.commit import CommitResult, Committer
from tinyspec.engine.drafter import Drafter, FastPath
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import Sampled, Sampler, SampleRow, chosen_logprobs
from tinyspec.scheduler.passes import DRAFT, KINDS, EngineStats, Pass, PassRecord, Work
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler

RECORDS_KEPT = 1000


class EngineCore:
    """Drives scheduler, runner, sampler and committer; keeps the passes' records."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        committer: Committer,
        drafter: Drafter,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.committer = committer
        self.stats = EngineStats()
        self.records: deque[PassRecord] = deque(maxlen=None if config.trace else RECORDS_KEPT)
        self.sampler = sampler
        self.drafter = drafter
        self._proposed = 0

    def step(self) -> list[CommitResult]:
        """One pass; what it decided, sequence by sequence."""
        with self.runner.torch_state():
            began = time.perf_counter()
            self._propose()
            work_pass = self.scheduler.schedule()
            if work_pass is not None:
                record = self._record(work_pass)
                try:
                    logits, firsts = self._run(work_pass)
                except Exception as error:
                    self._failed(work_pass, error)
                else:
                    self._commit(self._sample(work_pass, logits, firsts))
            results = self.committer.take_results()
            if work_pass is not None:
                self._close(record, results, time.perf_counter() - began)
        return results

    def recover(self) -> list[CommitResult]:
        """After a step that failed: whatever ran is computed anew, nothing half done is kept.

        What had been committed by then stays so; it is returned.
        """
        self.scheduler.preempt_all()
        return self.committer.take_results()

    def _failed(self, work_pass: Pass, error: Exception) -> None:
        """The pass raised: whoever is to blame fails by itself, the others go on.

        Nobody fails for drafts, nor for the number of rows while there is more than one.
        """
        sequences = [work.sequence for work in work_pass.works]
        if len(sequences) > 1:
            self.scheduler.isolate(sequences)
        elif sequences[0].drafts:
            sequences[0].undrafted = True
            self.scheduler.isolate(sequences)
        elif work_pass.rows > 1:
            self.scheduler.isolate(sequences, row_limit=work_pass.rows // 2)
        else:
            why = f"the pass raised {type(error).__name__}: {error}"
            self.committer.fail(sequences[0], why, error)

    def _propose(self) -> None:
        """Drafts for every sequence without: its script's, or the drafter's (the fast path's own
        drafts are for deterministic ones)."""
        asked = []
        speculates = not isinstance(self.drafter, FastPath)
        for sequence in self.scheduler.running:
            drafts = speculates or sequence.deterministic
            limit = self.scheduler.draft_limit(sequence) if drafts else 0
            if limit <= 0 or sequence.drafts:
                continue
            if sequence.script is not None:
                place = sequence.num_generated
                self._add_proposal(sequence, sequence.script[place : place + limit])
            elif sequence.pending == 1:
                asked.append((sequence, limit))
        if not asked:
            return
        most = max(limit for _, limit in asked)
        try:
            proposals = self._ask([sequence for sequence, _ in asked], most)
        except Exception:
            proposals = [self._ask_alone(sequence, most) for sequence, _ in asked]
        for (sequence, limit), proposal in zip(asked, proposals, strict=True):
            if not sequence.finished:
                self._add_proposal(sequence, proposal[:limit])

    def _ask(self, sequences: list[Sequence], most: int) -> list[list[int]]:
        proposals = self.drafter.propose([s.history for s in sequences], most)
        found = [[index(token) for token in proposal] for proposal in proposals]
        if len(found) != len(sequences):
            raise ValueError(f"{len(found)} proposals for {len(sequences)} sequences")
        return found

    def _ask_alone(self, sequence: Sequence, most: int) -> list[int]:
        """The drafter failed for all: it fails for those for whom it fails alone."""
        try:
            return self._ask([sequence], most)[0]
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
        """Run the pass; logits, and per work the row of the first that yields a token."""
        scored = [_scored(work) for work in work_pass.works]
        wanted = [
            score + list(range(work.count - work.yields, work.count))
            for work, score in zip(work_pass.works, scored, strict=True)
        ]
        logits = self.runner.run(work_pass, self.scheduler.pool.take_fresh(), wanted)
        first, firsts = 0, []
        for work, score, rows in zip(work_pass.works, scored, wanted, strict=True):
            if score:
                _score_prompt(work, score, logits[first : first + len(score)])
            firsts.append(first + len(score))
            first += len(rows)
        return logits, firsts

    def _advance(self, work: Work, canonical: bool) -> list[Sequence]:
        """Note what a work has computed; the sequences that its yielded tokens are for."""
        sequence = work.sequence
        if work.kind == DRAFT:
            return [sequence]
        sequence.computed = min(work.end, len(sequence.tokens))
        if canonical and sequence.canonical >= work.start:
            sequence.canonical = sequence.computed
        if not work.yields:
            return []
        forked = []
        while sequence.siblings:
            sibling = sequence.siblings.pop(0)
            if self._fork(sequence, sibling):
                forked.append(sibling)
        return [sequence, *forked]

    def _fork(self, leader: Sequence, sibling: Sequence) -> bool:
        """Let ``sibling`` share the leader's prompt, or else queue it to compute its own."""
        if not self.scheduler.can_fork(leader):
            self.scheduler.add(sibling)
            return False
        copy = self.scheduler.fork(leader, sibling)
        if copy is not None:
            self.runner.cache.copy_page(*copy)
        return True

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
        verified = []
        for sequence, is_draft, sampled in outcomes:
            if is_draft:
                self._add_draft(sequence, sampled[0])
            else:
                verified.append((sequence, sampled))
        self.committer.commit_verified(verified, self.runner.cache)

    @staticmethod
    def _add_draft(sequence: Sequence, sampled: Sampled) -> None:
        if sampled.error is not None:
            sequence.draft_ended = True  # the verifier decides what comes of it
            return
        sequence.drafts.append(sampled.token)
        sequence.stats.drafted += 1
        sequence.draft_ended = sampled.token in sequence.params.stop_ids

    def _record(self, work_pass: Pass) -> PassRecord:
        rows: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        for work in work_pass.works:
            rows[work.kind] += work.count
        return PassRecord(
            number=sum(self.stats.passes.values()),
            bucket=work_pass.bucket,
            canonical=work_pass.canonical,
            rows=dict(rows),
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
        record.committed = sum(v.committed for v in results)
        record.accepted = sum(v.accepted for v in results)
        record.rolled_back = sum(v.rolled_back for v in results)
        record.rollbacks = sum(v.rolled_back > 0 for v in results)
        self.stats.preemptions = self.scheduler.preemptions
        self.stats.cached_prompt_tokens = self.scheduler.cached_prompt_tokens
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.acceptance = (self.stats.accepted + 1) / (self.stats.drafted + 2)


def _scored(work: Work) -> list[int]:
    """Offsets of prompt rows whose logits say how likely the next prompt token was."""
    request = work.sequence.request
    if not request.prompt_logprobs:
        return []
    last = min(work.end, request.num_prompt - 1)
    places = range(work.start, last)
    return [p - work.start for p in places if request.prompt_logprobs[p + 1] is None]


def _score_prompt(work: Work, offsets: list[int], logits: Tensor) -> None:
    request = work.sequence.request
    places = [work.start + offset + 1 for offset in offsets]
    values = chosen_logprobs(logits, [request.prompt[place] for place in places])
    for place, value in zip(places, values, strict=True):
        request.prompt_logprobs[place] = value


def _sample_row(sequence: Sequence, logits_row: int, position: int) -> SampleRow:
    params = sequence.params
    history = sequence.before(position) if params.needs_history else []
    request = sequence.request
    generated = position - request.num_prompt
    given = sequence.script if sequence.forced else None
    return SampleRow(
        logits_row,
        params,
        sequence.key,
        position,
        generated,
        history,
        -1 if given is None else given[generated],
        request.keeps_scores,
        request.keeps_logits,
    )
