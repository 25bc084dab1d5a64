"""Who waits, who runs, and on which pages: admission, sharing, preemption. Host only.

Knows nothing of passes; the scheduler says which rows it wants pages for.
"""

from __future__ import annotations

from bisect import insort

from tinyspec.config import EngineConfig
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.prefix_cache import PrefixCache
from tinyspec.scheduler.request import Sequence


def age(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


def rank(sequence: Sequence) -> tuple[bool, int, int]:
    """Who gets pages first, and is preempted last: deterministic before plain, old before new."""
    return not sequence.deterministic, *age(sequence)


class Admission:
    """The waiting and the running sequences, and the pages that the latter hold."""

    def __init__(self, config: EngineConfig, pool: PagePool):
        self.config = config
        self.pool = pool
        self.prefix = PrefixCache(pool) if config.prefix_cache else None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.cached_prompt_tokens = 0
        # After a failed pass: who was in it, and how many tokens each had; most rows to try.
        self.suspects: list[tuple[Sequence, int]] = []
        self.row_limit: int | None = None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, by the age of its request."""
        insort(self.waiting, sequence, key=age)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its pages."""
        sequence.drop_drafts()
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.pool.free(sequence.pages)

    def settle(self, sequence: Sequence) -> None:
        """Its tokens were just committed: what filled up may serve others."""
        if self.prefix is not None:
            self.prefix.insert(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """It failed: nothing of what it computed may serve others."""
        if self.prefix is not None:
            self.prefix.drop(sequence.pages)

    def can_fork(self, leader: Sequence) -> bool:
        """Whether there is a place and a page for a sibling that starts on a computed prompt."""
        room = len(self.running) < self.config.max_sequences
        return room and not self.suspects and self.pool.can_fork(leader.computed)

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Start ``sibling`` on the prompt that ``leader`` has computed.

        Returns (from, to) of the page that must be copied, if there is one.
        """
        sibling.pages, copy = self.pool.fork(leader.pages, leader.computed)
        sibling.computed, sibling.canonical = leader.computed, leader.canonical
        self._count_cached(sibling)
        self.running.append(sibling)
        return copy

    def match(self, sequence: Sequence) -> tuple[list[int], int]:
        """Pages of the prefix cache that it can start from, and how many are canonical."""
        if self.prefix is None or sequence.recompute:
            return [], 0
        return self.prefix.match(sequence)

    def adopt(self, sequence: Sequence, pages: list[int], canonical: int) -> None:
        """Start from shared pages. The last token runs all the same, for its logits."""
        if not pages:
            return
        self.pool.adopt(pages)
        sequence.pages = pages
        sequence.indexed = len(pages)
        sequence.frozen = len(pages) * self.pool.page_size
        sequence.computed = min(sequence.frozen, len(sequence.tokens) - 1)
        sequence.canonical = min(canonical * self.pool.page_size, sequence.computed)
        self._count_cached(sequence)

    def _count_cached(self, sequence: Sequence) -> None:
        if sequence.stats.preemptions == 0:
            cached = min(sequence.computed, sequence.request.num_prompt)
            sequence.stats.cached_prompt_tokens = cached
            self.cached_prompt_tokens += cached

    def eligible(self) -> list[Sequence]:
        """Who may have rows: everyone who runs, or a suspect by itself."""
        return [self.suspects[0][0]] if self.suspects else self.running

    def admit(self) -> None:
        """Move waiting sequences in while there is a place and pages that are likely to last."""
        self._clear_suspects()
        if self.suspects:
            suspect = self.suspects[0][0]
            if suspect in self.waiting:
                self.waiting.remove(suspect)
                self.running.append(suspect)
            return
        while self.waiting and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            pages, canonical = self.match(sequence)
            need = self.pool.pages_for(len(sequence.tokens) + 1) - len(pages)
            free = self.pool.num_free - self.pool.num_idle(pages)
            if self.running and free < need + len(self.running):
                break
            self.running.append(self.waiting.pop(0))
            self.adopt(sequence, pages, canonical)

    def make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for its first ``tokens`` tokens, from those that rank lower if need be."""
        while not self.pool.can_grow(sequence.pages, tokens):
            victim = max(self.running, key=rank)
            if victim is sequence:
                return False
            self._preempt(victim)
        self.pool.grow(sequence.pages, tokens, sequence.most_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give back its pages; it is computed again, to the same bits, when there is room."""
        self.running.remove(sequence)
        self.pool.free(sequence.pages)
        sequence.reset()
        sequence.stats.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def preempt_all(self) -> None:
        """Everything that ran goes back to be computed again."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def forget_plain(self) -> None:
        """No new request starts from what plain ones have computed so far."""
        if self.prefix is not None:
            self.prefix.drop_plain()

    def forget_pages(self) -> None:
        """No page is worth anything any more: the weights changed, or the pool is given back."""
        self.preempt_all()
        if self.prefix is not None:
            self.prefix.clear()

    def isolate(self, suspects: list[Sequence], row_limit: int | None = None) -> None:
        """A pass of these failed: each runs by itself until it has one more token, or fails.

        row_limit: most rows of a pass of the first of them.
        """
        self.preempt_all()
        known = [sequence for sequence, _ in self.suspects]
        self.suspects += [(s, len(s.tokens)) for s in suspects if s not in known]
        self.row_limit = row_limit

    def _clear_suspects(self) -> None:
        while self.suspects:
            sequence, tokens = self.suspects[0]
            if not sequence.finished and len(sequence.tokens) == tokens:
                return
            del self.suspects[0]
            self.row_limit = None
            if sequence in self.running:
                self._preempt(sequence)  # leaves the pool to the next
