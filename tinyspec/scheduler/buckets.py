"""The row counts that a pass may have, which of them are canonical, what passes cost, and how the
next tokens of deterministic sequences are computed. Host only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf

import numpy as np

from tinyspec.config import EngineConfig

# The row counts that may be canonical, by device kind; of others a GPU's.
LADDER = {
    "cpu": (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048),
    "cuda": (8, 32, 128, 256, 512, 2048),
}
# More sequences than these have a bucket of their own, in which all decode at once.
MANY = 1024
# Of a pass's cost so much grows with its rows, where nothing tells more.
GROWS = 0.5
# A pass that is slower than its kind counts for so much, and at most for twice what that costs; a
# faster one for so much. Of the first few the fastest counts. Of what it changes, so much is its
# kind's own, the rest the pace of all: what else a machine does slows down whichever kind runs, and
# one that does not run would be taken for the faster one meanwhile, and for the slower one later.
SLOWER, FASTER, FIRST, OWN = 1 / 32, 1 / 2, 3, 1 / 8
# What is believed of a pass beyond what those of other buckets allow, where none in its own has run
# for so many passes.
MORE, STALE = 1 / 16, 64
# Drafts that wait before a verify where ``EngineConfig.draft_window`` leaves that open.
MOST_DRAFTS = 16
# Windows that are weighed beside those that fill a canonical bucket.
WINDOWS = (1, 2, 4, 8)


def row_counts(most: int) -> list[int]:
    """1, 2, multiples of 4, and from 16 on four steps to every doubling, up to ``most``."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        counts.append(counts[-1] + max(4, 1 << (counts[-1].bit_length() - 3)))
    return [c for c in counts if c < most] + [most]


def ladder(config: EngineConfig, device_type: str) -> list[int]:
    """The row counts that a canonical pass may have; ``config`` is resolved."""
    most, reference = config.max_rows, config.reference_rows
    assert most and reference
    sizes = LADDER.get(device_type, LADDER["cuda"])
    found = {reference, *(min(size, most) for size in sizes)}
    if config.max_sequences > MANY:
        found.add(min(config.max_sequences, most))
    return sorted(found)


def of_kind(costs: Mapping[bool, Mapping[int, float]], canonical: bool) -> Mapping[int, float]:
    """By bucket, what passes of a kind cost, or else all. costs: of passes that run another way
    than fast mode (True), and of others."""
    fast, own = costs[False], costs[True]
    return {**fast, **own} if canonical else fast or own


def estimate(costs: Mapping[int, float], rows: int) -> float:
    """Seconds of ``rows`` rows between the nearest that are known; smaller or larger than all, half
    of the nearest one's grow with the rows."""
    if not costs:
        return float(rows)
    sizes = sorted(costs)
    nearest = min(max(rows, sizes[0]), sizes[-1])
    seconds = float(np.interp(nearest, sizes, [costs[size] for size in sizes]))
    return seconds * (1 - GROWS + GROWS * rows / nearest)


class Buckets:
    """Buckets up to ``max_rows``; ``reference`` is one of them and defines canonical results.

    sizes: the ladder (default: all); only these can be canonical. Which are is unknown before
    ``learn``. wanted: rows that the last pass with deterministic requests was planned for, and how
    many of them are sequences that can draft.
    """

    def __init__(self, max_rows: int, reference: int, sizes: Iterable[int] | None = None):
        self.sizes = sorted({*(row_counts(max_rows) if sizes is None else sizes), reference})
        self._all = sorted({*self.sizes, *row_counts(max_rows)})
        self.reference = reference
        self.canonical: list[int] = []
        self._own_way: set[int] = set()
        # Of all seconds here.
        self._pace = 1.0
        self._costs: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._bounds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._guesses: dict[tuple[int, bool], float] = {}
        # Of each kind since its cost was set, all of them, and how many that was at its latest.
        self._passes: Counter[tuple[int, bool]] = Counter()
        self._count = 0
        self._latest: dict[tuple[int, bool], int] = {}
        self.wanted = (0, 0)

    def learn(
        self,
        canonical: Iterable[int],
        seconds: Mapping[int, float] | None = None,
        own_way: Iterable[int] = (),
    ) -> None:
        """Set what was proven: the canonical buckets, and those of them whose canonical passes run
        another way than fast mode. seconds: of canonical passes, where none has run yet."""
        self.canonical, self._own_way = sorted(canonical), set(own_way)
        assert self.reference in self.canonical and set(self.canonical) <= set(self.sizes)
        for rows, cost in (seconds or {}).items():
            self._costs[rows in self._own_way].setdefault(rows, cost / self._pace)
        for own, costs in self._costs.items():
            for rows in costs:
                self._bound_others(rows, own)
        self._guesses = {}

    def forget(self) -> None:
        """No bucket is canonical any more: weights or device changed."""
        self.canonical, self._own_way = [], set()

    def ran(self, bucket: int, canonical: bool, seconds: float, settled: bool = True) -> None:
        """A pass took so long. Not ``settled``: the next ones of its shape take less."""
        own = canonical and bucket in self._own_way
        costs, kind = self._costs[own], (bucket, own)
        seconds = max(seconds, 1e-9) / self._pace
        if not settled:
            if seconds < self._bounds[own].get(bucket, inf):
                self._bounds[own][bucket] = seconds
                self._guesses = {}
            return
        self._passes[kind] += 1
        self._count += 1
        before, number = costs.get(bucket, seconds), self._passes[kind]
        if number == 1:  # what a proof's passes took, if anything is known, left some out
            self._guesses = {}
            costs[bucket] = seconds
        elif number <= FIRST:
            costs[bucket] = min(seconds, before)
        else:
            part = SLOWER if seconds > before else FASTER
            change = 1 + part * (min(seconds / before, 2) - 1)
            costs[bucket] *= change**OWN
            self._pace *= change ** (1 - OWN)
        self._latest[kind] = self._count
        self._bound_others(bucket, own)

    def _bound_others(self, rows: int, own: bool) -> None:
        """Passes of fewer rows take no longer than those of ``rows``, of more rows no longer a row,
        but for MORE. Where costs of buckets that have not run for STALE passes say so, they are of
        a time when the machine was slower, and no pass would tell: other buckets are chosen."""
        costs = self._costs[own]
        for other, cost in costs.items():
            most = (1 + MORE) * costs[rows] * max(1.0, other / rows)
            if cost > most and self._count - self._latest.get((other, own), -STALE) >= STALE:
                costs[other] = most
                self._passes[other, own] = 0  # its next pass tells

    @property
    def largest(self) -> int:
        return self._all[-1]

    def fit(self, rows: int) -> int:
        """The smallest bucket that holds ``rows`` rows."""
        assert 0 < rows <= self.largest, rows
        return self._all[bisect_left(self._all, rows)]

    def fit_canonical(self, rows: int) -> int:
        """The smallest canonical bucket that holds ``rows`` rows."""
        assert 0 < rows <= self.canonical[-1], rows
        return self.canonical[bisect_left(self.canonical, rows)]

    def cheapest(self, least: int, wanted: int) -> int:
        """The canonical bucket for at least ``least`` of ``wanted`` rows that costs least per row;
        of equal ones the largest. Where rows are left over, their sequences end a pass later: the
        cost of the smallest bucket is added."""
        self.wanted = (wanted, 0)
        low = self.fit_canonical(max(least, 1))
        high = self.fit_canonical(min(max(wanted, 1), self.canonical[-1]))
        if low == high:
            return low

        def cost(size: int) -> tuple[float, int]:
            later = self.seconds(self.canonical[0], True) if size < wanted else 0.0
            return (self.seconds(size, True) + later) / min(size, wanted), -size

        return min((size for size in self.canonical if low <= size <= high), key=cost)

    def is_canonical(self, bucket: int) -> bool:
        """Whether every pass in ``bucket`` is canonical, fast ones too."""
        return bucket in self.canonical and bucket not in self._own_way

    def seconds(self, bucket: int, canonical: bool = False) -> float:
        """What a pass in ``bucket`` costs; canonical: a canonical one, whether or not it is known
        to be one. A guess from passes of the same kind, or else from all, where none has run; no
        more than passes took that were not settled."""
        kind = canonical and bucket in self._own_way
        known = self._costs[kind].get(bucket)
        if known is not None:
            return known * self._pace
        key = bucket, canonical
        if key not in self._guesses:
            costs = of_kind(self._costs, canonical) or of_kind(self._bounds, canonical)
            bound = self._bounds[kind].get(bucket, inf)
            self._guesses[key] = min(estimate(costs, bucket), bound)
        return self._guesses[key] * self._pace

    def window(
        self, rows: int, drafting: int, most: int, accepted: float, free: bool = True
    ) -> int:
        """How many tokens each of ``drafting`` deterministic sequences should draft before they are
        verified; 0: none, their rows are padded to a canonical bucket. ``rows``: of a pass, plain
        ones among them. most: drafts that may wait; not ``free``: that or none. accepted: chance
        that a draft is, if those before it were; less than 1."""
        assert 0 <= drafting <= rows and most >= 0, (rows, drafting, most)
        self.wanted = rows, drafting
        if rows <= self.canonical[-1] and self.is_canonical(self.fit(rows)):
            return 0  # nothing to verify
        return self.cheapest_way(self.canonical, rows, drafting, most, accepted, free)[1]

    def cheapest_way(
        self,
        canonical: list[int],
        rows: int,
        drafting: int,
        most: int,
        accepted: float,
        free: bool = True,
    ) -> tuple[float, int]:
        """Seconds for a committed token, and the window, were these buckets canonical."""
        capacity, plain = canonical[-1], rows - drafting
        ways = [(self.canonical_cost(canonical, rows) / rows, 0)]
        if not most or not drafting:
            return ways[0]
        if rows > capacity:
            ways = []
        windows = {most}
        if free:
            filled = ((size - plain) // drafting - 1 for size in canonical)
            windows = {w for w in (most, *WINDOWS, *filled) if 0 < w <= most}
        fast = self.seconds(self.fit(rows))
        for window in windows:
            verified = drafting * (window + 1) + plain
            cost = window * fast + self.canonical_cost(canonical, verified)
            passes = window + -(-verified // capacity)
            each = (1 - accepted ** (window + 1)) / (1 - accepted)
            ways.append((cost / (drafting * each + plain * passes), window))
        return min(ways)

    def canonical_cost(self, canonical: list[int], rows: int) -> float:
        """Seconds of the canonical passes that hold ``rows`` rows."""
        whole, rest = divmod(rows, canonical[-1])
        cost = whole * self.seconds(canonical[-1], True)
        if rest:
            cost += self.seconds(canonical[bisect_left(canonical, rest)], True)
        return cost

    def gains(self, sizes: Iterable[int], most: int, accepted: float) -> dict[int, float]:
        """By each of ``sizes``, seconds that the last pass would have saved were it canonical too;
        without those that would have saved none."""
        rows, drafting = self.wanted
        self.wanted = (0, 0)
        found: dict[int, float] = {}
        if not rows or not self.canonical:
            return found
        now = self.cheapest_way(self.canonical, rows, drafting, most, accepted)[0]
        for size in sizes:
            canonical = sorted((*self.canonical, size))
            then = self.cheapest_way(canonical, rows, drafting, most, accepted)[0]
            if then < now:
                found[size] = (now - then) * min(rows, self.canonical[-1])
        return found
