"""Probes one function of rows in every bucket: do rows keep their bits, and which buckets agree?

Facts 1 and 2 in a few passes a bucket. Knows functions from `[rows, features]` to `[rows, ...]`;
neither models nor engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyspec.determinism.probes.bits import (
    PositionResult,
    RowFunction,
    cancelled_outputs,
    cancelling_inputs,
    class_of,
    in_passes,
    position_invariant,
    same_bits,
    unequal_bits,
)

POOL_ROWS = 64
# Of 48 needles (the rows that are compared): a prime, so that no tile of rows is a multiple of it.
NEEDLES = 47
# Types of devices on which outputs are computed in tiles, each by multiprocessors of its own, and
# how far cancelled outputs are apart there: no tile is narrower.
TILED = ("cuda",)
APART = 64
# Of the reference bucket, beside those that every bucket gets.
REFERENCE_PASSES = 8
QUIET_PASSES = 2
# From here on a pass has room for every needle more than once.
LARGE_ROWS = 128
# Rows among which sensitive ones are searched, and how many numbers these may have together.
CANDIDATES = 1024
CANDIDATE_NUMBERS = 1 << 17


@dataclass(frozen=True)
class BucketInvariance:
    """Facts 1 and 2 of one function in every bucket.

    position: fact 1 in the reference bucket. labels: by bucket; equal where rows have the same
    bits, None where a row's place or neighbours change them.
    """

    name: str
    reference: int
    position: PositionResult
    labels: dict[int, int | None]

    def canonical(self, rows: int) -> bool:
        """Whether rows of bucket ``rows`` have the reference bucket's bits in every place."""
        label = self.labels[rows]
        return bool(self.position) and label is not None and label == self.labels[self.reference]


def probe_pool(
    features: int, dtype: torch.dtype, device: torch.device | str, weight: Tensor | None = None
) -> Tensor:
    """[POOL_ROWS, features]: needles (rows whose sums cancel) in every even row, and between them
    needles that are 1e4 larger, ordinary rows and zeros.

    On a GPU needles cancel different outputs, together about one in ``APART``: tiles of outputs may
    be summed each in a way of its own there.
    """
    sets = 1
    if weight is not None and torch.device(device).type in TILED:
        sets = min(-(-len(weight) // (cancelled_outputs(features) * APART)), POOL_ROWS // 2)
    pool = cancelling_inputs(POOL_ROWS, features, dtype, 0, weight, sets)
    if sets > 1:  # the even rows get one of each set
        pool = pool.view(2, -1, features).transpose(0, 1).reshape(POOL_ROWS, features)
    # By a power of two, so that the sums still cancel.
    pool[1::4] *= 2.0**9 if dtype == torch.float16 else 2.0**13
    generator = torch.Generator().manual_seed(features)
    pool[3::8] = torch.randn(pool[3::8].shape, generator=generator).to(dtype)
    pool[7::8] = 0
    return pool.to(device)


def sensitive_pool(fn: RowFunction, pool: Tensor) -> Tensor | None:
    """``pool`` with other needles: random rows that ``fn`` gives other bits in a pass of one row
    than in a pass of many; None where there are none.

    The elements behind the last whole vector are rounded by another function, which shows in a few
    of a hundred numbers, and passes of narrow rows have few such elements.
    """
    count = min(CANDIDATES, max(len(pool) // 2, CANDIDATE_NUMBERS // pool.shape[1]))
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, pool.shape[1], generator=generator) * 3
    rows = rows.to(pool)
    unequal = unequal_bits(fn(rows), in_passes(fn, rows, 1)).sum(dim=1)
    found = unequal.argsort(descending=True, stable=True)[: int(unequal.count_nonzero())]
    if not len(found):
        return None
    sensitive = pool.clone()
    places = torch.arange(len(pool[::2]), device=pool.device)
    sensitive[::2] = rows[found[places % len(found)]]
    return sensitive


def probe_function(
    fn: RowFunction,
    pool: Tensor,
    sizes: Iterable[int],
    reference: int,
    name: str = "function",
    search: bool = False,
    proven: PositionResult | None = None,
) -> BucketInvariance:
    """Facts 1 and 2 of ``fn`` in passes of each of ``sizes``, by the rows of a ``probe_pool`` and,
    with ``search``, by those of a ``sensitive_pool``.

    In every bucket each needle runs at least once, and each row index holds one. proven: fact 1 in
    the reference bucket, where that is known.
    """
    sensitive = sensitive_pool(fn, pool) if search else None
    if sensitive is not None:
        pools = (pool, sensitive)
        return _combine(
            *(probe_function(fn, own, sizes, reference, name, False, proven) for own in pools)
        )
    results: list[Tensor] = []
    labels: dict[int, int | None] = {}
    position = proven
    if position is None:
        position = position_invariant(fn, pool[::2], reference, name, REFERENCE_PASSES)
    for rows in sizes:
        result, moved = _run_bucket(fn, pool, rows, name)
        labels[rows] = class_of(result, results) if moved is None else None
        if moved is not None and rows == reference and position:
            position = moved
    return BucketInvariance(name, reference, position, labels)


def _combine(one: BucketInvariance, other: BucketInvariance) -> BucketInvariance:
    """The result of two pools: buckets agree that agree by both."""
    pairs = {rows: (one.labels[rows], other.labels[rows]) for rows in one.labels}
    kinds = {pair: label for label, pair in enumerate(dict.fromkeys(pairs.values()))}
    labels = {rows: None if None in pair else kinds[pair] for rows, pair in pairs.items()}
    return replace(one, position=one.position and other.position, labels=labels)


def _run_bucket(
    fn: RowFunction, pool: Tensor, rows: int, name: str
) -> tuple[Tensor, PositionResult | None]:
    """The results of the needles in passes of ``rows`` rows, and where a row's place changed bits.

    First the whole pool. Then only the needles that are not large, in another order: so that every
    place holds a needle, also without larger neighbours. Large passes cost more and do both at
    once: they repeat the needles, an odd number of them, so that each gets places of every kind.
    """
    place = torch.arange(len(pool), device=pool.device)
    needles = place[(place % 2 == 0) | (place % 4 == 1)][:NEEDLES]
    if rows >= LARGE_ROWS:
        table, at = _run_all(fn, pool, needles, rows)
        return table, None if at is None else PositionResult(name, rows, len(needles), 1, *at)
    table, at = _run_all(fn, pool, place, rows)
    quiet = (place[: len(pool) // 2] * 13 + 5) % (len(pool) // 2) * 2
    expected = table[quiet]
    for start in range(0, min(len(quiet), QUIET_PASSES * rows), rows):
        if at is None:
            at = _first_difference(fn(pool[_cyclic(quiet, start, rows)]), expected, start)
    return table[needles], None if at is None else PositionResult(name, rows, len(pool), 1, *at)


def _run_all(
    fn: RowFunction, pool: Tensor, order: Tensor, rows: int
) -> tuple[Tensor, tuple[int, int] | None]:
    """The results of ``pool[order]`` in passes of ``rows`` rows, the last of which begins again at
    the start, and where a repeated row has other bits than before."""
    size = len(order)
    pieces: list[Tensor] = []
    for start in range(0, size, rows):
        result = fn(pool[_cyclic(order, start, rows)])
        behind = size - start  # rows of this pass before the order begins again
        pieces.append(result[:behind])
    # A copy, so that the last pass of a large bucket can be freed.
    table = torch.cat(pieces)
    at = _first_difference(result[behind:], table, 0)
    return table, None if at is None else (at[0] + behind, at[1])


def _cyclic(order: Tensor, start: int, rows: int) -> Tensor:
    """``rows`` entries of ``order`` from ``start`` on, cyclically."""
    place = torch.arange(start, start + rows, device=order.device)
    return order[place % len(order)]


def _first_difference(result: Tensor, expected: Tensor, start: int) -> tuple[int, int] | None:
    """Row and column of the first difference between ``result`` and ``expected``, which is read
    cyclically from row ``start`` on; None if there is none."""
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
