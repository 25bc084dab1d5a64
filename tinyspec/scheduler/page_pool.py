"""The page pool's bookkeeping: who holds which page. Host only; knows no tensor and no token.

A page may have several owners, after a fork or by a prefix that they share; it is then read-only,
and given back with its last owner. A page that the prefix cache keeps goes idle instead: free to be
taken, least recently used first, once no other is.

The lowest free pages go first, which keeps those in use dense. Behind a sequence's page as many are
put aside as it may come to need: what lies in a run can be read at one stretch. A page put aside is
free all the same, and taken by others before any is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

# Pages of one run at most; as many again are passed over in search of one.
LONGEST_RUN = 64


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, ``num_held`` of them owned."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_held = 0
        self._owners = [0] * num_pages
        self._free = list(range(num_pages))
        # How many pages are put aside behind a page, the last that its sequence has.
        self._aside: dict[int, int] = {}
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
        return self.num_pages - self.num_held

    def num_idle(self, pages: list[int]) -> int:
        """How many of ``pages`` nobody owns."""
        return sum(page in self._idle for page in pages)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def can_grow(self, pages: list[int], tokens: int) -> bool:
        """Whether ``grow`` would succeed."""
        return self.pages_for(tokens) - len(pages) <= self.num_free

    def grow(self, pages: list[int], tokens: int, most: int = 0) -> None:
        """Append pages until ``pages`` holds ``tokens`` tokens, of ``most`` that it may come to."""
        assert self.can_grow(pages, tokens)
        whole = self.pages_for(max(tokens, most))
        while len(pages) < self.pages_for(tokens):
            page = self._next(pages, whole - len(pages))
            assert self._owners[page] == 0
            self._own(page)
            self._fresh.append(page)
            pages.append(page)

    def _own(self, page: int) -> None:
        self.num_held += self._owners[page] == 0
        self._owners[page] += 1

    def _next(self, pages: list[int], wanted: int) -> int:
        """The page put aside for ``pages``; else the first of a run of ``wanted``, the rest put
        aside; else any that is free; else from what is put aside for another, half of it at most.
        """
        last = pages[-1] if pages else -1
        if last in self._aside:
            return self._set_aside(last + 1, self._aside.pop(last) - 1)
        run = self._run(wanted)
        if run:
            return self._set_aside(run[0], len(run) - 1)
        if self._free:
            return heapq.heappop(self._free)
        if self._aside:
            last, count = self._aside.popitem()
            taken = min(wanted, -(-count // 2))
            self._set_aside(last, count - taken)
            return self._set_aside(last + 1 + count - taken, taken - 1)
        return self._evict()

    def _set_aside(self, page: int, count: int) -> int:
        """Put ``count`` pages behind ``page`` aside; returns ``page``."""
        if count:
            self._aside[page] = count
        return page

    def _run(self, wanted: int) -> list[int]:
        """Take the lowest run of so many free pages; none where it takes long to find."""
        length = min(wanted, LONGEST_RUN)
        run: list[int] = []
        passed: list[int] = []
        for _ in range(min(len(self._free), length + LONGEST_RUN)):
            page = heapq.heappop(self._free)
            if run and page != run[-1] + 1:
                passed += run
                run = []
            run.append(page)
            if len(run) == length:
                break
        else:
            passed, run = passed + run, []
        for page in passed:
            heapq.heappush(self._free, page)
        return run

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
            self._own(page)

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
            self._own(page)
        if tokens % self.page_size == 0:
            return shared, None
        self.grow(shared, tokens)
        self._fresh.remove(shared[full])  # the copy overwrites it
        return shared, (pages[full], shared[full])

    def owners(self, page: int) -> int:
        return self._owners[page]

    def _release(self, page: int) -> None:
        assert self._owners[page] > 0
        for put in range(page + 1, page + 1 + self._aside.pop(page, 0)):
            heapq.heappush(self._free, put)
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self.num_held -= 1
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
