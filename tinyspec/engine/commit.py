"""What becomes of sampled tokens: commit, roll back, stop. The only place where tokens are added.

Knows sequences and pages, not passes: a plain token and the rows of a verify end up here alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tinyspec.engine.tokenization import ends_in_stop_string
from tinyspec.kernels.backend import Kernels
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.sampler import Sampled
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler


@dataclass
class CommitResult:
    """What one sequence's tokens came to: tokens added, and drafts judged."""

    sequence: Sequence
    committed: int = 0
    accepted: int = 0
    rolled_back: int = 0


class Committer:
    """Adds tokens to sequences, ends those that stop, truncates those that drafted wrongly."""

    def __init__(
        self, kernels: Kernels, scheduler: Scheduler, tokenizer: Any, device: torch.device
    ):
        self.kernels = kernels
        self._device = device
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._results: list[CommitResult] = []

    def take_results(self) -> list[CommitResult]:
        """What was decided since the last call."""
        results, self._results = self._results, []
        return results

    def commit_plain(self, sequence: Sequence, sampled: Sampled) -> None:
        """One token of a request that has no drafts."""
        if sampled.error is not None:
            self.fail(sequence, sampled.error, sampled.cause)
            return
        self._append(sequence, sampled)
        self._settle(sequence)
        self._results.append(CommitResult(sequence, committed=1))

    def commit_verified(
        self, verified: list[tuple[Sequence, list[Sampled]]], cache: KVCache
    ) -> None:
        """The tokens of every sequence that may have drafts, from its newest committed one on."""
        sound, spoilt = [], []
        for sequence, targets in verified:
            if not sequence.drafts:  # the pass was the decode: nothing to compare
                sequence.undrafted = False
                self.commit_plain(sequence, targets[0])
                continue
            good = next((n for n, t in enumerate(targets) if t.error is not None), len(targets))
            if good > 0:
                sound.append((sequence, targets[:good]))
            if good < len(targets):
                spoilt.append(sequence)
        if sound:
            self._judge(sound)
        for sequence in spoilt:
            if not sequence.finished:
                self._undraft(sequence, cache)

    def _undraft(self, sequence: Sequence, cache: KVCache) -> None:
        """A row had no canonical token: on without drafts, whose values may have spoilt a tile."""
        sequence.drop_drafts()
        sequence.undrafted = True
        sequence.computed = len(sequence.tokens) - 1
        canonical = sequence.computed if sequence.deterministic else sequence.canonical
        sequence.canonical = min(canonical, sequence.computed)
        kept = max(sequence.computed, sequence.frozen)
        self._scheduler.pool.truncate(sequence.pages, kept)
        cache.zero_tail(sequence.pages, kept)

    def _judge(self, verified: list[tuple[Sequence, list[Sampled]]]) -> None:
        sequences = [sequence for sequence, _ in verified]
        pool, device = self._scheduler.pool, self._device
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
        decisions = zip(
            verified,
            accepted.num_committed.tolist(),
            accepted.num_accepted.tolist(),
            accepted.drafts_left.tolist(),
            strict=True,
        )
        for (sequence, targets), *decision in decisions:
            self._results.append(self._conclude(sequence, targets, *decision))

    def _conclude(
        self,
        sequence: Sequence,
        targets: list[Sampled],
        num_committed: int,
        num_accepted: int,
        drafts_left: int,
    ) -> CommitResult:
        """Commit one sequence's tokens and cut its drafts and pages to what is left."""
        drafts = sequence.drafts
        sequence.undrafted = False
        mismatch = num_accepted < min(num_committed, len(drafts))
        result = CommitResult(sequence, accepted=num_accepted)
        sequence.stats.verify_passes += 1
        sequence.drafts = []
        for target in targets[:num_committed]:
            self._append(sequence, target)
            result.committed += 1
            if sequence.finish_reason is not None:
                break
        result.accepted = min(num_accepted, result.committed)
        sequence.stats.accepted += result.accepted
        if mismatch:
            result.rolled_back = len(drafts) - num_accepted
            sequence.stats.rolled_back += result.rolled_back
            sequence.stats.rollbacks += 1
        self._settle(sequence)
        if sequence.finished:
            return result
        sequence.drafts = drafts[num_committed:] if drafts_left else []
        if not sequence.drafts:
            sequence.proposed = sequence.draft_ended = False
        self._scheduler.pool.truncate(sequence.pages, sequence.computed + len(sequence.drafts))
        return result

    def _settle(self, sequence: Sequence) -> None:
        """Behind its newest token all KV is final; a sequence that ended leaves."""
        if sequence.error is None:
            sequence.computed = len(sequence.tokens) - 1
            sequence.canonical = min(sequence.canonical, sequence.computed)
            if sequence.deterministic:
                sequence.canonical = sequence.computed
            self._scheduler.settle(sequence)
        if sequence.finished:
            self._scheduler.remove(sequence)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        """Add one committed token and say whether the sequence ends there."""
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
        if sequence.off_script:
            sequence.finish_reason = "abort"
        elif stopped:
            sequence.finish_reason = "stop"
        elif sequence.remaining == 0:
            sequence.finish_reason = "length"

    @staticmethod
    def _stop_ids(sequence: Sequence) -> tuple[int, ...]:
        """Tokens that end it; a forced continuation runs to its end."""
        return () if sequence.forced else sequence.params.stop_ids

    def _stops(self, sequence: Sequence) -> bool:
        """Stop strings and the user's criteria, on committed tokens alone."""
        params = sequence.params
        if sequence.forced:
            return False
        if params.stop_strings:
            generated = sequence.tokens[sequence.request.num_prompt :]
            if ends_in_stop_string(self._tokenizer, generated, params.stop_strings):
                return True
        if not params.stopping_criteria:
            return False
        ids = torch.tensor([sequence.history], device=self._device)
        scores = tuple(row[None] for row in sequence.scores) or None
        # Every criterion sees every token, as those that count must.
        return any([bool(torch.as_tensor(f(ids, scores)).all()) for f in params.stopping_criteria])

    def fail(self, sequence: Sequence, error: str, cause: Exception | None = None) -> None:
        """End a sequence, and those that wait for its prompt, with an error."""
        for sibling in sequence.siblings:
            self.fail(sibling, error, cause)
        sequence.siblings = []
        sequence.error, sequence.cause = error, cause
        sequence.finish_reason = "abort"
        self._scheduler.distrust(sequence)
        self._scheduler.remove(sequence)
        self._results.append(CommitResult(sequence))
