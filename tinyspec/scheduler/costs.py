"""What passes cost, by their rows and kind, and how often drafts of one source are right: learnt
from the last ones that ran. Host only."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf
from time import perf_counter, process_time

# Passes of a row count that are kept, and passes of any since which one counts: what ran longer ago
# may have run in another time.
KEPT, RECENT = 9, 64
# Of a pass's cost so much grows with its rows, where nothing tells more.
GROWS = 0.5
# Drafts that count, the latest most, as other requests may have others.
REMEMBERED = 200.0
# However many drafts in a row were accepted, the next one may not be.
SUREST = 1 - 1e-6


def clocks() -> tuple[float, float]:
    """Seconds now, on the wall and of this process."""
    return perf_counter(), process_time()


def charged_since(began: tuple[float, float], device_type: str) -> float:
    """Seconds since these ``clocks``: a CPU is not charged with waiting for another process."""
    seconds, of_process = (now - then for now, then in zip(clocks(), began, strict=True))
    return min(seconds, of_process) if device_type == "cpu" else seconds


class PassCosts:
    """Seconds of a pass: of either kind one function of its rows that never falls, nor rises faster
    than they do. ``apart``: of canonical passes that run another way than plain ones."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[tuple[int, bool], float] = {}
        self._at: dict[tuple[int, bool], int] = {}
        # What those of a kind that have not settled yet take at most.
        self._bounds: dict[tuple[int, bool], float] = {}
        self._number = 0
        self._fitted: dict[bool, tuple[list[int], list[float]]] = {}
        self._told: dict[tuple[int, bool], float] = {}

    def add(self, rows: int, apart: bool, seconds: float, settled: bool = True) -> None:
        """A pass took so long. Not ``settled``: the next ones of its shape take no longer, and may
        take less."""
        key, seconds = (rows, apart), max(seconds, 1e-9)
        self._fitted, self._told = {}, {}
        if not settled:
            self._bounds[key] = min(seconds, self._bounds.get(key, inf))
            return
        self._number += 1
        last = self._last.setdefault(key, deque(maxlen=KEPT))
        if self._number - self._at.get(key, 0) > RECENT:
            last.clear()
        last.append(seconds)
        self._medians[key] = sorted(last)[(len(last) - 1) // 2]
        self._at[key] = self._number

    @property
    def known(self) -> bool:
        """Whether any pass has told what it costs."""
        return bool(self._last or self._bounds)

    def seconds(self, rows: int, apart: bool) -> float:
        """What a pass costs: between row counts that ran, in proportion; beyond them half of the
        nearest one's grow with the rows. No more than passes of these rows took, where none ran of
        late: if they take longer now, the next one tells."""
        if (key := (rows, apart)) in self._told:
            return self._told[key]
        if apart not in self._fitted:
            self._fitted[apart] = self._fit(apart)
        sizes, costs = self._fitted[apart]
        if not sizes:
            return float(rows)
        place = bisect_left(sizes, rows)
        if 0 < place < len(sizes):
            (low, high), (less, more) = sizes[place - 1 : place + 1], costs[place - 1 : place + 1]
            found = less + (more - less) * (rows - low) / (high - low)
        else:
            nearest = min(place, len(sizes) - 1)
            found = costs[nearest] * (1 - GROWS + GROWS * rows / sizes[nearest])
        if self._number - self._at.get(key, -RECENT) >= RECENT:
            found = min(found, self._medians.get(key, inf), self._bounds.get(key, inf))
        self._told[key] = found
        return found

    def _fit(self, apart: bool) -> tuple[list[int], list[float]]:
        """Row counts in order, and their costs: medians of the last passes, where none of the kind
        ran the other's; no more than more rows cost, nor than fewer rows cost a row."""
        oldest = self._number - RECENT
        recent = [(*key, x) for key, x in self._medians.items() if self._at[key] > oldest]
        recent = recent or [(*key, x) for key, x in self._bounds.items()]
        costs = {rows: cost for rows, own, cost in recent if own != apart}
        costs |= {rows: cost for rows, own, cost in recent if own == apart}
        sizes, most, each = sorted(costs), inf, inf
        for rows in reversed(sizes):
            most = costs[rows] = min(costs[rows], most)
        for rows in sizes:
            each = min(each, costs[rows] / rows)
            costs[rows] = min(costs[rows], each * rows)
        return sizes, [costs[rows] for rows in sizes]


class Acceptance:
    """good, bad: drafts that were accepted, and sequences with one that was not; at first what
    ``begins`` says."""

    def __init__(self, begins: tuple[float, float]):
        self._most = sum(begins)
        self.good, self.bad = begins

    def observe(self, accepted: int, rejected: int) -> None:
        """A pass verified drafts: so many were accepted, and so many sequences had one that was
        not."""
        good, bad = self.good + accepted, self.bad + rejected
        part = min(1.0, REMEMBERED / (good + bad))
        self.good, self.bad = good * part, bad * part

    def chance(self, accepted: int = 0, rejected: int = 0) -> float:
        """That a draft is accepted, if those before it were, less than 1: where so many of some
        sequences' own were, beside no more of all than it began with."""
        part = min(1.0, self._most / (self.good + self.bad))
        good, bad = self.good * part + accepted, self.bad * part + rejected
        return min(good / (good + bad), SUREST)
