"""The row counts that a pass may have, and which of them are canonical. Host only."""

from __future__ import annotations

from bisect import bisect_left


def row_counts(most: int) -> list[int]:
    """1, 2, multiples of 4, and from 16 on four steps to every doubling, up to ``most``."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        counts.append(counts[-1] + max(4, 1 << (counts[-1].bit_length() - 3)))
    return [c for c in counts if c < most] + [most]


class Buckets:
    """Buckets up to ``max_rows``; ``reference`` is one of them and defines canonical results."""

    def __init__(self, max_rows: int, reference: int):
        assert reference <= max_rows
        self.sizes = sorted({*row_counts(max_rows), reference})
        self.reference = reference

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, rows: int) -> int:
        """The smallest bucket that holds ``rows`` rows."""
        assert 0 < rows <= self.largest, rows
        return self.sizes[bisect_left(self.sizes, rows)]

    def is_canonical(self, bucket: int) -> bool:
        """Whether rows of a pass in ``bucket`` are canonical."""
        return bucket == self.reference
