"""The row counts that a pass may have, which of them are canonical, and how the next tokens of
deterministic sequences are computed. Host only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from tinyspec.config import EngineConfig
from tinyspec.scheduler.costs import PassCosts


def row_counts(most: int) -> list[int]:
    """1, 2, multiples of 4, and from 16 on four steps to every doubling, up to ``most``."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        counts.append(counts[-1] + max(4, 1 << (counts[-1].bit_length() - 3)))
    return [c for c in counts if c < most] + [most]


# Beyond so many rows a CPU's buckets are far apart.
FINE = 128
# The row counts that may be canonical, by device kind; of others a GPU's. Plain passes on a CPU
# have these as well, and 1.
LADDER = {
    "cpu": (*row_counts(FINE)[1:], 192, 256, 384, 512, 768, 1024, 1536, 2048),
    "cuda": (8, 32, 128, 256, 512, 2048),
}
# More sequences than these have a bucket of their own, in which all decode at once.
MANY = 1024
# Of a bucket, the part that may be padding before rows are cut to fill a smaller one.
PADDING = 1 / 4
# Drafts that wait before a verify where ``EngineConfig.draft_window`` leaves that open.
MOST_DRAFTS = 16
# Windows that are weighed beside those that fill a canonical bucket.
WINDOWS = (1, 2, 4, 8)


def next_bucket(rows: int, sizes: Sequence[int]) -> int:
    """Of the next pass over so many rows, of which some may be left, by these sizes."""
    if rows >= sizes[-1]:
        return sizes[-1]
    place = bisect_left(sizes, rows)
    size = sizes[place]
    return sizes[place - 1] if place and size - rows > PADDING * size else size


def ladder(config: EngineConfig, device_type: str) -> list[int]:
    """The row counts that a canonical pass may have; ``config`` is resolved."""
    most, reference = config.max_rows, config.reference_rows
    assert most and reference
    sizes = LADDER.get(device_type, LADDER["cuda"])
    found = {reference, *(min(size, most) for size in sizes)}
    if config.max_sequences > MANY:
        found.add(min(config.max_sequences, most))
    return sorted(found)


class Buckets:
    """Buckets up to ``max_rows``; ``reference`` is one of them and defines canonical results.

    sizes: the ladder (default: all); only these can be canonical. Which are is unknown before
    ``learn``. one_list: plain passes have these, and 1. costs: of passes that ran. wanted: what the
    last pass with deterministic requests was planned for: rows, how many of them are sequences that
    can draft, and how many drafts may wait.
    """

    def __init__(
        self,
        max_rows: int,
        reference: int,
        sizes: Iterable[int] | None = None,
        one_list: bool = False,
    ):
        self.sizes = sorted({*(row_counts(max_rows) if sizes is None else sizes), reference})
        self._all = sorted({*self.sizes, *([1, max_rows] if one_list else row_counts(max_rows))})
        self.reference = reference
        self.canonical: list[int] = []
        self._apart: set[int] = set()
        self.costs = PassCosts()
        self.wanted = (0, 0, 0)

    def learn(
        self,
        canonical: Iterable[int],
        seconds: Mapping[int, float] | None = None,
        apart: Iterable[int] = (),
    ) -> None:
        """Set what was proven: the canonical buckets, and those of them whose canonical passes run
        another way than plain ones. seconds: of canonical passes, where none has run yet."""
        self.canonical, self._apart = sorted(canonical), set(apart)
        assert self.reference in self.canonical and set(self.canonical) <= set(self.sizes)
        for rows, cost in (seconds or {}).items():
            self.costs.add(rows, rows in self._apart, cost, settled=False)

    def forget(self) -> None:
        """No bucket is canonical any more: weights or device changed."""
        self.canonical, self._apart = [], set()

    def ran(self, bucket: int, canonical: bool, seconds: float, settled: bool = True) -> None:
        """A pass took so long. Not ``settled``: the next ones of its shape take less."""
        self.costs.add(bucket, canonical and bucket in self._apart, seconds, settled)

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

    def room(self, least: int, wanted: int) -> int:
        """How many of ``wanted`` rows a plain pass is to have, ``least`` at least: all that it
        holds, or so many that less than PADDING of it is empty."""
        if not FINE < wanted < self.largest:
            return min(wanted, self.largest)
        room = min(next_bucket(wanted, self._all), wanted)
        return room if room >= least else wanted

    def cheapest(self, least: int, wanted: int) -> int:
        """The canonical bucket for at least ``least`` of ``wanted`` rows that costs least per row;
        of equal ones the largest."""
        self.wanted = (wanted, 0, 0)
        return self._cheapest(self.canonical, least, wanted)

    def _cheapest(self, canonical: list[int], least: int, wanted: int) -> int:
        """Were these buckets canonical. Where rows are left over, their sequences end a pass later:
        the cost of the smallest bucket is added."""
        first, last = (
            bisect_left(canonical, min(max(rows, 1), canonical[-1])) for rows in (least, wanted)
        )

        def cost(size: int) -> tuple[float, int]:
            later = self.seconds(canonical[0], True) if size < wanted else 0.0
            return (self.seconds(size, True) + later) / min(size, wanted), -size

        return min(canonical[first : last + 1], key=cost) if first < last else canonical[first]

    def is_canonical(self, bucket: int) -> bool:
        """Whether every pass in ``bucket`` is canonical, plain ones too but for attention."""
        return bucket in self.canonical and bucket not in self._apart

    def seconds(self, bucket: int, canonical: bool = False) -> float:
        """What a pass in ``bucket`` costs; canonical: a canonical one, whether or not it is known
        to be one."""
        return self.costs.seconds(bucket, canonical and bucket in self._apart)

    def window(
        self, rows: int, drafting: int, most: int, accepted: float, free: bool = True
    ) -> int:
        """How many tokens each of ``drafting`` deterministic sequences should draft before they are
        verified; 0: none, their rows are padded to a canonical bucket. ``rows``: of a pass, plain
        ones among them. most: drafts that may wait; not ``free``: that or none. accepted: chance
        that a draft is, if those before it were; less than 1."""
        assert 0 <= drafting <= rows and most >= 0, (rows, drafting, most)
        self.wanted = rows, drafting, most
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

    def would_use(self, accepted: float) -> tuple[int, float] | None:
        """The bucket that the last pass would have had, or its verify, were all of the ladder
        canonical, and seconds that this would have saved; None where there was no such pass since
        this was asked. accepted: as of ``window``."""
        (rows, drafting, most), self.wanted = self.wanted, (0, 0, 0)
        if not rows or not self.canonical:
            return None
        now, _ = self.cheapest_way(self.canonical, rows, drafting, most, accepted)
        then, window = self.cheapest_way(self.sizes, rows, drafting, most, accepted)
        verified = min(rows + drafting * window, self.sizes[-1])
        size = self._cheapest(self.sizes, verified if drafting else 1, verified)
        return size, (now - then) * min(rows, self.canonical[-1])
