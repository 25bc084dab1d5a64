"""Which sequences wait and run, and on which pages: admission, sharing, preemption. Host only.

What one sequence computes others start from, where it is their prompt or begins as theirs does:
they wait until it is there.

Knows nothing of passes; the scheduler asks for the pages that rows need.
"""

from __future__ import annotations

from bisect import insort
from itertools import islice

import numpy as np

from tinyspec.config import EngineConfig
from tinyspec.scheduler.buckets import MOST_DRAFTS
from tinyspec.scheduler.checkpoints import Checkpoints
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import EngineStats
from tinyspec.scheduler.prefix_cache import PrefixCache
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable

# Digests of first pages, and whether the sequence is deterministic.
Begun = set[tuple[bytes | None, bool]]


def starting_order(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.request.priority, sequence.request.arrival, sequence.index


def last_served(sequences: list[Sequence]) -> Sequence:
    """Who gets pages last and is preempted first: plain before deterministic, then the one that
    would start last."""
    return max(sequences, key=lambda each: (not each.deterministic, *starting_order(each)))


class Admission:
    """The waiting and the running sequences, and the pages that the latter hold.

    table: a row for each running sequence. stats: the engine's.
    """

    def __init__(self, config: EngineConfig, pool: PagePool):
        self.pool = pool
        self.table = SequenceTable(config.max_sequences)
        self.waiting: list[Sequence] = []
        self._max_sequences = config.max_sequences
        self._window = config.draft_window or MOST_DRAFTS
        self.checkpoints = Checkpoints(self.table, pool.page_size, self._window)
        self.prefix = PrefixCache(pool, self.checkpoints, config.prefix_cache)
        self.stats = EngineStats()
        # Sequences of a failed pass and how many tokens each had; most rows for the first of them.
        self.suspects: dict[Sequence, int] = {}
        self.row_limit: int | None = None
        # Of pages, (from, to): to be made on the device, in order, before anything else runs there.
        self.copies: list[tuple[int, int]] = []

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in ``starting_order``; a copy."""
        return [self.table.sequences[row] for row in self.table.rows.tolist()]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, by priority, then in order of arrival."""
        insort(self.waiting, sequence, key=starting_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and give back its pages."""
        if sequence.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.pool.free(sequence.pages)
        sequence.leave()

    def admit(self) -> None:
        """Start waiting sequences while pages are likely to last for one token of each."""
        self._drop_cleared_suspects()
        if self.suspects:
            if (suspect := next(iter(self.suspects))) in self.waiting:
                self._start(suspect)
        elif candidates := self._candidates():
            begun, waiting = self._begun(), set[Request]()
            for sequence in candidates:
                if sequence.request in waiting or self._follows(sequence, begun):
                    waiting.add(sequence.request)
                    continue
                if not self._fits(sequence):
                    break
                self._start(sequence)
                if not sequence.indexed:
                    begun.add((self.prefix.first(sequence), sequence.deterministic))

    def _candidates(self) -> list[Sequence]:
        """The next sequences to start, as many as there are places for, those that follow others
        included; none that waits for a token from outside."""
        waiting = (each for each in self.waiting if each.next_logits is None)
        return list(islice(waiting, self._max_sequences - len(self.table)))

    def _begun(self) -> Begun:
        """Of the running sequences whose first page is to come: with a pass, not with a token from
        outside."""
        table, rows = self.table, self.table.rows
        short = (table.indexed[rows] == 0) & (table.length[rows] >= self.pool.page_size)
        running = [table.sequences[row] for row in rows[short].tolist()]
        coming = (each for each in running if each.next_logits is None)
        return {(self.prefix.first(each), each.deterministic) for each in coming}

    def _follows(self, sequence: Sequence, begun: Begun) -> bool:
        """Whether a running sequence is about to compute what a waiting one can start from: their
        prompt, or the first page of it."""
        if self._source(sequence) is not None:
            return False
        request, least = sequence.request, sequence.request.num_prompt - 1
        if any(each.running and each.computed < least for each in request.sequences):
            return True
        # A deterministic sequence cannot start from a plain one's pages.
        kinds = {True, sequence.deterministic}
        first = self.prefix.first(sequence) if begun and not sequence.recompute else None
        return first is not None and any((first, kind) in begun for kind in kinds)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether pages are likely to last if a sequence starts: for the present tokens of all, or
        a page more for each. Later another completion of a prompt may have to compute it again, so
        that once it starts where pages are scarce, too."""
        source, pages, _ = self._shared(sequence)
        need = self.pool.pages_for(sequence.length + 1) - len(pages)
        if source is None or sequence.stats.preemptions:
            need += int(np.maximum(self.lacking(), 1).sum())
        free = self.pool.num_free - len(self.pool.idle.keys() & pages)
        return free >= need or not len(self.table)

    def lacking(self) -> Array:
        """[n]: pages that each running sequence lacks for its present tokens and one more; less
        than 0 where it has some to spare."""
        table, rows = self.table, self.table.rows
        return table.length[rows] // self.pool.page_size + 1 - table.num_pages[rows]

    def _source(self, sequence: Sequence) -> Sequence | None:
        """Another completion, which runs, has computed all but the last token of their prompt, and
        can be started from."""
        tokens = sequence.request.num_prompt - 1
        others = () if sequence.num_generated else sequence.request.sequences
        done = (each for each in others if each.running and each.computed >= tokens)
        return next((each for each in done if self.checkpoints.reaches(each.row, tokens)), None)

    def _shared(self, sequence: Sequence) -> tuple[Sequence | None, list[int], int]:
        """The ``_source`` of a waiting sequence, the full pages that it starts from, that one's or
        those of the prefix cache, and how many positions, from the first, are canonical."""
        size, tokens = self.pool.page_size, sequence.request.num_prompt - 1
        if (source := self._source(sequence)) is not None:
            return source, source.pages[: tokens // size], source.canonical
        pages, canonical = self.prefix.match(sequence)
        return None, pages, canonical * size

    def _start(self, sequence: Sequence) -> None:
        """Let a waiting sequence run, from what it shares. The last token runs all the same, for
        its logits."""
        table, (source, pages, canonical) = self.table, self._shared(sequence)
        self.waiting.remove(sequence)
        sequence.enter(table, self._window)
        self.pool.adopt(pages)
        sequence.indexed, known = len(pages), len(pages) * self.pool.page_size
        sequence.frozen = known
        if source is None:
            self.prefix.begin(sequence, len(pages))
        else:
            if known < (tokens := sequence.request.num_prompt - 1):
                self.pool.grow(pages, tokens, sequence.most_tokens)
                self.copies.append((source.pages[len(pages) - 1], pages[-1]))
            known, table.seen[sequence.row] = tokens, min(table.seen[source.row], tokens)
            self.checkpoints.fork(source.row, sequence.row)
        sequence.set_pages(pages)
        sequence.computed = min(known, sequence.length - 1)
        sequence.canonical = min(canonical, sequence.computed)
        if sequence.stats.preemptions == 0:
            cached = min(sequence.computed, sequence.request.num_prompt)
            sequence.stats.cached_prompt_tokens = cached
            self.stats.cached_prompt_tokens += cached

    @property
    def settled(self) -> bool:
        """Whether the running sequences are all that the next pass can be for, and none waits for
        pages that fill up before it: it would be the same one pass earlier."""
        if not (candidates := self._candidates()):
            return not self.suspects
        follows = self._follows(candidates[0], self._begun())
        return not (self.suspects or follows or self._fits(candidates[0]))

    def make_room(self, rows: Array, tokens: Array) -> Array | None:
        """[n] bool: which of ``rows`` [n], by falling priority, have pages for their first
        ``tokens`` [n]; those of lower priority are preempted if need be, but not ahead of results.
        None: all have."""
        short = tokens > self.table.num_pages[rows] * self.pool.page_size
        if not np.count_nonzero(short):
            return None
        sequences = [self.table.sequences[row] for row in rows.tolist()]
        served = [
            sequence.running and (not lacks or self._make_room(sequence, end))
            for sequence, lacks, end in zip(sequences, short.tolist(), tokens.tolist(), strict=True)
        ]
        return np.array(served)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        while not self.pool.can_grow(sequence.pages, tokens):
            if self.table.is_ahead:
                return False
            victim = last_served(self.running)
            if victim is sequence:
                return False
            self.preempt(victim)
        self.pool.grow(sequence.pages, tokens, sequence.most_tokens)
        sequence.set_pages(sequence.pages)
        return True

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Give back the pages behind its first ``tokens`` tokens."""
        self.pool.truncate(sequence.pages, tokens)
        sequence.set_pages(sequence.pages)

    def make_way(self) -> bool:
        """No sequence that runs has found pages: preempt one, if others can do with its pages. One
        that waits for a token from outside needs nothing else, so it goes first."""
        running = self.running
        held = [sequence for sequence in running if sequence.next_logits is not None]
        if held and (len(held) < len(running) or any(s.next_logits is None for s in self.waiting)):
            self.preempt(last_served(held))
            self.admit()
            return True
        if found := not held and len(running) > 1:
            self.preempt(last_served(running))
        return found

    def preempt(self, sequence: Sequence) -> None:
        """Give back a running sequence's pages, if it has any yet, and queue it; it is computed
        again, to the same bits."""
        self._stop(sequence)
        sequence.stats.preemptions += 1
        self.stats.preemptions += 1
        self.add(sequence)

    def preempt_all(self) -> None:
        """Queue every running sequence to be computed again."""
        for sequence in self.running:
            self.preempt(sequence)

    def forget_pages(self) -> None:
        """Drop the values of all pages: the weights changed, or the pool is given back."""
        for sequence in (*self.running, *self.waiting):
            sequence.next_logits = None
        self.preempt_all()
        self.prefix.clear()
        self.copies.clear()

    def isolate(self, suspects: list[Sequence], row_limit: int | None = None) -> None:
        """A pass of these failed: each runs alone until it has one more token or its
        logits, or fails.

        row_limit: most rows of a pass of the first of them.
        """
        self.preempt_all()
        for sequence in suspects:
            self.suspects.setdefault(sequence, sequence.length)
        self.row_limit = row_limit

    def _drop_cleared_suspects(self) -> None:
        for sequence, tokens in list(self.suspects.items()):
            waits = sequence.next_logits is not None  # it has run, and gets no token before others
            if not (sequence.finished or waits) and sequence.length == tokens:
                return
            del self.suspects[sequence]
            self.row_limit = None
            if sequence.running:
                self.preempt(sequence)  # the next has the pool to itself
