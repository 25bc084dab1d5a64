"""Commits what a pass has found: accept drafts, roll back, stop. Tokens are added nowhere else.

Plain tokens and rows of a verify are committed alike. Most are committed as columns of the sequence
table; one by one are those whose end hangs on more than their ids, or that keep more than ids and
log-probabilities. Knows no device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tinyspec.errors import named
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import NOT_FINITE, SpecialResult
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, PROMPT, TokenCounts
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import DRAFTING, Step
from tinyspec.text.decoding import FEW, decoded, first_stop, reach


@dataclass(eq=False)
class Committer:
    """Adds tokens to sequences, finishes those that stop, truncates those with wrong drafts.

    record: of the latest pass, which counts what is committed. accepted, rejected: of its drafts,
    and of its sequences with a wrong one, by what proposed them, as the column ``proposed`` has it.
    ended: sequences that finished, until they are taken.
    """

    admission: Admission
    tokenizer: Any
    runner: ModelRunner
    record: TokenCounts = field(default_factory=TokenCounts)
    accepted: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    ended: list[Sequence] = field(default_factory=list)
    _raised: BaseException | None = None

    def __post_init__(self) -> None:
        self.table = self.admission.table

    def commit(self, step: Step) -> None:
        """Mark what a pass has computed, start completions that wait for it, and commit tokens or
        keep them as drafts, whose errors are left to the verify. What is not alive is left out, and
        tokens of works that are not good to their end.

        Raises what a criterion raised but Exceptions.
        """
        table, rows = self.table, step.rows
        self.record, self.accepted, self.rejected = step.record, Counter(), Counter()
        ends = self._good_ends(step)
        alive = step.alive
        for result in step.special.values():
            self.runner.torch_state.stream.hand_out(result.scores, result.logits)
        kept = alive & (step.kinds != DRAFT)
        table.advance(rows[kept], ends[kept], step.canonical)
        if step.prompt_logprobs is not None:
            values = step.prompt_logprobs.tolist()
            for (n, position, _), value in zip(step.unscored, values, strict=True):
                if alive[n] and position < ends[n]:
                    table.sequences[rows[n]].request.prompt_logprobs[position + 1] = value
        good = ends == step.ends
        alive &= good
        kept &= good & (step.yields > 0)
        if self.admission.waiting and np.count_nonzero(kept & (step.kinds == PROMPT)):
            self.admission.admit()  # before what they start from may leave
            self.runner.cache.copy_pages(self.admission.copies)
        if step.way == DRAFTING:
            # What follows a draft that ended the drafts was drafted before that was known.
            drafted = alive & (step.kinds == DRAFT) & ~table.draft_ended[step.rows]
            table.draft(step.rows[drafted], step.tokens[step.firsts[drafted]])
            self.record.drafted += int(drafted.sum())
        newest = kept if step.decisions is None else kept & ~step.verifies
        rows, places = step.rows[newest], step.firsts[newest]
        if supplied := table.places("supplied", rows):
            self._keep_logits(step, rows[supplied], places[supplied])
            rows, places = np.delete(rows, supplied), np.delete(places, supplied)
        self._commit_newest(step, rows, places)
        if step.decisions is not None:
            self._commit_verified(step, np.flatnonzero(kept & step.verifies), step.decisions)
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error

    def _good_ends(self, step: Step) -> Array:
        """[n] int64: up to where the positions of each work are good; what follows is truncated."""
        if step.thinking is None or step.good_ends is step.ends:
            return step.ends
        for sequence, error in step.failed:
            self.fail(sequence, error)
        alive = step.alive
        for span in step.thinking.spans:
            for sequence in span.sequence.request.sequences:
                sequence.thought()
            if alive[span.work] and step.good_ends[span.work] < step.ends[span.work]:
                self.admission.truncate(span.sequence, int(step.good_ends[span.work]))
        return step.good_ends

    def _commit_verified(self, step: Step, works: Array, decisions: Array) -> None:
        """Of each of ``works``, all of which verify drafts, what ``accept_truncate`` decided; those
        whose logits are not finite somewhere are verified up to there, and run again without
        drafts."""
        if not len(works):
            return
        table, record = self.table, self.record
        given = step.yields[works]
        place = np.arange(given.max())
        places = step.firsts[works][:, None] + np.minimum(place, given[:, None] - 1)
        good = ((step.tokens[places] >= 0) & (place < given[:, None])).cumprod(1).sum(1)
        broken = [table.sequences[row] for row in step.rows[works[good < given]].tolist()]
        works, places = works[good > 0], places[good > 0]
        rows, column = step.rows[works], step.verifies.cumsum()[works] - 1
        drafts = table.num_drafts[rows]
        committed, agreed, left, freed, stopped = decisions[:, column].astype(np.int64)
        dropped = np.where(agreed < np.minimum(committed, drafts), drafts - agreed, 0)
        counts, ended = self._append(step, rows, committed, places, stopped > 0)
        accepted = np.minimum(agreed, counts)
        table.verify_passes[rows] += 1
        table.accepted[rows] += accepted
        table.rolled_back[rows] += dropped
        table.rollbacks[rows] += dropped > 0
        record.verify_passes += len(works)
        record.accepted += int(accepted.sum())
        record.rolled_back += int(dropped.sum())
        record.rollbacks += int((dropped > 0).sum())
        proposed = table.proposed[rows]
        for number in set(proposed.tolist()):
            own = proposed == number
            self.accepted[number] += int(accepted[own].sum())
            self.rejected[number] += int(np.count_nonzero(dropped[own]))
        self._finish(rows, ended)
        unfinished = table.generation_id[rows] > 0
        # The newest draft was not known to be none when the decision was made.
        left = np.minimum(left, np.maximum(drafts - committed, 0))
        table.num_drafts[rows[unfinished]] = left[unfinished]
        done = rows[unfinished & (left == 0)]
        table.proposed[done] = table.draft_ended[done] = 0
        for row in rows[unfinished & (freed > 0)].tolist():
            sequence = table.sequences[row]
            self.admission.truncate(sequence, sequence.computed + sequence.num_drafts)
        for sequence in broken:
            if not sequence.finished:
                self._retry_without_drafts(sequence)

    def _commit_newest(self, step: Step, rows: Array, places: Array) -> None:
        """The token at each of ``places`` [m] for each of ``rows`` [m], none of which has
        drafts."""
        if not len(rows):
            return
        tokens = step.tokens[places]
        broken = tokens < 0
        if np.count_nonzero(broken):
            for n in np.flatnonzero(broken).tolist():
                result = step.special.get(int(places[n]), SpecialResult())
                sequence = self.table.sequences[rows[n]]
                self.fail(sequence, result.error or NOT_FINITE, result.cause)
            rows, places, tokens = (x[~broken] for x in (rows, places, tokens))
        stopped = self.table.stops_at(rows, tokens)
        stopped |= self.table.length[rows] + 1 >= self.table.most[rows]
        counts = np.ones(len(rows), np.int64)
        _, ended = self._append(step, rows, counts, places[:, None], stopped)
        self._finish(rows, ended)

    def _retry_without_drafts(self, sequence: Sequence) -> None:
        """A row's logits were not finite, perhaps by the values of a wrong draft in its tile: drop
        the drafts and their values, and run the newest token alone."""
        sequence.num_drafts = 0
        sequence.proposed = sequence.draft_ended = 0
        sequence.forbid_drafts()
        if self.admission.checkpoints.on:  # its state may have moved over what was not good
            self.admission.preempt(sequence)
            return
        self.table.mark_final(np.array([sequence.row]))
        self.admission.truncate(sequence, max(sequence.computed, sequence.frozen))

    def _append(
        self, step: Step, rows: Array, counts: Array, places: Array, stopped: Array
    ) -> tuple[Array, Array]:
        """Add the first ``counts`` [n] of the tokens at ``places`` [n, W]; how many were added, and
        which sequences end: those that ``stopped``, and others by text or criteria."""
        table, tokens = self.table, step.tokens[places]
        starts = table.length[rows]
        if step.logprobs is not None:  # criteria may ask for them
            table.write_logprobs(rows, starts, counts, step.logprobs[places])
        special = table.places("special_commit", rows)
        if special:
            counts, stopped = counts.copy(), stopped.copy()
        for n in special:
            sequence = table.sequences[rows[n]]
            counts[n] = self._append_one_by_one(
                sequence, tokens[n, : counts[n]], places[n].tolist(), step.special
            )
            stopped[n] = sequence.finished
        rest = np.delete(np.arange(len(rows)), special) if special else slice(None)
        table.commit(rows[rest], counts[rest], tokens[rest])
        self.record.committed += int(counts.sum())
        return counts, stopped

    def _finish(self, rows: Array, stopped: Array) -> None:
        """After tokens were added: KV before the newest is final, full pages can be shared, and
        sequences that ``stopped`` leave."""
        table = self.table
        table.mark_final(rows)
        for row in rows[table.draft_free[rows]].tolist():
            table.sequences[row].forbid_drafts(False)
        full = table.computed[rows] // self.admission.pool.page_size
        for row in rows[full > table.indexed[rows]].tolist():
            if table.sequences[row].error is None:
                self.admission.prefix.insert(table.sequences[row])
        if np.count_nonzero(stopped):
            by_token = table.stops_at(rows, table.ids[rows, table.length[rows] - 1])
            for n in np.flatnonzero(stopped).tolist():
                self.end(table.sequences[rows[n]], "stop" if by_token[n] else "length")

    def _keep_logits(self, step: Step, rows: Array, places: Array) -> None:
        """Let the sequences of ``rows`` [m] wait for tokens from outside, with the logits at
        ``places`` [m]."""
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            sequence = self.table.sequences[row]
            sequence.next_logits = step.special.get(place, SpecialResult()).logits
            if sequence.next_logits is None:
                self.fail(sequence, NOT_FINITE)

    def supply(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Commit a token from outside to each of ``sequences``, which wait for it; whoever calls
        this ends the step by ``tracker.end``."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.supply(token)
        for counts in (self.record, self.admission.stats):
            counts.committed += len(sequences)
        # Others were preempted while they waited.
        rows = np.array([each.row for each in sequences if each.running], np.int64)
        self._finish(rows, np.zeros(len(rows), np.bool_))

    def end(self, sequence: Sequence, reason: str) -> None:
        """A sequence leaves; ``reason`` unless it has one."""
        sequence.finish_reason = sequence.finish_reason or reason
        sequence.grammar = None  # whose automata are large
        self.ended.append(sequence)
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
                sequence.error = f"a stopping criterion raised {named(error)}"
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
            begin, stops = sequence.request.num_prompt, params.stop_strings
            first = max(begin, sequence.length - reach(stops))
            before = sequence.ids(max(sequence.request.num_hidden, first - FEW), first)
            newest, exempt = sequence.ids(first, sequence.length), begin + params.min_new_tokens
            with callers_modes():
                text, early = decoded(self.tokenizer, before, newest, exempt - first)
            if (found := first_stop(text, stops, early)) is not None:
                sequence.stop_string = found[0]
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
        """End a sequence with an error."""
        sequence.error, sequence.cause = error, cause
        self.admission.prefix.discard(sequence)  # no other request starts from it
        self.end(sequence, "abort")
