"""The page pool's bookkeeping: who holds which page. Host only; knows no tensor and no token.

A page may have several owners, after a fork or by a prefix that they share; it is then read-only,
and given back with its last owner. A page that the prefix cache keeps goes idle instead: free to be
taken, least recently used first, once no other is. The lowest free page is always handed out first,
which keeps the pages in use dense.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = [0] * num_pages
        self._free = list(range(num_pages))
        self._fresh: list[int] = []
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}
        # Told of every kept page that is taken for something else.
        self.on_evict: Callable[[int], None] = lambda page: None

    def extend(self, more: int) -> None:
        """Add ``more`` pages behind those that there are."""
        for page in range(self.num_pages, self.num_pages + more):
            heapq.heappush(self._free, page)
        self._owners += [0] * more
        self.num_pages += more

    def shrink(self, num_pages: int) -> None:
        """Leave the first ``num_pages``; nobody may own or keep any."""
        assert not self._kept and not any(self._owners)
        self.num_pages = min(self.num_pages, num_pages)
        self._owners = [0] * self.num_pages
        self._free = list(range(self.num_pages))
        self._fresh = []

    def kept(self) -> list[int]:
        """Pages whose values somebody counts on: owned, or kept while idle."""
        return [p for p in range(self.num_pages) if self._owners[p] or p in self._kept]

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def num_idle(self, pages: list[int]) -> int:
        """How many of ``pages`` nobody owns."""
        return sum(page in self._idle for page in pages)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def can_grow(self, pages: list[int], tokens: int) -> bool:
        """Whether ``grow`` would succeed."""
        return self.pages_for(tokens) - len(pages) <= self.num_free

    def grow(self, pages: list[int], tokens: int) -> None:
        """Append pages until ``pages`` holds ``tokens`` tokens."""
        assert self.can_grow(pages, tokens)
        while len(pages) < self.pages_for(tokens):
            page = heapq.heappop(self._free) if self._free else self._evict()
            assert self._owners[page] == 0
            self._owners[page] = 1
            self._fresh.append(page)
            pages.append(page)

    def take_fresh(self) -> list[int]:
        """Pages handed out since the last call: what is in them is somebody's old values."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def truncate(self, pages: list[int], tokens: int) -> int:
        """Give back the pages behind the first ``tokens`` tokens; returns how many."""
        surplus = len(pages) - self.pages_for(tokens)
        for _ in range(surplus):
            self._release(pages.pop())
        return max(surplus, 0)

    def free(self, pages: list[int]) -> None:
        """Give back all of ``pages``."""
        self.truncate(pages, 0)

    def keep(self, page: int) -> None:
        """Let an owned page go idle, not free, when its last owner leaves."""
        assert self._owners[page] > 0
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Undo ``keep``; an idle page is free again."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)

    def adopt(self, pages: list[int]) -> None:
        """One more owner for kept pages, idle or not."""
        for page in pages:
            assert page in self._kept
            self._idle.pop(page, None)
            self._owners[page] += 1

    def can_fork(self, tokens: int) -> bool:
        """Whether there is a page for the copy that a fork at ``tokens`` may need."""
        return tokens % self.page_size == 0 or self.num_free > 0

    def fork(self, pages: list[int], tokens: int) -> tuple[list[int], tuple[int, int] | None]:
        """Pages for a second sequence with the same first ``tokens`` tokens.

        Full pages are shared; returned beside them: (from, to) of the partial page that the caller
        must copy, if there is one.
        """
        full = tokens // self.page_size
        shared = pages[:full]
        for page in shared:
            self._owners[page] += 1
        if tokens % self.page_size == 0:
            return shared, None
        self.grow(shared, tokens)
        self._fresh.remove(shared[full])  # the copy overwrites it
        return shared, (pages[full], shared[full])

    def owners(self, page: int) -> int:
        return self._owners[page]

    def _release(self, page: int) -> None:
        assert self._owners[page] > 0
        self._owners[page] -= 1
        if self._owners[page] == 0:
            if page in self._kept:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def _evict(self) -> int:
        """Take the page that has been idle longest."""
        page = next(iter(self._idle))
        del self._idle[page]
        self._kept.discard(page)
        self.on_evict(page)
        return page
