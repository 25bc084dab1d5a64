"""Which tiles of which pages a pass's rows attend to: the plan of the attention twin.

Worked out once per pass and read again in every layer. Knows lists of pages and positions; no keys
and no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import gcd
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata

TILE = 128
# Query rows of one block. More would only mask more of the tiles behind the block's own rows.
BLOCK_ROWS = 128
# Bounds the scratch of one call: tiles * query rows.
MAX_TILE_ROWS = 1 << 13
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
    """Blocks of like height, most tiles first; their tiles ordered by depth, then by block, or,
    where they lie dense in the cache, as they lie there.

    height: query rows of every block; a short block repeats its last row.
    rows:   [B * height] pass row of every block's query rows.
    in_order: whether these are the pass rows 0, 1, 2, ...
    owners: [T] block of every tile; None where tiles and blocks are the same in the same order.
    mask:   [T, 1, height * group, keys] fp32, 0 or MASKED; None where nothing is masked.
    keys:   how many keys of every tile are attended to.
    tiles:  [T, TILE] slots, or [T] tiles of the cache where pages hold whole tiles.
    span:   where the tiles lie dense in the cache, the range of them.
    depths: where the first, the second, ... tiles of the blocks that have one are among all.
    """

    height: int
    rows: Tensor
    in_order: bool
    owners: Tensor | None
    mask: Tensor | None
    keys: int
    tiles: Tensor
    span: tuple[int, int] | None
    depths: list[slice | Tensor]


def blocks_of(segments: AttentionMetadata, sight: Sight) -> list[Block]:
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
    segments: AttentionMetadata,
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
    blocks: list[Block],
    height: int,
    segments: AttentionMetadata,
    sight: Sight,
    group: int,
    whole: bool,
) -> Group:
    page_size = segments.page_size
    counts = [
        sum(block.num_tiles > depth for block in blocks) for depth in range(blocks[0].num_tiles)
    ]
    pairs = [(b, depth) for depth, count in enumerate(counts) for b in range(count)]
    numbers = [blocks[b].first_tile + depth for b, depth in pairs]
    where = list(range(len(pairs)))
    span = None
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
            where = [place - low for place in places]
            found = {place: n for n, place in enumerate(where)}
            # A tile of the range that is nobody's gets the first block's rows; none reads it.
            at = [found.get(place, 0) for place in range(high - low)]
            pairs, numbers = [pairs[n] for n in at], [numbers[n] for n in at]
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

    owners = [b for b, _ in pairs]
    known = torch.tensor([(block.row, block.rows - 1, block.position) for block in blocks])
    inside = torch.minimum(torch.arange(height), known[:, 1:2])
    rows = (known[:, :1] + inside).flatten()
    position = (known[:, 2:] + inside)[owners]
    first = torch.tensor(numbers)[:, None] * TILE
    ahead = (position - first)[..., None]
    lowest = (sight.lowest(position) - first)[..., None]
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
    ends = list(accumulate(counts, initial=0))
    return Group(
        height=height,
        rows=rows,
        in_order=rows.tolist() == list(range(len(rows))),
        owners=None if owners == list(range(len(blocks))) else torch.tensor(owners),
        mask=mask,
        keys=keys,
        tiles=tiles,
        span=span,
        depths=[_places(where[start:end]) for start, end in pairwise(ends)],
    )


def _places(numbers: list[int]) -> slice | Tensor:
    """As a slice where they rise by even steps."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    stop = numbers[-1] + 1
    even = step > 0 and numbers == list(range(numbers[0], stop, step))
    return slice(numbers[0], stop, step) if even else torch.tensor(numbers)
