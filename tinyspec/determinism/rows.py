"""Comparing bits: does a row's place in a pass change them, and which row counts agree?

Facts 1 and 2 that determinism rests on, measured for any function from `[rows, features]` to
`[rows, ...]`. Knows torch; neither engines, models nor transformers.

With ordinary inputs rounding to bf16 hides nearly every change in the order of additions. Here sums
cancel, so that what is left is the accumulator's own rounding; every row of a large pool is
compared, and neighbours are up to 1e4 larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.model.checksum import same_bits, unequal_bits

RowFunction = Callable[[Tensor], Tensor]
CANCELLED_OUTPUTS = 64
POOL_ROWS = 64
# Sums of fewer terms, as of products of bf16 numbers, are often exact in any order: it shows only
# where small terms meet large ones that cancel, and which these are changes from needle to needle.
SHORT = 64
# Types of devices on which outputs are computed in tiles, each by multiprocessors of its own, and
# how far cancelled outputs are apart there: no tile is narrower.
TILED = ("cuda",)
APART = 64
# Of the reference bucket about so many, in which the pool runs twice at least, in others once.
REFERENCE_PASSES = 10
QUIET_PASSES = 2
# Parts of batches that are compared.
BATCH_POOL = 16
# From here on a pass has room for every needle more than once.
LARGE_ROWS = 128
# Rows among which sensitive ones are searched, and how many numbers these may have together.
CANDIDATES = 1024
CANDIDATE_NUMBERS = 1 << 17


def cancelled_outputs(features: int) -> int:
    """How many products of one row with a weight can cancel; of short sums an output shows less."""
    return max(1, min(CANCELLED_OUTPUTS, features // (4 if features < SHORT else 8)))


def cancelling_inputs(
    rows: int,
    features: int,
    dtype: torch.dtype,
    seed: int = 0,
    weight: Tensor | None = None,
    sets: int = 1,
) -> Tensor:
    """Inputs `[rows, features]`, on the CPU, whose products with `weight` cancel, so that the order
    of additions shows.

    A third of the features is random; another cancels its products with up to 64 rows of `weight`
    `[out, features]`; the last, orders of magnitude smaller, cancels what rounding the second to
    `dtype` left over. Without a weight the plain sum of a row cancels. sets: of outputs, evenly
    spread together, and of thirds, which rows take in turns.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x = (x * 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)).to(dtype).double()
    weight = torch.ones(1, features) if weight is None else weight.detach()
    count = min(cancelled_outputs(features), len(weight))
    picks = torch.linspace(0, len(weight) - 1, count * sets).round().long().to(weight.device)
    third = max(1, features // 3)
    for number in range(sets):
        chosen = weight[picks[number::sets]].to("cpu", torch.float64).nan_to_num(0, 0, 0)
        order = torch.randperm(features, generator=generator)
        own = x[number::sets]
        own[:, order[third:]] = 0
        for part in (order[third : 2 * third], order[2 * third :]):
            gram = chosen[:, part] @ chosen[:, part].T
            gram.diagonal().add_(1e-12 * gram.trace() + 1e-30)
            solved = torch.linalg.solve(gram, -chosen @ own.T)  # [count, rows of the set]
            own[:, part] = (solved.T @ chosen[:, part]).to(dtype).double()
    return x.to(dtype)


def probe_pool(
    features: int, dtype: torch.dtype, device: torch.device | str, weight: Tensor | None = None
) -> Tensor:
    """[POOL_ROWS, features], twice as many rows of short sums: needles (rows whose sums cancel) in
    every even row, and between them needles that are 1e4 larger, ordinary rows and zeros.

    Needles of short sums cancel different outputs, and on a GPU all do, together about one in
    ``APART``: tiles of outputs may be summed each in a way of its own there.
    """
    rows, sets = POOL_ROWS, 1
    if features < SHORT:
        rows, sets = 2 * POOL_ROWS, POOL_ROWS // 2
    elif weight is not None and torch.device(device).type in TILED:
        sets = min(-(-len(weight) // (cancelled_outputs(features) * APART)), POOL_ROWS // 2)
    pool = cancelling_inputs(rows, features, dtype, 0, weight, sets)
    if sets > 1:  # the even rows get as many of each set
        pool = pool.view(2, -1, features).transpose(0, 1).reshape(rows, features)
    # By a power of two, so that the sums still cancel.
    pool[1::4] *= 2.0**9 if dtype == torch.float16 else 2.0**13
    generator = torch.Generator().manual_seed(features)
    pool[3::8] = torch.randn(pool[3::8].shape, generator=generator).to(dtype)
    pool[7::8] = 0
    return pool.to(device)


def sensitive_pool(fn: RowFunction, pool: Tensor) -> list[Tensor]:
    """``pool`` with other needles: random rows that ``fn`` gives other bits in a pass of one row
    than in a pass of many; empty where there are none.

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
        return []
    sensitive = pool.clone()
    places = torch.arange(len(pool[::2]), device=pool.device)
    sensitive[::2] = rows[found[places % len(found)]]
    return [sensitive]


def keeps_places(fn: RowFunction, pools: list[Tensor], rows: int) -> bool:
    """Fact 1: whether results keep their bits in every place of a pass of ``rows`` rows, among any
    others of each pool."""
    turns = [max(2, REFERENCE_PASSES // -(-len(pool) // rows)) for pool in pools]
    found = (needles_of_bucket(fn, *one, rows) for one in zip(pools, turns, strict=True))
    return all(needles is not None for needles in found)


def agree(
    fn: RowFunction,
    pools: list[Tensor],
    rows: int,
    reference: int,
    other: RowFunction | None = None,
) -> bool:
    """Fact 2: whether rows have the reference bucket's bits in every place of a pass of ``rows``
    rows, which ``other`` may compute in the place of ``fn``."""
    for pool in pools:
        ways = (fn, reference), (other or fn, rows)
        expected, found = (needles_of_bucket(way, pool, 1, size) for way, size in ways)
        if expected is None or found is None or not same_bits(expected, found):
            return False
    return True


def needles_of_bucket(fn: RowFunction, pool: Tensor, turns: int, rows: int) -> Tensor | None:
    """The results of the needles in passes of ``rows`` rows; None where a row's place or neighbours
    changed bits. pool: a power of two of rows.

    First the whole pool, ``turns`` times in other orders. Then only the needles that are not large,
    so that every place holds a needle, also without larger neighbours. Large passes cost more:
    one turn of them does both at once and repeats the needles, an odd number of them, so that each
    gets places of every kind.
    """
    place = torch.arange(len(pool), device=pool.device)
    # Without the last an odd number, so that no tile of rows is a multiple of it.
    needles = place[(place % 2 == 0) | (place % 4 == 1)][:-1]
    order = needles if rows >= LARGE_ROWS and turns == 1 else place
    table = None
    for turn in range(turns):
        # Other neighbours; a needle in an even place comes to an odd one with every second turn.
        at = (place[: len(order)] * (2 * turn + 1) + 5 * turn) % len(order)
        results = _cyclic(fn, pool, order[at], len(order), rows)
        own, rest = results[: len(order)], results[len(order) :]
        found = torch.empty_like(own)
        found[at] = own
        table = found if table is None else table
        if not same_bits(found, table) or not _repeats(own, rest):
            return None
    assert table is not None
    if order is needles:
        return table
    quiet = (place[: len(pool) // 2] * 13 + 5) % (len(pool) // 2) * 2
    results = _cyclic(fn, pool, quiet, min(len(quiet), QUIET_PASSES * rows), rows)
    return table[needles] if _repeats(table[quiet], results) else None


def _cyclic(fn: RowFunction, pool: Tensor, order: Tensor, count: int, rows: int) -> Tensor:
    """The results of ``count`` rows of ``pool[order]``, ``rows`` at a time; what a last pass has
    room for begins again at the start."""
    place = torch.arange(-(-count // rows) * rows, device=pool.device) % len(order)
    # Of its own memory each, as rows of a pass are.
    parts = [fn(part.clone()) for part in pool[order[place]].split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _repeats(table: Tensor, results: Tensor) -> bool:
    """Whether ``results`` are ``table``, again and again."""
    return all(same_bits(part, table[: len(part)]) for part in results.split(len(table)))


def in_passes(fn: RowFunction, inputs: Tensor, rows: int) -> Tensor:
    """The results of all `inputs` `[pool, ...]`, `rows` at a time; the last pass repeats some."""
    every = torch.arange(len(inputs), device=inputs.device)
    return _cyclic(fn, inputs, every, len(inputs), rows)[: len(inputs)]


class BatchFunction(NamedTuple):
    """A function of [B, length, d] whose first dimension is the batch. like: [0, d], of the dtype
    and on the device of its input."""

    name: str
    run: Callable[[Tensor], Tensor]
    length: int
    like: Tensor

    def of_rows(self, x: Tensor) -> Tensor:
        """The same function of [B, length * d]."""
        return self.run(x.view(len(x), self.length, -1))

    def pool(self) -> Tensor:
        """[BATCH_POOL, length * d] of many sizes, so that the order of a sum shows, among larger
        ones and NaN."""
        generator = torch.Generator().manual_seed(self.length)
        size = BATCH_POOL, self.length * self.like.shape[1]
        values, sizes = (torch.randn(size, generator=generator) for _ in range(2))
        values *= sizes.exp()
        values[1::4] *= 1e4
        values[7::8] = torch.nan
        return values.to(self.like)

    def keeps_places(self, batch: int) -> bool:
        """Whether a part's result depends on neither its place nor its neighbours, in a batch of so
        many parts."""
        return keeps_places(self.of_rows, [self.pool()], batch)

    def agrees(self, other: int, batch: int) -> bool:
        """Whether batches of ``other`` parts give the results of those of ``batch``, which mix
        none."""
        return agree(self.of_rows, [self.pool()], other, batch)
