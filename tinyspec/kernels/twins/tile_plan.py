"""Which tiles of which pages a pass's rows attend to: the plan of the attention twin.

Worked out once per pass and read again in every layer. Knows lists of pages and positions; no keys
and no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tinyspec.kernels.segments import Segments

TILE = 128
# Query rows of one block. More would only mask more of the tiles behind the block's own rows.
BLOCK_ROWS = 128
# Bounds the scratch of one call: tiles * query rows.
MAX_TILE_ROWS = 1 << 15
# Finite, so that a wholly masked tile yields a finite result that then weighs exactly nothing.
MASKED = -1e30

Position = TypeVar("Position", int, Tensor)


class Sight(NamedTuple):
    """How far back a row sees: ``window`` keys, itself included, or those since the last multiple
    of ``chunk``; 0: no such bound."""

    window: int = 0
    chunk: int = 0

    def lowest(self, position: Position) -> Position:
        """First key that a row at ``position`` sees; 0 or less: all."""
        if self.chunk:
            return position - position % self.chunk
        return position - self.window + 1 if self.window else position * 0


@dataclass
class Block:
    """Up to BLOCK_ROWS consecutive rows of one segment, and the tiles that they can see."""

    row: int
    rows: int
    position: int
    pages: list[int]
    first_tile: int
    num_tiles: int


@dataclass
class Group:
    """Blocks of like height, most tiles first; their tiles ordered by depth, then by block.

    height: query rows of every block; a short block repeats its last row.
    rows:    [T * height] pass row of every tile's query rows.
    mask:    [T, 1, height * group, keys] fp32, 0 or MASKED; None where nothing is masked.
    tiles:   [T, TILE] slots, or [T] tiles of the cache where pages hold whole tiles.
    counts:  blocks that have a first, a second, ... tile.
    span:    where the tiles lie dense in the cache, the range of them; ``rows`` and ``mask`` then
        follow the range, and ``order`` [T] says where in it each tile is.
    results: [n] pass row of every result, in the order of the blocks (of the range: of its tiles).
    straight: whether rows and results are both the pass rows 0, 1, 2, ...
    keys:    how many keys of every tile are attended to.
    """

    height: int
    rows: Tensor
    mask: Tensor | None
    tiles: Tensor
    counts: list[int]
    results: Tensor
    straight: bool
    keys: int
    span: tuple[int, int] | None = None
    order: Tensor | None = None


def blocks_of(segments: Segments, sight: Sight) -> list[Block]:
    """The rows of a pass as blocks, in order."""
    starts = segments.cu_seqlens_q.tolist()
    blocks = []
    for s, (length, pages) in enumerate(
        zip(segments.seq_lens.tolist(), segments.page_table.tolist(), strict=True)
    ):
        first, end = starts[s], starts[s + 1]
        for row in range(first, end, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, end - row)
            position = length - (end - row)
            lowest = max(0, sight.lowest(position)) // TILE
            count = (position + rows - 1) // TILE + 1 - lowest
            blocks.append(Block(row, rows, position, pages, lowest, count))
    return blocks


def _height(rows: int, unit: int) -> int:
    """Rows a block is padded to: few distinct heights, each a multiple of ``unit``."""
    step = max(unit, 1 << max(0, rows.bit_length() - 2))
    return -(-rows // step) * step


def groups_of(
    blocks: list[Block],
    segments: Segments,
    sight: Sight,
    group: int,
    *,
    unit: int,
    least: int,
    whole: bool = True,
) -> list[Group]:
    """Groups of ``blocks``, each padded to a multiple of ``unit`` query rows a KV head, ``least``
    at least.

    group: query heads that share a KV head's call, hence query rows per row of the pass. whole:
    whether all of every tile is attended to, masked, where fewer keys would do.
    """
    unit //= gcd(group, unit)

    def height(block: Block) -> int:
        return _height(max(block.rows, -(-least // group)), unit)

    def batches(blocks: list[Block], rows: int) -> Iterator[list[Block]]:
        """Cut so that no call's scratch passes MAX_TILE_ROWS (a single block may)."""
        batch: list[Block] = []
        size = 0
        for block in blocks:
            cost = block.num_tiles * rows * group
            if batch and size + cost > MAX_TILE_ROWS:
                yield batch
                batch, size = [], 0
            batch.append(block)
            size += cost
        yield batch

    ordered = sorted(blocks, key=lambda b: (height(b), -b.num_tiles))
    return [
        _group(batch, tall, segments, sight, group, whole)
        for tall, alike in groupby(ordered, key=height)
        for batch in batches(list(alike), tall)
    ]


def _group(
    blocks: list[Block], height: int, segments: Segments, sight: Sight, group: int, whole: bool
) -> Group:
    page_size = segments.page_size
    counts = [
        sum(block.num_tiles > depth for block in blocks) for depth in range(blocks[0].num_tiles)
    ]
    pairs = [(b, depth) for depth, count in enumerate(counts) for b in range(count)]
    numbers = [blocks[b].first_tile + depth for b, depth in pairs]
    span = order = None
    if page_size % TILE == 0:
        ratio = page_size // TILE
        places = [
            blocks[b].pages[number // ratio] * ratio + number % ratio
            for (b, _), number in zip(pairs, numbers, strict=True)
        ]
        tiles = torch.tensor(places)
        low, high = min(places), max(places) + 1
        if high - low <= 2.5 * len(places) and len(set(places)) == len(places):
            span = (low, high)
            found = {place - low: n for n, place in enumerate(places)}
            # A tile of the range that is nobody's gets the first block's rows; none reads it.
            at = [found.get(place, 0) for place in range(high - low)]
            pairs, numbers = [pairs[n] for n in at], [numbers[n] for n in at]
            order = tiles - low
    else:
        # Positions behind the page of the block's last row repeat that page: masked, and finite.
        # What the table has there may be anybody's.
        token = torch.tensor(numbers)[:, None] * TILE + torch.arange(TILE)
        last = torch.tensor(
            [(blocks[b].position + blocks[b].rows - 1) // page_size for b, _ in pairs]
        )
        table = torch.tensor([blocks[b].pages for b, _ in pairs])
        page = torch.minimum(token // page_size, last[:, None])
        tiles = table.gather(1, page) * page_size + token % page_size

    facts = torch.tensor(
        [
            (blocks[b].row, blocks[b].rows - 1, blocks[b].position, number * TILE)
            for (b, _), number in zip(pairs, numbers, strict=True)
        ]
    )
    inside = torch.minimum(torch.arange(height), facts[:, 1:2])
    position = facts[:, 2:3] + inside
    ahead = (position - facts[:, 3:])[..., None]
    lowest = (sight.lowest(position) - facts[:, 3:])[..., None]
    key = torch.arange(TILE)
    seen = key <= ahead
    if (lowest > 0).any():
        seen &= key >= lowest
    # With one tile a block, what is behind all rows' sight can be left out.
    keys = TILE if whole or len(counts) > 1 else min(TILE, int(ahead.max()) + 1)
    seen = seen[..., :keys]
    mask = None
    if whole or not bool(seen.all()):
        mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, MASKED)
        mask = mask.repeat_interleave(group, dim=1)[:, None]
    rows = facts[:, :1] + inside
    # With one tile a block there is nothing to merge, so nothing to put in order either.
    results, straight = rows, False
    if len(counts) > 1:
        results = rows[order[: counts[0]]] if order is not None else rows[: counts[0]]
    elif order is not None and len(at) != len(places):
        results = rows[order]
    else:
        order = None
        straight = rows.flatten().tolist() == list(range(rows.numel()))
    return Group(
        height, rows.flatten(), mask, tiles, counts, results.flatten(), straight, keys, span, order
    )
