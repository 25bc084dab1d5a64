"""One function of rows in every bucket: in which do its rows keep their bits, and which agree?

Facts 1 and 2 at the cost of a few passes a bucket. Knows functions from `[rows, features]` to
`[rows, ...]`; neither models nor engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyspec.determinism.probes.bits import (
    PositionProbe,
    RowFunction,
    cancelling_inputs,
    class_of,
    in_passes,
    position_invariant,
    same_bits,
    unequal_bits,
)

POOL_ROWS = 64
# Of the 48 needles: a prime, so that no tile of rows is a multiple of it.
NEEDLES = 47
# Of the reference bucket, beside those that every bucket gets.
REFERENCE_PASSES = 8
QUIET_PASSES = 2
# From here on a pass has room for every needle more than once.
LARGE_ROWS = 128
# Rows among which telling ones are looked for, and how many numbers these may have together.
CANDIDATES = 1024
CANDIDATE_NUMBERS = 1 << 17


@dataclass(frozen=True)
class BucketClasses:
    """Facts 1 and 2 of one function in every bucket.

    position: fact 1 in the reference bucket. labels: bucket -> the class of buckets whose rows have
    the same bits, or None where a row's place or neighbours matter.
    """

    name: str
    reference: int
    position: PositionProbe
    labels: dict[int, int | None]

    def canonical(self, rows: int) -> bool:
        """Whether rows of bucket ``rows`` are the reference bucket's, wherever they stand."""
        label = self.labels[rows]
        return bool(self.position) and label is not None and label == self.labels[self.reference]


def probe_pool(
    features: int, dtype: torch.dtype, device: torch.device | str, weight: Tensor | None = None
) -> Tensor:
    """[POOL_ROWS, features]: needles whose sums cancel in every even row, and between them needles
    that are 1e4 larger, ordinary rows and zeros."""
    pool = cancelling_inputs(POOL_ROWS, features, dtype, 0, weight)
    # By a power of two, so that the sums still cancel.
    pool[1::4] *= 2.0**9 if dtype == torch.float16 else 2.0**13
    generator = torch.Generator().manual_seed(features)
    pool[3::8] = torch.randn(pool[3::8].shape, generator=generator).to(dtype)
    pool[7::8] = 0
    return pool.to(device)


def telling_pool(fn: RowFunction, pool: Tensor) -> Tensor | None:
    """``pool`` with other needles: rows whose bits ``fn`` itself changes between a pass of one row
    and one of very many; None where it changes none.

    What is left over from vectors is rounded by another function, of which a few numbers in a
    hundred tell, and in a pass of narrow rows hardly more numbers than that are left over.
    """
    count = min(CANDIDATES, max(len(pool) // 2, CANDIDATE_NUMBERS // pool.shape[1]))
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, pool.shape[1], generator=generator) * 3
    rows = rows.to(pool)
    told = unequal_bits(fn(rows), in_passes(fn, rows, 1)).sum(dim=1)
    found = told.argsort(descending=True, stable=True)[: int(told.count_nonzero())]
    if not len(found):
        return None
    telling = pool.clone()
    places = torch.arange(len(pool[::2]), device=pool.device)
    telling[::2] = rows[found[places % len(found)]]
    return telling


def bucket_classes(
    fn: RowFunction,
    pool: Tensor,
    sizes: Iterable[int],
    reference: int,
    name: str = "function",
    search: bool = False,
) -> BucketClasses:
    """Facts 1 and 2 of ``fn`` in passes of each of ``sizes``, by the rows of a ``probe_pool`` and,
    with ``search``, by those of a ``telling_pool``.

    In every bucket all needles go through at least once, and every row index holds one.
    """
    telling = telling_pool(fn, pool) if search else None
    if telling is not None:
        found = [bucket_classes(fn, p, sizes, reference, name) for p in (pool, telling)]
        return _both(*found)
    results: list[Tensor] = []
    labels: dict[int, int | None] = {}
    position = position_invariant(fn, pool[::2], reference, name, REFERENCE_PASSES)
    for rows in sizes:
        result, moved = _in_turns(fn, pool, rows, name)
        labels[rows] = class_of(result, results) if moved is None else None
        if moved is not None and rows == reference and position:
            position = moved
    return BucketClasses(name, reference, position, labels)


def _both(one: BucketClasses, other: BucketClasses) -> BucketClasses:
    """What holds by two pools: buckets are alike that are so by both."""
    pairs = {rows: (one.labels[rows], other.labels[rows]) for rows in one.labels}
    kinds = {pair: label for label, pair in enumerate(dict.fromkeys(pairs.values()))}
    labels = {rows: None if None in pair else kinds[pair] for rows, pair in pairs.items()}
    return replace(one, position=one.position and other.position, labels=labels)


def _in_turns(
    fn: RowFunction, pool: Tensor, rows: int, name: str
) -> tuple[Tensor, PositionProbe | None]:
    """The results of the needles in passes of ``rows`` rows, and where a row's place showed, if so.

    First the pool as it is. Then the needles that are not large, alone and in another order: so
    that a needle stands in every place, and beside nothing larger than itself. Where a pass is so
    large that this would be dear, both at once: the needles again and again, an odd number of them,
    so that each stands in places of every kind.
    """
    place = torch.arange(len(pool), device=pool.device)
    needles = place[(place % 2 == 0) | (place % 4 == 1)][:NEEDLES]
    if rows >= LARGE_ROWS:
        table, at = _sweep(fn, pool, needles, rows)
        return table, None if at is None else PositionProbe(name, rows, len(needles), 1, *at)
    table, at = _sweep(fn, pool, place, rows)
    quiet = (place[: len(pool) // 2] * 13 + 5) % (len(pool) // 2) * 2
    expected = table[quiet]
    for start in range(0, min(len(quiet), QUIET_PASSES * rows), rows):
        if at is None:
            at = _first_unlike(fn(pool[_part(quiet, start, rows)]), expected, start)
    return table[needles], None if at is None else PositionProbe(name, rows, len(pool), 1, *at)


def _sweep(
    fn: RowFunction, pool: Tensor, order: Tensor, rows: int
) -> tuple[Tensor, tuple[int, int] | None]:
    """The results of ``pool[order]`` in passes of ``rows`` rows, over it again and again until each
    was in one, and where one was not as the first time."""
    size = len(order)
    pieces: list[Tensor] = []
    for start in range(0, size, rows):
        result = fn(pool[_part(order, start, rows)])
        behind = size - start  # rows of this pass before the order begins anew
        pieces.append(result[:behind])
    # A copy, so that the last pass of a large bucket can be let go.
    table = torch.cat(pieces)
    at = _first_unlike(result[behind:], table, 0)
    return table, None if at is None else (at[0] + behind, at[1])


def _part(order: Tensor, start: int, rows: int) -> Tensor:
    """``rows`` entries of ``order`` from ``start`` on, again and again."""
    place = torch.arange(start, start + rows, device=order.device)
    return order[place % len(order)]


def _first_unlike(result: Tensor, expected: Tensor, start: int) -> tuple[int, int] | None:
    """Row and column of the first bits of ``result`` that are not those of ``expected`` from its
    row ``start`` on, again and again; None if there are none."""
    done = 0
    while done < len(result):
        at = (start + done) % len(expected)
        size = min(len(expected) - at, len(result) - done)
        found, wanted = result[done : done + size], expected[at : at + size]
        if not same_bits(found, wanted):
            row, column = unequal_bits(found, wanted).nonzero()[0].tolist()
            return done + row, column
        done += size
    return None
