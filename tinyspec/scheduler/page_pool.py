"""Which pages are owned, cached, reserved or free. Host only; knows no tensor and no token.

A page may have several owners, after a fork or through a shared prefix; it is then read-only, and
free again after its last owner. A page that the prefix cache keeps becomes idle instead: it is
taken when no other is free, least recently used first.

The lowest free pages are taken first, which keeps those in use close together. The pages after a
sequence's last one are reserved for what it may still need, because consecutive pages are read at
once. Reserved pages count as free, and others take them before any idle page is evicted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from tinyspec.scheduler.sequence_table import Array

# Most consecutive pages to reserve, and how many pages are looked at in search of them.
LONGEST_RUN = 64


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, ``num_held`` of them owned.

    most_used: pages up to the last that was handed out. seen [num_pages] bool: those whose tokens
    an assistant has read, all of them.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.num_held = 0
        # By a sequence's last page, pages after it that are reserved for the sequence.
        self.reserved: dict[int, list[int]] = {}
        self.cached: set[int] = set()
        self.idle: dict[int, None] = {}
        # Called with every cached page that is taken for something else.
        self.on_evict: Callable[[int], None] = lambda page: None
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Have ``num_pages``; none may be owned or cached."""
        assert not (self.cached or self.num_held)
        self.num_pages, self._owners = num_pages, [0] * num_pages
        self.free_pages, self.most_used = list(range(num_pages)), 0
        self.seen: Array = np.zeros(num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages without an owner, idle ones included."""
        return self.num_pages - self.num_held

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def can_grow(self, pages: list[int], tokens: int) -> bool:
        """Whether ``grow`` would succeed."""
        return self.pages_for(tokens) - len(pages) <= self.num_free

    def grow(self, pages: list[int], tokens: int, most: int = 0) -> None:
        """Append pages until ``pages`` holds ``tokens`` tokens; it may grow to ``most``."""
        assert self.can_grow(pages, tokens)
        final = self.pages_for(max(tokens, most))
        while len(pages) < self.pages_for(tokens):
            page = self._next(pages, final - len(pages))
            assert self._owners[page] == 0
            self._own(page)
            self.most_used, self.seen[page] = max(self.most_used, page + 1), False
            pages.append(page)

    def _own(self, page: int) -> None:
        if self._owners[page] == 0:
            self.num_held += 1
        self._owners[page] += 1

    def _next(self, pages: list[int], wanted: int) -> int:
        """The page reserved for ``pages``; else the first of ``wanted`` consecutive ones, or any
        free one; else another's reserved one; else an idle one. What follows it is reserved."""
        run = self.reserved.pop(pages[-1], []) if pages else []
        run = run or self._run(min(wanted, LONGEST_RUN))
        if not run and self.reserved:
            run = self.reserved.popitem()[1]
        if not run:
            return self._evict()
        if len(run) > 1:
            self.reserved[run[0]] = run[1:]
        return run[0]

    def _run(self, length: int) -> list[int]:
        """Take the lowest ``length`` consecutive free pages; if these are not found soon, those of
        the free pages at the end of the list, which follow each other; one, if these are fewer."""
        free = self.free_pages
        for first in range(min(len(free) - length + 1, LONGEST_RUN)):
            if free[first + length - 1] == free[first] + length - 1:
                break
        else:
            places = range(len(free))
            gaps = free[-1] - len(free) + 1 if free else 0
            first = bisect_left(places, gaps, key=lambda place: free[place] - place)
            if len(free) - first < length:
                first, length = 0, 1
        run = free[first : first + length]
        del free[first : first + length]
        return run

    def truncate(self, pages: list[int], tokens: int) -> None:
        """Give back the pages after the first ``tokens`` tokens."""
        while len(pages) > self.pages_for(tokens):
            self._release(pages.pop())

    def free(self, pages: list[int]) -> None:
        """Give back all of ``pages``."""
        self.truncate(pages, 0)

    def keep(self, page: int) -> None:
        """Cache an owned page: it becomes idle, not free, after its last owner."""
        assert self._owners[page] > 0
        self.cached.add(page)

    def drop(self, page: int) -> None:
        """Undo ``keep``; an idle page is free again."""
        self.cached.discard(page)
        if page in self.idle:
            del self.idle[page]
            insort(self.free_pages, page)

    def adopt(self, pages: list[int]) -> None:
        """One more owner for pages that are cached, idle or not, or owned."""
        for page in pages:
            assert page in self.cached or self._owners[page]
            self.idle.pop(page, None)
            self._own(page)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def _release(self, page: int) -> None:
        assert self._owners[page] > 0
        for other in self.reserved.pop(page, ()):
            insort(self.free_pages, other)
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self.num_held -= 1
            if page in self.cached:
                self.idle[page] = None
            else:
                insort(self.free_pages, page)

    def _evict(self) -> int:
        """Take the page that has been idle longest."""
        page = next(iter(self.idle))
        del self.idle[page]
        self.cached.remove(page)
        self.on_evict(page)
        return page
