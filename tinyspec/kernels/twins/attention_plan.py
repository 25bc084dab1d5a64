"""Which tiles of which pages a pass's rows attend to: the plan of the attention twin.

Computed once per pass and read again in every layer. Knows lists of pages and positions; no keys
and no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata

TILE = 128
# Query rows of one block. More would only mask more of the tiles behind the block's own rows.
BLOCK_ROWS = 128
# Bounds the scratch of one call: tiles * query rows.
MAX_TILE_ROWS = 1 << 13
# A block of so many query rows and tiles has a call of its own: it reads the tiles where they are
# and repeats no query row, while blocks of one sequence in one call gather what they share. 512
# rows from position 1536 on take a fourth less time so in fp32; with few tiles the calls cost as
# much as they save.
ALONE_QUERIES, ALONE_TILES = 64, 8
# Layouts of calls that are kept for the passes behind.
KEPT = 4
# torch multiplies so many query rows at a time, from 192 of them on twice as many, from 768 on 256.
QUERY_UNIT = 32
# Finite, so that a tile that is masked for a row yields a finite result, which then weighs 0; and
# larger than any score.
MASKED = -3e38
# Between any sum of scores and one masked score.
UNLIKELY = -MASKED / 2

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


def segments(metadata: AttentionMetadata) -> Iterator[tuple[tuple[int, int], int, list[int]]]:
    """Of every segment its rows (first, end), its context length and its pages."""
    return zip(
        pairwise(metadata.cu_seqlens_q.tolist()),
        metadata.seq_lens.tolist(),
        metadata.page_table.tolist(),
        strict=True,
    )


def masked(hidden: Tensor) -> Tensor:
    """fp32 in the shape of ``hidden``: MASKED where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill_(hidden, MASKED)


def all_finite(out: Tensor, highest: Tensor) -> bool:
    """Whether results and the highest scores that they come from are finite and not MASKED, by
    their sums: False also where these are beyond fp32.

    In 16 bits torch makes 0 of a row with a score of +inf. Where all scores of a row are -inf, only
    masked ones are left.
    """
    wide = torch.float32 if out.dtype == torch.float16 else None
    total = float(out.sum(dtype=wide)), float(highest.sum())
    return math.isfinite(total[0]) and abs(total[1]) < UNLIKELY


def integers(values: Sequence[int]) -> Tensor:
    """[n] int64; a range is counted by torch."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, dtype=torch.int64, device="cpu")
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def as_slice(numbers: list[int]) -> slice | Tensor:
    """As a slice where they rise by even steps."""
    start, stop = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
    step = numbers[1] - start if len(numbers) > 1 else 1
    even = step > 0 and numbers == list(range(start, stop, step))
    return slice(start, stop, step) if even else integers(numbers)


@dataclass
class Block:
    """Up to BLOCK_ROWS consecutive rows of one segment, and the tiles that they attend to."""

    row: int
    rows: int
    position: int
    pages: list[int]
    first_tile: int
    num_tiles: int

    def shape(self, page_size: int) -> BlockShape:
        """Without its position."""
        last = (self.position + self.rows - 1) // page_size
        pages = tuple(self.pages[: last + 1])
        return BlockShape(self.row, self.rows, self.first_tile, self.num_tiles, pages)


class BlockShape(NamedTuple):
    """Of a block; pages: up to that of its last row."""

    row: int
    rows: int
    first_tile: int
    num_tiles: int
    pages: tuple[int, ...]


@dataclass
class TileCall:
    """One flash-attention call: blocks padded to the same height, most tiles first. Its tiles are
    ordered by depth, then by block, or, where they lie at even steps, as in the cache.

    queries: query rows of every block in each of the call's heads.
    height: pass rows that a block's query rows are taken from; a short block repeats its last row.
    gather: [T * parts * height] the groups of heads, counted through the pass, that are every
            tile's query rows.
    rows:   [n] the pass rows that the call computes, ascending.
    picked: [n * parts * group] where these have their heads in the result [B, parts, queries].
    owners: [T] block of every tile; None where tiles and blocks are the same in the same order, or
            all tiles are one block's, whose query rows are there once.
    mask:   [T, 1, queries, keys] fp32, 0 or MASKED.
    keys:   how many keys of every tile are attended to.
    tiles:  [T, TILE] slots, or [T] tiles of the cache where pages hold whole tiles.
    span:   where the tiles are most of those at even steps in the cache: all of these.
    depths: indices of the blocks' first tiles, of their second tiles, and so on.
    """

    queries: int
    height: int
    gather: Tensor
    rows: slice | Tensor
    picked: Tensor
    owners: Tensor | None
    mask: Tensor
    keys: int
    tiles: Tensor
    span: slice | None
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


def padded_queries(rows: int, group: int, least: int) -> int:
    """Query rows that ``rows`` rows of ``group`` heads are padded to, ``least`` or more: few
    distinct numbers, which torch cuts without a short rest.

    Groups that are powers of two have multiples of four in steps of a quarter. Other groups have
    powers of two, and from QUERY_UNIT on multiples of it: a rest of 4 or 8 query rows would be
    multiplied in another order than the rows before it.
    """
    queries = max(rows * group, least)
    unit = max(4, group)
    if group & (group - 1):
        if queries <= QUERY_UNIT:
            return 1 << (queries - 1).bit_length()
        unit = QUERY_UNIT
    step = max(unit, 1 << max(0, queries.bit_length() - 2))
    return -(-queries // step) * step


def plan_calls(
    blocks: list[Block],
    page_size: int,
    causal: CausalMask,
    group: int,
    parts: int,
    *,
    least: int,
    unit: int,
    kept: dict[Any, Any] | None = None,
) -> list[TileCall]:
    """Calls for ``blocks``, each block padded to ``padded_queries``, or short prompts to those of
    the longest of them: one call is faster than several.

    group: query heads that share a head of the call, of which there are ``parts``. unit: where
    blocks have one tile, the keys behind all contexts are left out in units of so many. kept: what
    passes leave to the next ones.
    """
    kept = {} if kept is None else kept
    heights = {block.rows: padded_queries(block.rows, group, least) for block in blocks}
    prompts = {block.rows for block in blocks if block.position == 0 and block.rows > 1}
    if short := [rows for rows in prompts if heights[rows] <= QUERY_UNIT]:
        heights |= dict.fromkeys(short, heights[max(short)])
    batches: list[list[Block]] = []
    size = 0
    for block in sorted(blocks, key=lambda b: (heights[b.rows], -b.num_tiles)):
        height = heights[block.rows]
        alone = height >= ALONE_QUERIES and block.num_tiles >= ALONE_TILES
        cost = MAX_TILE_ROWS if alone else block.num_tiles * height
        if not batches or size + cost > MAX_TILE_ROWS or heights[batches[-1][0].rows] != height:
            batches.append([])
            size = 0
        batches[-1].append(block)
        size += cost
    return [
        _plan_call(batch, heights[batch[0].rows], page_size, causal, group, parts, unit, kept)
        for batch in batches
    ]


class _Layout(NamedTuple):
    """What a call has as long as its blocks have the same rows and tiles, whatever their positions.

    inside [B, rows]: of every row of a block its place in it. owners: block of every tile, [0] for
    a single one. first [T, 1]: every tile's first position. call: without its mask.
    """

    inside: Tensor
    owners: Tensor
    first: Tensor
    call: TileCall


def _plan_call(
    blocks: list[Block],
    queries: int,
    page_size: int,
    causal: CausalMask,
    group: int,
    parts: int,
    unit: int,
    kept: dict[Any, _Layout],
) -> TileCall:
    shapes = tuple(block.shape(page_size) for block in blocks)
    given = shapes, queries, page_size, group, parts
    if (layout := kept.get(given)) is None:
        layout = _layout(*given)
        if all(block.rows == 1 for block in blocks):  # the next pass has it, until a tile is full
            if len(kept) >= KEPT:
                kept.clear()
            kept[given] = layout
    inside, owners, first, call = layout
    # Of every row of every tile its position from the tile's first key: [T, rows], or of one block
    # [1, rows].
    start = integers([block.position for block in blocks])[:, None]
    position = (start + inside).index_select(0, owners)
    newest = position - first
    # With one tile a block, the keys after those of all rows can be left out.
    keys = TILE
    if len(call.depths) == 1:
        keys = min(TILE, -(-(int(newest.max()) + 1) // unit) * unit)
    key = integers(range(keys))
    hidden = key > newest[..., None]
    if causal != CausalMask():
        hidden |= key < (causal.lowest_key(position) - first)[..., None]
    mask = masked(hidden).repeat_interleave(group, dim=1)[:, None, :queries]
    return replace(call, mask=mask, keys=keys)


def _layout(
    shapes: tuple[BlockShape, ...], queries: int, page_size: int, group: int, parts: int
) -> _Layout:
    # How many blocks have a first tile, a second one, ...: those with most tiles come first.
    counts = [
        len([block for block in shapes if block.num_tiles > depth])
        for depth in range(shapes[0].num_tiles)
    ]
    # Block and number of every tile.
    pairs = [(b, shapes[b].first_tile + depth) for depth, n in enumerate(counts) for b in range(n)]
    tiles, span, index = _find_tiles(shapes, pairs, page_size, queries)
    if span is not None:
        # A tile of the span that no block has gets the first block's rows; its result is not read.
        at = dict(zip(index, pairs, strict=True))
        pairs = [at.get(place, pairs[0]) for place in range(max(index) + 1)]

    owners = [b for b, _ in pairs] if len(shapes) > 1 else [0]
    height = -(-queries // group)
    columns = [(block.row, block.rows - 1) for block in shapes]
    known = torch.tensor(columns, dtype=torch.int64, device="cpu")
    inside = torch.minimum(integers(range(height)), known[:, 1:])
    # Of every row of every tile its row in the pass.
    gather = (known[:, :1] + inside)[owners, None] * parts + integers(range(parts))[:, None]
    ends = list(accumulate(counts, initial=0))
    rows, picked = _results(shapes, queries, group, parts)
    call = TileCall(
        queries=queries,
        height=height,
        gather=gather.flatten(),
        rows=rows,
        picked=picked,
        owners=None if owners == list(range(len(shapes))) else integers(owners),
        mask=torch.empty(0, dtype=torch.float32, device="cpu"),
        keys=TILE,
        tiles=tiles,
        span=span,
        depths=[as_slice(index[start:end]) for start, end in pairwise(ends)],
    )
    first = integers([number for _, number in pairs])[:, None] * TILE
    return _Layout(inside, integers(owners), first, call)


def _results(
    blocks: Sequence[BlockShape], queries: int, group: int, parts: int
) -> tuple[slice | Tensor, Tensor]:
    """``TileCall.rows`` and ``TileCall.picked``."""
    own = sorted((block.row, n * parts * queries, block.rows) for n, block in enumerate(blocks))
    query = integers([place + n * group for _, place, count in own for n in range(count)])
    heads = integers(range(group)) + integers(range(parts))[:, None] * queries
    rows = [first + n for first, _, count in own for n in range(count)]
    return as_slice(rows), (query[:, None, None] + heads).flatten()


def _find_tiles(
    blocks: Sequence[BlockShape], pairs: list[tuple[int, int]], page_size: int, queries: int
) -> tuple[Tensor, slice | None, list[int]]:
    """``TileCall.tiles`` and ``TileCall.span`` for tiles (block, number), and where each of them is
    in the call."""
    every = list(range(len(pairs)))
    if page_size % TILE:
        return _slots(blocks, pairs, page_size), None, every
    ratio = page_size // TILE
    places = [blocks[b].pages[number // ratio] * ratio + number % ratio for b, number in pairs]
    low, high = min(places), max(places)
    # More than 1 where sequences have as many pages each, and all are in the n-th of them.
    step = math.gcd(*(place - low for place in places)) or 1
    # For few query rows it is cheaper to multiply tiles that nobody needs than to copy the others.
    most = 2.5 * len(places) if queries <= QUERY_UNIT else len(places)
    if (high - low) // step >= most or len(set(places)) < len(places):
        return integers(places), None, every
    span = slice(low, high + 1, step)
    return integers(places), span, [(place - low) // step for place in places]


def _slots(blocks: Sequence[BlockShape], pairs: list[tuple[int, int]], page_size: int) -> Tensor:
    """[T, TILE] slots of tiles (block, number) where pages do not hold whole tiles."""
    # Positions after the page of the block's last row repeat that page: masked, and finite. Later
    # entries of the table may name any page.
    token = integers([number for _, number in pairs])[:, None] * TILE + integers(range(TILE))
    pages = [blocks[b].pages for b, _ in pairs]
    page = torch.minimum(token // page_size, integers([len(own) - 1 for own in pages])[:, None])
    most = max(map(len, pages))
    padded = [[*own, *[0] * (most - len(own))] for own in pages]
    table = torch.tensor(padded, dtype=torch.int64, device="cpu")
    return table.gather(1, page) * page_size + token % page_size
