"""Commits sampled tokens: accept drafts, roll back, stop. Tokens are added nowhere else.

Knows sequences and pages, not passes: plain tokens and rows of a verify are committed alike. Most
are committed as columns of the sequence table; one by one are those whose end hangs on more than
their ids, or that keep more than ids and log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tinyspec.engine.tokenization import ends_in_stop_string
from tinyspec.engine.trace import Trace
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import NOT_FINITE, Sampled, SpecialResult
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array


@dataclass
class Commits:
    """What one step committed. ended: sequences that finished."""

    committed: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0
    ended: list[Sequence] = field(default_factory=list)


@dataclass(eq=False)
class Committer:
    """Adds tokens to sequences, finishes those that stop, truncates those with wrong drafts."""

    admission: Admission
    tokenizer: Any
    runner: ModelRunner
    trace: Trace | None = None
    _commits: Commits = field(default_factory=Commits)
    _raised: BaseException | None = None

    def __post_init__(self) -> None:
        self.table = self.admission.table

    def new_commits(self) -> Commits:
        """What was committed since the last call."""
        commits, self._commits = self._commits, Commits()
        return commits

    def commit(
        self,
        rows: Array,
        firsts: Array,
        counts: Array,
        found: Sampled,
        decisions: Array | None,
    ) -> None:
        """Commit ``counts`` [n] of the tokens ``found``, from places ``firsts`` [n] on, to each of
        the sequences in ``rows`` [n]. decisions [5, n]: of ``accept_truncate`` for those with
        drafts, 0 for others; None where there are no others. Raises afterwards what a criterion
        raised but Exceptions."""
        if decisions is None:
            self._commit_newest(rows, firsts, found)
        else:
            self._commit_verified(rows, firsts, counts, found, decisions)
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error

    def _commit_verified(
        self, rows: Array, firsts: Array, counts: Array, found: Sampled, decisions: Array
    ) -> None:
        """As ``commit``, where some have drafts."""
        drafted = decisions[0] > 0
        self._commit_newest(rows[~drafted], firsts[~drafted], found)
        rows, firsts, counts = rows[drafted], firsts[drafted], counts[drafted]
        if not len(rows):
            return
        place = np.arange(counts.max())
        places = firsts[:, None] + np.minimum(place, counts[:, None] - 1)
        targets = found.tokens[places]
        targets[place >= counts[:, None]] = -1
        good = (targets >= 0).cumprod(1).sum(1)
        broken = [self.table.sequences[row] for row in rows[good < counts].tolist()]
        some = good > 0
        if some.any():
            decided = decisions[:, drafted][:, some]
            self._verify(rows[some], places[some], targets[some], decided, found)
        for sequence in broken:
            if not sequence.finished:
                self._retry_without_drafts(sequence)

    def _commit_newest(self, rows: Array, places: Array, found: Sampled) -> None:
        """One token for each of ``rows``, which have no drafts."""
        if not len(rows):
            return
        tokens = found.tokens[places]
        broken = tokens < 0
        if np.count_nonzero(broken):
            for n in np.flatnonzero(broken).tolist():
                result = found.special.get(int(places[n]), SpecialResult())
                sequence = self.table.sequences[rows[n]]
                self.fail(sequence, result.error or NOT_FINITE, result.cause)
            # A sequence that failed has taken those with it that wait for its prompt.
            rows, places, tokens = (x[~broken] for x in (rows, places, tokens))
        counts = np.ones(len(rows), np.int64)
        stopped = self.table.stops_at(rows, tokens)
        stopped |= self.table.length[rows] + 1 >= self.table.most[rows]
        counts, stopped = self._append(
            rows, counts, tokens[:, None], places[:, None], stopped, found
        )
        self.finish(rows, counts, tokens[:, None], stopped)

    def _retry_without_drafts(self, sequence: Sequence) -> None:
        """A row's logits were not finite, perhaps by the values of a wrong draft in its tile: drop
        the drafts and their values, and run the newest token alone."""
        sequence.drop_drafts()
        sequence.forbid_drafts()
        self.table.mark_final(np.array([sequence.row]))
        kept = max(sequence.computed, sequence.frozen)
        self.admission.truncate(sequence, kept)
        self.runner.cache.zero_tail(sequence.pages, kept)

    def _verify(
        self, rows: Array, places: Array, targets: Array, decisions: Array, found: Sampled
    ) -> None:
        """Commit, of the verifier's tokens ``targets`` [n, W], what ``accept_truncate`` decided."""
        table, drafts = self.table, self.table.num_drafts[rows]
        if self.trace is not None:
            self.trace.verified(rows, drafts, decisions)
        committed, agreed, left, freed, stopped = decisions
        counts, ended = self._append(rows, committed, targets, places, stopped > 0, found)
        dropped = np.where(agreed < np.minimum(committed, drafts), drafts - agreed, 0)
        self._count(rows, np.minimum(agreed, counts), dropped)
        self.finish(rows, counts, targets, ended)
        unfinished = table.generation_id[rows] > 0
        # The newest draft was not known to be none when the decision was made.
        left = np.minimum(left, np.maximum(drafts - committed, 0))
        table.num_drafts[rows[unfinished]] = left[unfinished]
        done = rows[unfinished & (left == 0)]
        table.proposed[done] = table.draft_ended[done] = False
        for row in rows[unfinished & (freed > 0)].tolist():
            sequence = table.sequences[row]
            self.admission.truncate(sequence, sequence.computed + sequence.num_drafts)

    def _count(self, rows: Array, accepted: Array, dropped: Array) -> None:
        """Statistics of a verify."""
        table, commits = self.table, self._commits
        table.verify_passes[rows] += 1
        table.accepted[rows] += accepted
        table.rolled_back[rows] += dropped
        table.rollbacks[rows] += dropped > 0
        commits.accepted += int(accepted.sum())
        commits.rolled_back += int(dropped.sum())
        commits.rollbacks += int((dropped > 0).sum())

    def _append(
        self,
        rows: Array,
        counts: Array,
        tokens: Array,
        places: Array,
        stopped: Array,
        found: Sampled,
    ) -> tuple[Array, Array]:
        """Add the first ``counts`` [n] of ``tokens`` [n, W], found at ``places``; how many were
        added, and which sequences end: those that ``stopped``, and others by text or criteria."""
        table = self.table
        starts = table.length[rows]
        special = table.places("special_commit", rows)
        if special:
            counts, stopped = counts.copy(), stopped.copy()
        for n in special:
            sequence = table.sequences[rows[n]]
            counts[n] = self._append_one_by_one(
                sequence, tokens[n, : counts[n]], places[n].tolist(), found.special
            )
            stopped[n] = sequence.finished
        rest = np.delete(np.arange(len(rows)), special) if special else slice(None)
        table.commit(rows[rest], counts[rest], tokens[rest])
        if found.logprobs is not None:
            table.write_logprobs(rows, starts, counts, found.logprobs[places])
        return counts, stopped

    def finish(self, rows: Array, counts: Array, tokens: Array, stopped: Array) -> None:
        """After ``counts`` [n] of ``tokens`` [n, W] were added: KV before the newest is final, full
        pages can be shared, and sequences that ``stopped`` leave."""
        table = self.table
        if self.trace is not None:
            self.trace.committed(rows, counts, tokens)
        table.mark_final(rows)
        for row in rows[table.draft_free[rows]].tolist():
            table.sequences[row].forbid_drafts(False)
        self._commits.committed += int(counts.sum())
        for row in rows[table.fills_page(rows, self.admission.pool.page_size)].tolist():
            if table.sequences[row].error is None:
                self.admission.prefix.insert(table.sequences[row])
        if np.count_nonzero(stopped):
            last = tokens[np.arange(len(rows)), counts - 1]
            by_token = table.stops_at(rows, last)
            for n in np.flatnonzero(stopped).tolist():
                self.end(table.sequences[rows[n]], "stop" if by_token[n] else "length")

    def keep_logits(self, rows: Array, places: Array, found: Sampled) -> None:
        """Let the sequences in ``rows`` [n] wait for tokens from outside, with the logits that were
        ``found`` at ``places`` [n]."""
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            sequence = self.table.sequences[row]
            sequence.next_logits = found.special.get(place, SpecialResult()).logits
            if sequence.next_logits is None:
                self.fail(sequence, NOT_FINITE)

    def supply(
        self, sequences: list[Sequence], tokens: list[int], logprobs: list[float] | None
    ) -> None:
        """Commit a token to each of ``sequences``, which wait for it."""
        for n, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            sequence.supply(token, None if logprobs is None else logprobs[n])
        running = [n for n, sequence in enumerate(sequences) if sequence.running]
        self._commits.committed += len(sequences) - len(running)
        if running:  # others were preempted while they waited
            rows = np.array([sequences[n].row for n in running])
            given = np.array([[tokens[n]] for n in running])
            count = np.ones(len(rows), np.int64)
            self.finish(rows, count, given, np.zeros(len(rows), np.bool_))

    def end(self, sequence: Sequence, reason: str) -> None:
        """A sequence leaves; ``reason`` unless it has one."""
        sequence.finish_reason = sequence.finish_reason or reason
        self._commits.ended.append(sequence)
        self.admission.remove(sequence)

    def _append_one_by_one(
        self,
        sequence: Sequence,
        tokens: Array,
        places: list[int],
        special: dict[int, SpecialResult],
    ) -> int:
        """Add ``tokens`` until one of them ends the sequence, which sets ``finish_reason``; how
        many were added."""
        row, stops = np.array([sequence.row]), self.table.stops[sequence.row]
        for n, token in enumerate(tokens):
            self.table.commit(row, np.ones(1, np.int64), tokens[None, n : n + 1])
            result = special.get(places[n])
            if result is not None:
                self.keep(sequence, result)
            try:
                stopped = bool((stops == token).any()) or self.stops(sequence)
            except Exception as error:
                sequence.error = f"a stopping criterion raised {type(error).__name__}: {error}"
                sequence.cause = error
                sequence.finish_reason = "abort"
                return n + 1
            except BaseException as error:  # an interrupt: nothing stays half committed
                self._raised, stopped = self._raised or error, False
            if sequence.diverged:
                sequence.finish_reason = "abort"
            elif stopped:
                sequence.finish_reason = "stop"
            elif sequence.remaining == 0:
                sequence.finish_reason = "length"
            if sequence.finished:
                return n + 1
        return len(tokens)

    @staticmethod
    def keep(sequence: Sequence, result: SpecialResult) -> None:
        """What is kept of its newest token."""
        if sequence.params.top_logprobs:
            sequence.top_logprobs.append(result.top)
        if result.scores is not None:
            sequence.scores.append(result.scores)
        if result.logits is not None:
            sequence.logits.append(result.logits)

    def stops(self, sequence: Sequence) -> bool:
        """Whether stop strings or the user's criteria end it; they see committed tokens only."""
        params = sequence.params
        if sequence.teacher_forced:
            return False
        if params.stop_strings:
            generated = sequence.ids(sequence.request.num_prompt, sequence.length)
            with callers_modes():
                if ends_in_stop_string(self.tokenizer, generated, params.stop_strings):
                    return True
        if not params.stopping_criteria:
            return False
        ids = torch.tensor([sequence.history], dtype=torch.int64, device=self.runner.device)
        scores = tuple(row[None] for row in sequence.scores) or None
        # Criteria may keep state, so each is called for every token.
        with callers_modes(sequence.request.thread):
            answers = [f(ids, scores) for f in params.stopping_criteria]
        return any(bool(torch.as_tensor(answer).all()) for answer in answers)

    def fail(self, sequence: Sequence, error: str, cause: Exception | None = None) -> None:
        """End a sequence, and those that wait for its prompt, with an error."""
        for sibling in sequence.siblings:
            self.fail(sibling, error, cause)
        sequence.siblings = []
        sequence.error, sequence.cause = error, cause
        self.admission.prefix.drop(sequence.pages)  # no other request starts from them
        self.end(sequence, "abort")
