"""Commits what a pass has found: accept drafts, roll back, stop. Tokens are added nowhere else.

Plain tokens and rows of a verify are committed alike. Most are committed as columns of the sequence
table; one by one are those whose end hangs on more than their ids, or that keep more than ids and
log-probabilities. Knows no device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tinyspec.engine.in_flight import InFlightPass, NewTokens
from tinyspec.errors import named
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import NOT_FINITE, Sampled, SpecialResult
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, DRAFTING, TokenCounts
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array
from tinyspec.text.stop_strings import FEW, decoded, first_stop, reach
from tinyspec.thinking.thinker import Thinker


@dataclass(eq=False)
class Committer:
    """Adds tokens to sequences, finishes those that stop, truncates those with wrong drafts.

    record: of the latest pass, which counts what is committed. looked_up: its accepted tokens that
    drafters proposed, by the drafter. ended: sequences that finished, and were not taken.
    """

    admission: Admission
    tokenizer: Any
    runner: ModelRunner
    thinker: Thinker | None = None
    record: TokenCounts = field(default_factory=TokenCounts)
    looked_up: Counter[int] = field(default_factory=Counter)
    ended: list[Sequence] = field(default_factory=list)
    _raised: BaseException | None = None

    def __post_init__(self) -> None:
        self.table = self.admission.table

    def take_ended(self) -> list[Sequence]:
        """Those that finished since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def commit(self, done: InFlightPass, found: Sampled) -> None:
        """Mark what a pass has computed, start the siblings that wait for it, and commit tokens or
        keep them as drafts, whose errors are left to the verify. What is not alive is left out, and
        tokens of works that are not good to their end.

        Raises what a criterion raised but Exceptions.
        """
        table, works = self.table, done.works
        self.record, self.looked_up = done.record, Counter()
        ends = self._good_ends(done)
        alive = done.alive
        for result in found.special.values():
            self.runner.torch_state.stream.hand_out(result.scores, result.logits)
        final = alive & (works.kinds != DRAFT)
        table.advance(works.rows[final], ends[final], done.work_pass.canonical)
        if found.prompt_logprobs is not None:
            values = found.prompt_logprobs.tolist()
            for (n, position, _), value in zip(done.unscored, values, strict=True):
                if alive[n] and position < ends[n]:
                    request = table.sequences[works.rows[n]].request
                    request.prompt_logprobs[position + 1] = value
        alive &= ends == works.ends
        new = done.new
        kept = (final & alive)[done.work]
        if done.leads:
            new = replace(new, rows=self._start_siblings(done, alive))
            kept &= new.rows >= 0
        if done.work_pass.way == DRAFTING:
            self._keep_drafts(new, (alive & (works.kinds == DRAFT))[done.work], found)
        if np.count_nonzero(kept) < len(kept):
            new = new.only(kept)
        if supplied := table.places("supplied", new.rows):
            self._keep_logits(new.only(np.array(supplied)), found)
            new = new.only(np.delete(np.arange(len(new.rows)), supplied))
        if found.decisions is None:
            self._commit_newest(new, found)
        else:
            self._commit_newest(new.only(new.verified < 0), found)
            self._commit_verified(new.only(new.verified >= 0), found, found.decisions)
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error

    def _good_ends(self, done: InFlightPass) -> Array:
        """[works] int64: up to where the positions of each are good; what follows is truncated."""
        if done.thinking is None or done.ends is done.works.ends:
            return done.ends
        for sequence, error in done.failed:
            self.fail(sequence, error)
        alive = done.alive
        for span in done.thinking.spans:
            for sequence in span.sequence.request.sequences:
                sequence.thought()
            if alive[span.work] and done.ends[span.work] < done.works.ends[span.work]:
                self.admission.truncate(span.sequence, int(done.ends[span.work]))
        return done.ends

    def _start_siblings(self, done: InFlightPass, alive: Array) -> Array:
        """Start the siblings of prompts that are computed, those without a place wait; the rows of
        ``done``, siblings' own among them, -1 for those that do not start."""
        places = {sibling: place for place, sibling in done.siblings}
        rows, works = done.new.rows.copy(), done.works
        rows[list(places.values())] = -1
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

    def _keep_drafts(self, new: NewTokens, drafting: Array, found: Sampled) -> None:
        """One more draft for those that are ``drafting`` [n]. What follows a draft that ended the
        drafts was drafted before that was known."""
        drafting &= ~self.table.draft_ended[new.rows]
        self.table.draft(new.rows[drafting], found.tokens[new.firsts[drafting]])
        self.record.drafted += int(drafting.sum())

    def _commit_verified(self, new: NewTokens, found: Sampled, decisions: Array) -> None:
        """Of each, all of which verify drafts, what ``accept_truncate`` decided; those whose logits
        are not finite somewhere are verified up to there, and run again without drafts."""
        if not len(new.rows):
            return
        table, record = self.table, self.record
        given, place = new.counts[:, None], np.arange(new.counts.max())
        places = new.firsts[:, None] + np.minimum(place, given - 1)
        good = ((found.tokens[places] >= 0) & (place < given)).cumprod(1).sum(1)
        broken = [table.sequences[row] for row in new.rows[good < new.counts].tolist()]
        new, places = new.only(good > 0), places[good > 0]
        rows, drafts = new.rows, table.num_drafts[new.rows]
        committed, agreed, left, freed, stopped = decisions[:, new.verified].astype(np.int64)
        dropped = np.where(agreed < np.minimum(committed, drafts), drafts - agreed, 0)
        counts, ended = self._append(rows, committed, places, stopped > 0, found)
        accepted = np.minimum(agreed, counts)
        table.verify_passes[rows] += 1
        table.accepted[rows] += accepted
        table.rolled_back[rows] += dropped
        table.rollbacks[rows] += dropped > 0
        record.accepted += int(accepted.sum())
        record.rolled_back += int(dropped.sum())
        record.rollbacks += int((dropped > 0).sum())
        if table.any("drafter"):
            looked = zip(table.drafter[rows].tolist(), accepted * table.proposed[rows], strict=True)
            for number, count in looked:
                self.looked_up[number] += int(count)
        self._finish(rows, ended)
        unfinished = table.generation_id[rows] > 0
        # The newest draft was not known to be none when the decision was made.
        left = np.minimum(left, np.maximum(drafts - committed, 0))
        table.num_drafts[rows[unfinished]] = left[unfinished]
        done = rows[unfinished & (left == 0)]
        table.proposed[done] = table.draft_ended[done] = False
        for row in rows[unfinished & (freed > 0)].tolist():
            sequence = table.sequences[row]
            self.admission.truncate(sequence, sequence.computed + sequence.num_drafts)
        for sequence in broken:
            if not sequence.finished:
                self._retry_without_drafts(sequence)

    def _commit_newest(self, new: NewTokens, found: Sampled) -> None:
        """One token for each, none of which has drafts."""
        rows, places = new.rows, new.firsts
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
        stopped = self.table.stops_at(rows, tokens)
        stopped |= self.table.length[rows] + 1 >= self.table.most[rows]
        counts = np.ones(len(rows), np.int64)
        _, ended = self._append(rows, counts, places[:, None], stopped, found)
        self._finish(rows, ended)

    def _retry_without_drafts(self, sequence: Sequence) -> None:
        """A row's logits were not finite, perhaps by the values of a wrong draft in its tile: drop
        the drafts and their values, and run the newest token alone."""
        sequence.drop_drafts()
        sequence.forbid_drafts()
        if self.admission.checkpoints.on:  # its state may have moved over what was not good
            self.admission.preempt(sequence)
            return
        self.table.mark_final(np.array([sequence.row]))
        kept = max(sequence.computed, sequence.frozen)
        self.admission.truncate(sequence, kept)
        self.runner.cache.zero_tail(sequence.pages, kept)

    def _append(
        self, rows: Array, counts: Array, places: Array, stopped: Array, found: Sampled
    ) -> tuple[Array, Array]:
        """Add the first ``counts`` [n] of the tokens at ``places`` [n, W]; how many were added, and
        which sequences end: those that ``stopped``, and others by text or criteria."""
        table, tokens = self.table, found.tokens[places]
        starts = table.length[rows]
        if found.logprobs is not None:  # criteria may ask for them
            table.write_logprobs(rows, starts, counts, found.logprobs[places])
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
        self.record.committed += int(counts.sum())
        return counts, stopped

    def _finish(self, rows: Array, stopped: Array) -> None:
        """After tokens were added: KV before the newest is final, full pages can be shared, and
        sequences that ``stopped`` leave."""
        table = self.table
        table.mark_final(rows)
        for row in rows[table.draft_free[rows]].tolist():
            table.sequences[row].forbid_drafts(False)
        for row in rows[table.fills_page(rows, self.admission.pool.page_size)].tolist():
            if table.sequences[row].error is None:
                self.admission.prefix.insert(table.sequences[row])
        if np.count_nonzero(stopped):
            by_token = table.stops_at(rows, table.ids[rows, table.length[rows] - 1])
            for n in np.flatnonzero(stopped).tolist():
                self.end(table.sequences[rows[n]], "stop" if by_token[n] else "length")

    def _keep_logits(self, new: NewTokens, found: Sampled) -> None:
        """Let sequences wait for tokens from outside, with the logits that were ``found``."""
        for row, place in zip(new.rows.tolist(), new.firsts.tolist(), strict=True):
            sequence = self.table.sequences[row]
            sequence.next_logits = found.special.get(place, SpecialResult()).logits
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
        """End a sequence, and those that wait for its prompt, with an error."""
        for sibling in sequence.siblings:
            self.fail(sibling, error, cause)
        sequence.siblings = []
        sequence.error, sequence.cause = error, cause
        self.admission.prefix.discard(sequence)  # no other request starts from it
        self.end(sequence, "abort")
