"""The row counts that a pass may have, and which of them are canonical. Host only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import inf

from tinyspec.config import EngineConfig

# On a CPU, of the buckets with more rows than this only the largest is probed, to save time.
CPU_PROBED_ROWS, CPU_MOST_PROBED_ROWS = 512, 1024


def row_counts(most: int) -> list[int]:
    """1, 2, multiples of 4, and from 16 on four steps to every doubling, up to ``most``."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        counts.append(counts[-1] + max(4, 1 << (counts[-1].bit_length() - 3)))
    return [c for c in counts if c < most] + [most]


def probed_rows(config: EngineConfig, device_type: str) -> list[int]:
    """The row counts that a canonical pass may have; ``config`` is resolved."""
    assert config.max_rows and config.reference_rows
    if device_type != "cpu":
        return row_counts(config.max_rows)
    most = max(CPU_PROBED_ROWS, config.reference_rows, config.max_sequences)
    counts = row_counts(min(most, config.max_rows))
    return sorted({*counts, min(max(CPU_MOST_PROBED_ROWS, most), config.max_rows)})


def between(cost: Mapping[int, float], rows: int) -> float:
    """Seconds of ``rows`` rows, interpolated in ``cost``; beyond its largest, in proportion."""
    low = max((size for size in cost if size <= rows), default=min(cost))
    high = min((size for size in cost if size >= rows), default=None)
    if high is None:
        return cost[low] * rows / low
    share = (rows - low) / (high - low) if high > low else 0.0
    return cost[low] + share * (cost[high] - cost[low])


class Buckets:
    """Buckets up to ``max_rows``; ``reference`` is one of them and defines canonical results.

    sizes: the ``probed`` ones (default: all); only these can be canonical. Which are, and what a
    pass in each costs, is unknown before ``learn``; what was not measured is estimated from what
    was. wanted: rows of deterministic requests that the last pass was planned for.
    """

    def __init__(self, max_rows: int, reference: int, probed: Iterable[int] | None = None):
        self.sizes = sorted({*(row_counts(max_rows) if probed is None else probed), reference})
        assert self.sizes[-1] <= max_rows
        self._all = sorted({*self.sizes, *row_counts(max_rows)})
        self.reference = reference
        self.canonical: list[int] = []
        self._seconds: dict[int, float] = {}
        self._tiled: dict[int, float] = {}
        self.wanted = 0

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> Buckets:
        """The buckets of an engine; ``config`` is resolved."""
        assert config.max_rows and config.reference_rows
        return cls(config.max_rows, config.reference_rows, probed_rows(config, device_type))

    def learn(
        self,
        canonical: Iterable[int],
        seconds: Mapping[int, float],
        tiled: Mapping[int, float] | None = None,
    ) -> None:
        """Set what was probed: the canonical buckets, and seconds of a pass by bucket.

        tiled: seconds of the canonical buckets in which linears must run in tiles of rows.
        """
        self.canonical = sorted(canonical)
        # Computed here, as every step looks it up.
        self._seconds = {rows: between(seconds, rows) for rows in self._all} if seconds else {}
        self._tiled = dict(tiled or {})
        assert self.reference in self.canonical and set(self.canonical) <= set(self.sizes)
        assert set(self._tiled) <= set(self.canonical)
        # Tiles that cost more than a larger bucket are not used.
        for size in sorted(self._tiled.keys() - {self.reference}):
            larger = (self.canonical_seconds(other) for other in self.canonical if other > size)
            if min(larger, default=inf) <= self._tiled[size]:
                self.canonical.remove(size)

    def forget(self) -> None:
        """No bucket is canonical any more: weights or device changed."""
        self.canonical = []

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

    def cheapest(self, least: int, wanted: int, proposed: int, accepted: float) -> int:
        """The canonical bucket for at least ``least`` of ``wanted`` rows that costs least per row;
        of equal ones the largest. Where rows are left over, their sequences end a pass later: the
        cost of the smallest bucket is added.

        proposed: further rows, of which the share ``accepted`` is useful.
        """
        self.wanted = wanted
        low = self.fit_canonical(max(least, 1))
        high = self.fit_canonical(min(max(wanted + proposed, 1), self.canonical[-1]))
        if low == high:
            return low

        def cost(size: int) -> tuple[float, int]:
            useful = min(size, wanted) + accepted * min(max(size - wanted, 0), proposed)
            later = self.canonical_seconds(self.canonical[0]) if size < wanted else 0.0
            return (self.canonical_seconds(size) + later) / useful, -size

        return min((size for size in self.canonical if low <= size <= high), key=cost)

    def is_canonical(self, bucket: int) -> bool:
        """Whether every pass in ``bucket`` is canonical, without tiles."""
        return bucket in self.canonical and bucket not in self._tiled

    def seconds(self, bucket: int) -> float:
        """What a pass in ``bucket`` costs; its rows, if nothing was measured."""
        return self._seconds.get(bucket, float(bucket))

    def canonical_seconds(self, bucket: int) -> float:
        """What a canonical pass in ``bucket`` costs, with tiles if it needs them."""
        return self._tiled.get(bucket, self.seconds(bucket))

    def padded_is_cheaper(self, rows: int, drafting: int, window: int) -> bool:
        """Whether padding ``rows`` rows to a canonical bucket costs less per token than drafting
        and verifying them.

        drafting: how many rows are of deterministic sequences, which would draft ``window`` tokens,
        one a pass, and verify them in canonical passes that the other rows share; each window
        yields one token more.
        """
        assert 0 <= drafting <= rows and window >= 0, (rows, drafting, window)
        self.wanted = rows
        capacity = self.canonical[-1]
        if rows > capacity:
            return False
        if self.is_canonical(self.fit(rows)):  # nothing to verify
            return True
        padded = self.canonical_seconds(self.fit_canonical(rows))
        verified = drafting * (window + 1) + rows - drafting
        passes = -(-verified // capacity)
        verify = passes * self.canonical_seconds(self.fit_canonical(min(verified, capacity)))
        drafts = window * self.seconds(self.fit(rows))
        return padded <= (drafts + verify) / (window + 1)
