"""What every pass needs to know of the running sequences, in arrays. Host only.

Each running sequence has a row, from its start to its end or preemption; whatever draws up, packs
or commits a pass reads and writes columns of many rows at once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from tinyspec.scheduler.columns import Array as Array
from tinyspec.scheduler.columns import Columns

# Rows, tokens, pages and stop tokens that there is room for at first; each doubles when it is full.
FIRST_ROWS, FIRST_TOKENS, FIRST_PAGES, FIRST_STOPS, NO_STOP = 16, 64, 4, 1, -1


class SequenceTable(Columns):
    """The running sequences, a row for each.

    ids [R, W] int64: committed tokens, then drafts. logprobs [R, W] fp32: of the token in its
    place. pages [R, P] int32: the page table, 0 after the last page. stops [R, K] int64: stop
    tokens, filled up with -1. sequences: of each row, None where it is free.
    """

    def __init__(self) -> None:
        self.sequences: list[Any] = []
        self._free: list[int] = []
        self._rows: Array | None = None
        self._any: dict[str, bool] = {}
        self.stays = 0
        self.ahead = False  # as it will be once a pass under way is committed
        self._columns: dict[str, Any] = {
            **dict.fromkeys(self._FLAGS, np.bool_),
            **dict.fromkeys(self._REALS, np.float64),
            **dict.fromkeys((*self._COUNTS, *self.STATS), np.int64),
        }
        for name, kind in self._columns.items():
            setattr(self, name, np.zeros(0, kind))
        self.ids: Array = np.zeros((0, FIRST_TOKENS), np.int64)
        self.logprobs: Array = np.zeros((0, FIRST_TOKENS), np.float32)
        self.pages: Array = np.zeros((0, FIRST_PAGES), np.int32)
        self.stops: Array = np.zeros((0, FIRST_STOPS), np.int64)

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def rows(self) -> Array:
        """The rows in use, in order of arrival."""
        if self._rows is None:
            used = np.flatnonzero(self.used)
            self._rows = used[np.argsort(self.order[used])]
        return self._rows

    def any(self, name: str) -> bool:
        """Whether ``name``, a column of what a sequence is, is not 0 for some of them."""
        if name not in self._any:
            assert name in self._FIXED, name
            self._any[name] = bool(getattr(self, name)[self.rows].any())
        return self._any[name]

    def places(self, name: str, rows: Array) -> list[int]:
        """Places of those of ``rows`` [n] where the column ``name`` of ``any`` is not 0."""
        if not self.any(name):
            return []
        found: list[int] = getattr(self, name)[rows].nonzero()[0].tolist()
        return found

    def add(self, sequence: Any, **columns: Any) -> int:
        """A row for a sequence with these ``columns``, zero in every other and without pages."""
        assert columns.keys() <= self._columns.keys(), columns
        if not self._free:
            self._add_rows(max(FIRST_ROWS, len(self.sequences)))
        row = heappop(self._free)  # the lowest, so that few are ever in passes
        self.stays += 1
        columns |= {"used": True, "entry": self.stays}
        self.sequences[row] = sequence
        for name in self._columns:
            getattr(self, name)[row] = columns.get(name, 0)
        self.pages[row] = 0
        self._changed()
        return row

    def remove(self, row: int) -> None:
        """Free a row."""
        self.sequences[row], self.used[row], self.entry[row] = None, False, 0
        heappush(self._free, row)
        self._changed()

    def _changed(self) -> None:
        """Other rows are in use."""
        self._rows = None
        self._any = {}

    def set_ids(self, row: int, first: int, ids: list[int]) -> None:
        """Write tokens from place ``first`` on."""
        self.make_room(first + len(ids))
        self.ids[row, first : first + len(ids)] = ids

    def set_pages(self, row: int, pages: list[int]) -> None:
        """Write a sequence's page table, after its pages changed."""
        if len(pages) > self.pages.shape[1]:
            self.pages = _wider(self.pages, len(pages))
        before, count = int(self.num_pages[row]), len(pages)
        self.pages[row, :count] = pages
        self.pages[row, count:before] = 0
        self.num_pages[row] = count

    def set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        """Write a sequence's stop tokens."""
        if len(stops) > self.stops.shape[1]:
            before = self.stops.shape[1]
            self.stops = _wider(self.stops, len(stops))
            self.stops[:, before:] = NO_STOP
        self.stops[row] = NO_STOP
        self.stops[row, : len(stops)] = stops

    def by_priority(self, rows: Array) -> Array:
        """Places of ``rows`` [n] in the order in which they get pages: deterministic before plain,
        each in order of arrival."""
        return np.lexsort((self.order[rows], ~self.deterministic[rows]))

    def make_room(self, tokens: int) -> None:
        """Room for so many tokens in every row."""
        if tokens > self.ids.shape[1]:
            self._resize(len(self.ids), max(tokens, 2 * self.ids.shape[1]))

    def _resize(self, rows: int, tokens: int) -> None:
        """Other arrays of tokens and log-probabilities, with room for all there is."""
        ids, logprobs = np.zeros((rows, tokens), np.int64), np.zeros((rows, tokens), np.float32)
        for row in self.rows:  # what is never written takes no memory
            end = self.length[row] + self.num_drafts[row]
            ids[row, :end] = self.ids[row, :end]
            logprobs[row, :end] = self.logprobs[row, :end]
        self.ids, self.logprobs = ids, logprobs

    def pending(self, rows: Array) -> Array:
        """[n]: committed tokens whose KV is not final: 1 while decoding, more during the prompt."""
        return self.length[rows] - self.computed[rows]

    def runnable(self, rows: Array) -> Array:
        """[n]: positions that may be in the next pass, drafts included: of a prompt that is thought
        about not those behind the chunks that wait for a thought."""
        counts: Array = self.length[rows] + self.num_drafts[rows] - self.computed[rows]
        if self.any("thinking"):
            held = self.unthought[rows] > 0
            counts[held] = np.minimum(counts, self.reach[rows] - self.computed[rows])[held]
        return counts

    def draft_limits(self, rows: Array) -> Array:
        """[n]: drafts that may wait before a verify."""
        limits = np.minimum(self.window[rows], self.most[rows] - self.length[rows] - 1)
        return np.where(self.draft_free[rows], 0, limits)

    def drafts_are_full(self, rows: Array) -> Array:
        """[n] bool: whether no further draft may wait, or the drafter has ended them."""
        if not len(rows):
            return np.zeros(0, np.bool_)
        ended = self.proposed[rows] | self.draft_ended[rows]
        return ended | (self.num_drafts[rows] >= self.draft_limits(rows))

    def commit(self, rows: Array, counts: Array, tokens: Array) -> None:
        """Append the first ``counts`` [n] of ``tokens`` [n, W] to each of ``rows`` [n].

        A draft in the place of a token is replaced by it; those behind stay in their places.
        """
        if not len(rows):
            return
        starts = self.length[rows]
        ends = starts + counts
        self.make_room(highest(ends))
        _write(self.ids, rows, starts, counts, tokens)
        self.length[rows] = ends

    def write_logprobs(self, rows: Array, starts: Array, counts: Array, values: Array) -> None:
        """The first ``counts`` [n] of ``values`` [n, W] for the tokens from ``starts`` [n] on."""
        wanted = self.logprobs_wanted[rows]
        _write(self.logprobs, *(x[wanted] for x in (rows, starts, counts, values)))

    def stops_at(self, rows: Array, tokens: Array) -> Array:
        """[n] bool: which of ``tokens`` [n] end their sequences."""
        equal = self.stops[rows] == tokens[:, None]
        return equal[:, 0] if equal.shape[1] == 1 else equal.any(1)

    def fills_page(self, rows: Array, page_size: int) -> Array:
        """[n] bool: whether pages have filled up with final KV that the prefix cache has not
        seen."""
        return self.computed[rows] // page_size > self.indexed[rows]

    def draft(self, rows: Array, tokens: Array) -> None:
        """One more draft for each of ``rows`` [n]; none where the token is negative, which ends
        its drafts as a stop token does."""
        places = self.length[rows] + self.num_drafts[rows]
        self.make_room(int(places.max(initial=-1)) + 1)
        self.draft_ended[rows] = (tokens < 0) | self.stops_at(rows, tokens)
        found = tokens >= 0
        rows = rows[found]
        self.ids[rows, places[found]] = tokens[found]
        self.num_drafts[rows] += 1
        self.drafted[rows] += 1

    def settle(self, rows: Array) -> None:
        """After a commit: all KV before the newest token is final."""
        computed = self.length[rows] - 1
        self.computed[rows] = computed
        canonical = np.minimum(self.canonical[rows], computed)
        if self.any("deterministic"):
            canonical = np.where(self.deterministic[rows], computed, canonical)
        self.canonical[rows] = canonical

    def advance(self, rows: Array, ends: Array, canonical: bool) -> None:
        """Positions up to ``ends`` [n] have run; drafts among them are not final."""
        before = self.computed[rows]
        computed = np.minimum(ends, self.length[rows])
        self.computed[rows] = computed
        if canonical:
            whole = self.canonical[rows] >= before
            self.canonical[rows] = np.where(whole, computed, self.canonical[rows])

    def _add_rows(self, more: int) -> None:
        first = len(self.sequences)
        for name, kind in self._columns.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, kind)]))
        self._resize(first + more, self.ids.shape[1])
        for name in ("pages", "stops"):
            before: Array = getattr(self, name)
            after = np.zeros((first + more, before.shape[1]), before.dtype)
            after[:first] = before
            setattr(self, name, after)
        self.sequences += [None] * more
        self._free += range(first, first + more)


def highest(values: Array) -> int:
    """The highest of ``values`` [n], n > 0: for few of them in a third of the time of ``max``."""
    return int(values[values.argmax()])


def _write(matrix: Array, rows: Array, starts: Array, counts: Array, values: Array) -> None:
    """The first ``counts`` [n] of ``values`` [n, W] into ``rows`` [n], from ``starts`` [n] on."""
    if values.shape[1] == 1:
        matrix[rows, starts] = values[:, 0]
        return
    row, column = np.nonzero(np.arange(values.shape[1]) < counts[:, None])
    matrix[rows[row], starts[row] + column] = values[row, column]


def _wider(before: Array, width: int) -> Array:
    """``before`` with at least ``width`` columns, the new ones 0."""
    after = np.zeros((len(before), max(width, 2 * before.shape[1])), before.dtype)
    after[:, : before.shape[1]] = before
    return after
