"""Which tiles of which pages a pass's rows attend to: the plan of the attention twin.

Computed once per pass and read again in every layer. Knows lists of pages and positions; no keys
and no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
# Finite, so that a tile that is masked for a row yields a finite result, which then weighs 0.
MASKED = -1e30

Position = TypeVar("Position", int, Tensor)


class CausalMask(NamedTuple):
    """A row attends to its own key and those before it: the last ``window`` of them, or those since
    the last multiple of ``chunk``; 0: no such bound."""

    window: int = 0
    chunk: int = 0

    def lowest_key(self, position: Position) -> Position:
        """First key of a row at ``position``; 0 or less: all."""
        if self.chunk:
            return position - position % self.chunk
        return position - self.window + 1 if self.window else position * 0


@dataclass
class Block:
    """Up to BLOCK_ROWS consecutive rows of one segment, and the tiles that they attend to."""

    row: int
    rows: int
    position: int
    pages: list[int]
    first_tile: int
    num_tiles: int


@dataclass
class TileCall:
    """One flash-attention call: blocks padded to the same height, most tiles first. Its tiles are
    ordered by depth, then by block, or, where they are dense in the cache, as they lie there.

    height: query rows of every block; a short block repeats its last row.
    rows:   [B * height] pass row of every block's query rows.
    in_order: whether these are the pass rows 0, 1, 2, ...
    owners: [T] block of every tile; None where tiles and blocks are the same in the same order.
    mask:   [T, 1, height * group, keys] fp32, 0 or MASKED; None where nothing is masked.
    keys:   how many keys of every tile are attended to.
    tiles:  [T, TILE] slots, or [T] tiles of the cache where pages hold whole tiles.
    span:   where the tiles are dense in the cache, the range of them.
    depths: indices of the blocks' first tiles, of their second tiles, and so on.
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


def query_blocks(metadata: AttentionMetadata, causal: CausalMask) -> list[Block]:
    """The rows of a pass as blocks, in order."""
    blocks = []
    for (first, end), length, pages in segments(metadata):
        for row in range(first, end, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, end - row)
            position = length - (end - row)
            lowest = max(0, causal.lowest_key(position)) // TILE
            count = (position + rows - 1) // TILE + 1 - lowest
            blocks.append(Block(row, rows, position, pages, lowest, count))
    return blocks


def segments(metadata: AttentionMetadata) -> Iterator[tuple[tuple[int, int], int, list[int]]]:
    """Of every segment its rows (first, end), its context length and its pages."""
    return zip(
        pairwise(metadata.cu_seqlens_q.tolist()),
        metadata.seq_lens.tolist(),
        metadata.page_table.tolist(),
        strict=True,
    )


def _height(rows: int, unit: int) -> int:
    """Rows a block is padded to: few distinct heights, each a multiple of ``unit``."""
    step = max(unit, 1 << max(0, rows.bit_length() - 2))
    return -(-rows // step) * step


def plan_calls(
    blocks: list[Block],
    page_size: int,
    causal: CausalMask,
    group: int,
    *,
    unit: int,
    least: int,
    whole: bool = True,
) -> list[TileCall]:
    """Calls for ``blocks``, each block padded to a multiple of ``unit`` query rows per KV head, and
    to ``least`` at least.

    group: query heads that share a KV head's call, hence query rows per row of the pass. whole:
    whether all keys of every tile are attended to, masked, where fewer would do.
    """
    unit //= gcd(group, unit)

    def height(block: Block) -> int:
        return _height(max(block.rows, -(-least // group)), unit)

    def batches(blocks: list[Block], rows: int) -> Iterator[list[Block]]:
        """Cut so that no call's scratch exceeds MAX_TILE_ROWS (a single block may)."""
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
        _plan_call(batch, tall, page_size, causal, group, whole)
        for tall, alike in groupby(ordered, key=height)
        for batch in batches(list(alike), tall)
    ]


def _plan_call(
    blocks: list[Block], height: int, page_size: int, causal: CausalMask, group: int, whole: bool
) -> TileCall:
    # How many blocks have a first tile, a second one, ...: those with most tiles come first.
    counts = [
        len([block for block in blocks if block.num_tiles > depth])
        for depth in range(blocks[0].num_tiles)
    ]
    # Block and number of every tile.
    pairs = [(b, blocks[b].first_tile + depth) for depth, n in enumerate(counts) for b in range(n)]
    index = list(range(len(pairs)))
    span = None
    if page_size % TILE:
        tiles = _slots(blocks, pairs, page_size)
    else:
        ratio = page_size // TILE
        places = [blocks[b].pages[number // ratio] * ratio + number % ratio for b, number in pairs]
        tiles = integers(places)
        low, high = min(places), max(places) + 1
        if high - low <= 2.5 * len(places) and len(set(places)) == len(places):
            span = (low, high)
            index = [place - low for place in places]
            at = {place: n for n, place in enumerate(index)}
            # A tile of the range that no block has gets the first block's rows; its result is
            # not read.
            pairs = [pairs[at.get(place, 0)] for place in range(high - low)]

    known = torch.tensor(
        [(block.row, block.rows - 1, block.position) for block in blocks],
        dtype=torch.int64,
        device="cpu",
    )
    inside = torch.minimum(integers(range(height)), known[:, 1:2])
    rows = (known[:, :1] + inside).flatten()
    owners = [b for b, _ in pairs]
    # Of every query row of every tile, counted from the tile's first key.
    first = integers([number for _, number in pairs])[:, None] * TILE
    position = (known[:, 2:] + inside)[owners]
    newest, lowest = position - first, causal.lowest_key(position) - first
    # With one tile a block, the keys after those of all rows can be left out.
    keys = TILE if whole or len(counts) > 1 else min(TILE, int(newest.max()) + 1)
    ends = list(accumulate(counts, initial=0))
    return TileCall(
        height=height,
        rows=rows,
        in_order=rows.tolist() == list(range(len(rows))),
        owners=None if owners == list(range(len(blocks))) else integers(owners),
        mask=_mask(newest, lowest, keys, group, whole),
        keys=keys,
        tiles=tiles,
        span=span,
        depths=[_as_slice(index[start:end]) for start, end in pairwise(ends)],
    )


def _slots(blocks: list[Block], pairs: list[tuple[int, int]], page_size: int) -> Tensor:
    """[T, TILE] slots of tiles (block, number) where pages do not hold whole tiles."""
    # Positions after the page of the block's last row repeat that page: masked, and finite. Later
    # entries of the table may name any page.
    token = integers([number for _, number in pairs])[:, None] * TILE + integers(range(TILE))
    last = [(blocks[b].position + blocks[b].rows - 1) // page_size for b, _ in pairs]
    page = torch.minimum(token // page_size, integers(last)[:, None])
    table = torch.tensor([blocks[b].pages for b, _ in pairs], dtype=torch.int64, device="cpu")
    return table.gather(1, page) * page_size + token % page_size


def _mask(newest: Tensor, lowest: Tensor, keys: int, group: int, whole: bool) -> Tensor | None:
    """[T, 1, rows * group, keys] fp32 for rows that attend to ``lowest`` to ``newest`` [T, rows] of
    the keys of a tile; None where that is all of them, unless ``whole``."""
    key = integers(range(keys))
    seen = key <= newest[..., None]
    if (lowest > 0).any():
        seen &= key >= lowest[..., None]
    if seen.all() and not whole:
        return None
    return masked(~seen).repeat_interleave(group, dim=1)[:, None]


def integers(values: Sequence[int]) -> Tensor:
    """[n] int64; a range is counted by torch."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, dtype=torch.int64, device="cpu")
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def masked(hidden: Tensor) -> Tensor:
    """fp32 in the shape of ``hidden``: MASKED where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill_(hidden, MASKED)


def _as_slice(numbers: list[int]) -> slice | Tensor:
    """As a slice where they rise by even steps."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    stop = numbers[-1] + 1
    even = step > 0 and numbers == list(range(numbers[0], stop, step))
    return slice(numbers[0], stop, step) if even else integers(numbers)
