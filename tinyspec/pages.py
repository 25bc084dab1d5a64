"""The page pool's bookkeeping: who holds which page. Host only; knows no tensor and no token.

A page may have several owners after a fork; it is then read-only, and given back with its last
owner. The lowest free page is always handed out first, which keeps the pages in use dense.
"""

from __future__ import annotations

import heapq


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = [0] * num_pages
        self._free = list(range(num_pages))
        self._fresh: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def can_grow(self, pages: list[int], tokens: int) -> bool:
        """Whether ``grow`` would succeed."""
        return self.pages_for(tokens) - len(pages) <= len(self._free)

    def grow(self, pages: list[int], tokens: int) -> None:
        """Append pages until ``pages`` holds ``tokens`` tokens."""
        assert self.can_grow(pages, tokens)
        while len(pages) < self.pages_for(tokens):
            page = heapq.heappop(self._free)
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

    def can_fork(self, tokens: int) -> bool:
        """Whether there is a page for the copy that a fork at ``tokens`` may need."""
        return tokens % self.page_size == 0 or bool(self._free)

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
            heapq.heappush(self._free, page)
