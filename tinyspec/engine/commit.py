"""Commits sampled tokens: accept drafts, roll back, stop. Tokens are added nowhere else.

Knows sequences and pages, not passes: plain tokens and rows of a verify are committed alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tinyspec.engine.tokenization import ends_in_stop_string
from tinyspec.kernels.backend import Kernels
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.sampler import Sampled
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler


@dataclass
class CommitResult:
    """Tokens committed to one sequence, and how many of its drafts were accepted or rolled back."""

    sequence: Sequence
    committed: int = 0
    accepted: int = 0
    rolled_back: int = 0


@dataclass(eq=False)
class Committer:
    """Adds tokens to sequences, finishes those that stop, truncates those with wrong drafts."""

    kernels: Kernels
    scheduler: Scheduler
    tokenizer: Any
    device: torch.device
    _results: list[CommitResult] = field(default_factory=list)

    def take_results(self) -> list[CommitResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return results

    def commit(self, sampled: list[tuple[Sequence, list[Sampled]]], cache: KVCache) -> None:
        """Commit what was sampled for each sequence, from its newest committed token on."""
        finite, broken = [], []
        for sequence, targets in sampled:
            if not sequence.drafts:
                self._commit_one(sequence, targets[0])
                continue
            good = next((n for n, t in enumerate(targets) if t.error is not None), len(targets))
            if good > 0:
                finite.append((sequence, targets[:good]))
            if good < len(targets):
                broken.append(sequence)
        if finite:
            self._verify(finite)
        for sequence in broken:
            if not sequence.finished:
                self._retry_without_drafts(sequence, cache)

    def _commit_one(self, sequence: Sequence, sampled: Sampled) -> None:
        """One token of a sequence without drafts."""
        sequence.draft_free = False
        if sampled.error is not None:
            self.fail(sequence, sampled.error, sampled.cause)
            return
        self._append(sequence, sampled)
        self._update(sequence)
        self._results.append(CommitResult(sequence, committed=1))

    def _retry_without_drafts(self, sequence: Sequence, cache: KVCache) -> None:
        """A row's logits were not finite, perhaps by the values of a wrong draft in its tile: drop
        the drafts and their values, and run the newest token alone."""
        sequence.drop_drafts()
        sequence.draft_free = True
        sequence.computed = len(sequence.tokens) - 1
        canonical = sequence.computed if sequence.deterministic else sequence.canonical
        sequence.canonical = min(canonical, sequence.computed)
        kept = max(sequence.computed, sequence.frozen)
        self.scheduler.pool.truncate(sequence.pages, kept)
        cache.zero_tail(sequence.pages, kept)

    def _verify(self, verified: list[tuple[Sequence, list[Sampled]]]) -> None:
        """Compare drafts with the verifier's tokens and commit, for all sequences in one launch."""
        sequences = [sequence for sequence, _ in verified]
        pool, device = self.scheduler.pool, self.device
        width = max(max(len(targets), len(s.drafts)) for s, targets in verified)

        def table(rows: list[list[int]], width: int) -> torch.Tensor:
            padded = [row + [-1] * (width - len(row)) for row in rows]
            return torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width)

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        stop_ids = [list(self._stop_ids(s)) for s in sequences]
        accepted = self.kernels.accept_truncate(
            table([s.drafts for s in sequences], width),
            table([[t.token for t in targets] for _, targets in verified], width),
            column([len(targets) for _, targets in verified]),
            column([len(s.drafts) for s in sequences]),
            column([len(s.tokens) - 1 for s in sequences]),
            column([s.remaining for s in sequences]),
            table(stop_ids, max(map(len, stop_ids))),
            column([len(s.pages) for s in sequences]),
            pool.page_size,
        )
        counts = zip(
            accepted.num_committed.tolist(),
            accepted.num_accepted.tolist(),
            accepted.drafts_left.tolist(),
            strict=True,
        )
        for (sequence, targets), (committed, num_accepted, left) in zip(
            verified, counts, strict=True
        ):
            drafts, sequence.drafts = sequence.drafts, []
            result = self._commit_verified(sequence, drafts, targets[:committed], num_accepted)
            self._results.append(result)
            if not sequence.finished:
                sequence.drafts = drafts[committed:] if left else []
                if not sequence.drafts:
                    sequence.proposed = sequence.draft_ended = False
                pool.truncate(sequence.pages, sequence.computed + len(sequence.drafts))

    def _commit_verified(
        self, sequence: Sequence, drafts: list[int], targets: list[Sampled], num_accepted: int
    ) -> CommitResult:
        """Commit ``targets``, of which the first ``num_accepted`` equal the drafts."""
        result = CommitResult(sequence)
        sequence.draft_free = False
        for target in targets:
            self._append(sequence, target)
            result.committed += 1
            if sequence.finished:
                break
        result.accepted = min(num_accepted, result.committed)
        sequence.stats.verify_passes += 1
        sequence.stats.accepted += result.accepted
        if num_accepted < min(len(targets), len(drafts)):
            result.rolled_back = len(drafts) - num_accepted
            sequence.stats.rolled_back += result.rolled_back
            sequence.stats.rollbacks += 1
        self._update(sequence)
        return result

    def _update(self, sequence: Sequence) -> None:
        """After a commit: all KV before the newest token is final; a finished sequence leaves."""
        if sequence.error is None:
            sequence.computed = len(sequence.tokens) - 1
            sequence.canonical = min(sequence.canonical, sequence.computed)
            if sequence.deterministic:
                sequence.canonical = sequence.computed
            self.scheduler.index_pages(sequence)
        if sequence.finished:
            self.scheduler.remove(sequence)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        """Add one committed token; sets ``finish_reason`` if the sequence ends there."""
        params = sequence.params
        sequence.tokens.append(sampled.token)
        if params.logprobs:
            sequence.logprobs.append(sampled.logprob)
        if params.top_logprobs:
            sequence.top_logprobs.append(sampled.top)
        if sampled.scores is not None:
            sequence.scores.append(sampled.scores)
        if sampled.logits is not None:
            sequence.logits.append(sampled.logits)
        try:
            stopped = sampled.token in self._stop_ids(sequence) or self._stops(sequence)
        except Exception as error:
            sequence.error = f"a stopping criterion raised {type(error).__name__}: {error}"
            sequence.cause = error
            sequence.finish_reason = "abort"
            return
        if sequence.diverged:
            sequence.finish_reason = "abort"
        elif stopped:
            sequence.finish_reason = "stop"
        elif sequence.remaining == 0:
            sequence.finish_reason = "length"

    @staticmethod
    def _stop_ids(sequence: Sequence) -> tuple[int, ...]:
        """Tokens that end the sequence; none when it is teacher-forced."""
        return () if sequence.teacher_forced else sequence.params.stop_ids

    def _stops(self, sequence: Sequence) -> bool:
        """Whether stop strings or the user's criteria end it; they see committed tokens only."""
        params = sequence.params
        if sequence.teacher_forced:
            return False
        if params.stop_strings:
            generated = sequence.tokens[sequence.request.num_prompt :]
            if ends_in_stop_string(self.tokenizer, generated, params.stop_strings):
                return True
        if not params.stopping_criteria:
            return False
        ids = torch.tensor([sequence.history], dtype=torch.int64, device=self.device)
        scores = tuple(row[None] for row in sequence.scores) or None
        # Criteria may keep state, so each is called for every token.
        with callers_modes():
            answers = [f(ids, scores) for f in params.stopping_criteria]
        return any(bool(torch.as_tensor(answer).all()) for answer in answers)

    def fail(self, sequence: Sequence, error: str, cause: Exception | None = None) -> None:
        """End a sequence, and those that wait for its prompt, with an error."""
        for sibling in sequence.siblings:
            self.fail(sibling, error, cause)
        sequence.siblings = []
        sequence.error, sequence.cause = error, cause
        sequence.finish_reason = "abort"
        self.scheduler.unindex_pages(sequence)
        self.scheduler.remove(sequence)
        self._results.append(CommitResult(sequence))
