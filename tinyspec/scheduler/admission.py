"""Which sequences wait and run, and on which pages: admission, sharing, preemption. Host only.

Knows nothing of passes; the scheduler asks for the pages that rows need.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from tinyspec.config import EngineConfig
from tinyspec.scheduler.buckets import MOST_DRAFTS
from tinyspec.scheduler.checkpoints import Checkpoints
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import EngineStats
from tinyspec.scheduler.prefix_cache import PrefixCache
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable


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
        self.suspects: list[tuple[Sequence, int]] = []
        self.row_limit: int | None = None

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

    @property
    def free_places(self) -> int:
        """How many more sequences may run now."""
        return 0 if self.suspects else self._max_sequences - len(self.table)

    def can_fork(self, leader: Sequence) -> bool:
        """Whether a sibling can run now, and there is a page for its copy of the last one."""
        return self.free_places > 0 and self.pool.can_fork(leader.computed)

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Start ``sibling`` on the prompt that ``leader`` has computed.

        Returns (from, to) of the page that must be copied, if there is one.
        """
        sibling.enter(self.table, self._window)
        pages, copy = self.pool.fork(leader.pages, leader.computed)
        sibling.set_pages(pages)
        sibling.computed, sibling.canonical = leader.computed, leader.canonical
        self.table.seen[sibling.row] = self.table.seen[leader.row]
        self.checkpoints.fork(leader.row, sibling.row)
        self._count_cached(sibling)
        return copy

    def adopt(self, sequence: Sequence, pages: list[int], canonical: int) -> None:
        """Start from shared pages, of which the first ``canonical`` are. The last token runs all
        the same, for its logits."""
        if not pages:
            return
        self.pool.adopt(pages)
        sequence.set_pages(pages)
        sequence.indexed = len(pages)
        sequence.frozen = len(pages) * self.pool.page_size
        sequence.computed = min(sequence.frozen, sequence.length - 1)
        sequence.canonical = min(canonical * self.pool.page_size, sequence.computed)
        self.prefix.begin(sequence, len(pages))
        self._count_cached(sequence)

    def _count_cached(self, sequence: Sequence) -> None:
        if sequence.stats.preemptions == 0:
            cached = min(sequence.computed, sequence.request.num_prompt)
            sequence.stats.cached_prompt_tokens = cached
            self.stats.cached_prompt_tokens += cached

    def eligible(self) -> Array:
        """Rows of the table that may be in a pass, in the order in which they would start: all of
        them, or after a failed pass one alone."""
        if self.suspects:
            return np.array([self.suspects[0][0].row])
        table, rows = self.table, self.table.rows
        # Ahead of results there are sequences that have all their tokens and are still here.
        return rows[table.length[rows] < table.most[rows]] if table.is_ahead else rows

    def admit(self) -> None:
        """Start waiting sequences while pages are likely to last for one token of each."""
        self._drop_cleared_suspects()
        if self.suspects:
            suspect = self.suspects[0][0]
            if suspect in self.waiting:
                self.waiting.remove(suspect)
                suspect.enter(self.table, self._window)
            return
        while (found := self._next()) is not None:
            sequence, pages, canonical = found
            self.waiting.remove(sequence)
            sequence.enter(self.table, self._window)
            self.adopt(sequence, pages, canonical)

    def _first_waiting(self) -> Sequence | None:
        """The next sequence to start: none that waits for a token from outside."""
        return next((s for s in self.waiting if s.next_logits is None), None)

    def _next(self) -> tuple[Sequence, list[int], int] | None:
        """The sequence to start next, the pages that it starts from, and how many of them are
        canonical; None if none can start."""
        if self.free_places <= 0 or (sequence := self._first_waiting()) is None:
            return None
        pages, canonical = self.prefix.match(sequence)
        need = self.pool.pages_for(sequence.length + 1) - len(pages)
        free = self.pool.num_free - len(self.pool.idle.keys() & pages)
        if len(self.table) and free < need + len(self.table):
            return None
        return sequence, pages, canonical

    @property
    def settled(self) -> bool:
        """Whether the running sequences are all that the next pass can be for, and none could start
        from pages that fill up before it: it would be the same one pass earlier."""
        if self.suspects or self._next() is not None:
            return False
        return not self.prefix.on or bool(self.table.computed[self.table.rows].all())

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
        if held and (len(held) < len(running) or self._first_waiting() is not None):
            self.preempt(last_served(held))
            self.admit()
            return True
        if found := not held and len(running) > 1:
            self.preempt(last_served(running))
        return found

    def preempt(self, sequence: Sequence) -> None:
        """Give back a running sequence's pages and queue it; it is computed again, to the same
        bits."""
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

    def isolate(self, suspects: list[Sequence], row_limit: int | None = None) -> None:
        """A pass of these failed: each runs alone until it has one more token or its
        logits, or fails.

        row_limit: most rows of a pass of the first of them.
        """
        self.preempt_all()
        known = [sequence for sequence, _ in self.suspects]
        self.suspects += [(s, s.length) for s in suspects if s not in known]
        self.row_limit = row_limit

    def _drop_cleared_suspects(self) -> None:
        while self.suspects:
            sequence, tokens = self.suspects[0]
            waits = sequence.next_logits is not None  # it has run, and gets no token before others
            if not (sequence.finished or waits) and sequence.length == tokens:
                return
            del self.suspects[0]
            self.row_limit = None
            if sequence.running:
                self.preempt(sequence)  # the next has the pool to itself
