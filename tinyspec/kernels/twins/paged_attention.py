"""Twin of paged attention: tiles of 128 tokens, each a flash-attention call, merged in order.

The tile, not the page, is what the bits see. A tile's partial result does not depend on how many
query rows or tiles share its call, provided the query rows are a multiple of four and, for heads
wider than 64 in fp32 and fp16, 16 at least (on an Intel CPU calls of 4 and 8 rows stand apart
there; measured: ``benchmarks/probe.py``), and partials are merged one after the other from position
0. A tile that is masked for a row has weight exactly 0 in that merge, so the tiles that other rows
need, and those that a window lets a whole block skip, change nothing.

Does not know requests or passes, and shares nothing between calls but what ``Segments.derived``
keeps for the layers of one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import gcd

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


@dataclass
class _Block:
    """Up to BLOCK_ROWS consecutive rows of one segment, and the tiles that they can see."""

    row: int
    rows: int
    position: int
    pages: list[int]
    first_tile: int
    num_tiles: int


@dataclass
class _Group:
    """Blocks of like height, most tiles first; their tiles ordered by depth, then by block.

    height: query rows of every block; a short block repeats its last row.
    rows:    [T * height] pass row of every tile's query rows.
    mask:    [T, 1, height * group, TILE] fp32, 0 or MASKED.
    tiles:   [T, TILE] slots, or [T] tiles of the cache where pages hold whole tiles.
    counts:  blocks that have a first, a second, ... tile.
    span:    where the tiles lie dense in the cache, the range of them; ``rows`` and ``mask`` then
        follow the range, and ``order`` [T] says where in it each tile is.
    results: pass row of every result, in the order of the blocks (of the range: of its tiles).
    """

    height: int
    rows: Tensor
    mask: Tensor
    tiles: Tensor
    counts: list[int]
    results: Tensor
    span: tuple[int, int] | None = None
    order: Tensor | None = None


def _blocks(segments: Segments, window: int) -> list[_Block]:
    starts = segments.cu_seqlens_q.tolist()
    blocks = []
    for s, (length, pages) in enumerate(
        zip(segments.seq_lens.tolist(), segments.page_table.tolist(), strict=True)
    ):
        first, end = starts[s], starts[s + 1]
        for row in range(first, end, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, end - row)
            position = length - (end - row)
            lowest = max(0, position - window + 1) // TILE if window else 0
            count = (position + rows - 1) // TILE + 1 - lowest
            blocks.append(_Block(row, rows, position, pages, lowest, count))
    return blocks


def _height(rows: int, unit: int) -> int:
    """Rows a block is padded to: few distinct heights, each a multiple of ``unit``."""
    step = max(unit, 1 << max(0, rows.bit_length() - 2))
    return -(-rows // step) * step


def _least_rows(q: Tensor) -> int:
    """Query rows that a call has at least: fewer change a row's bits."""
    return 4 if q.shape[2] <= 64 or q.dtype == torch.bfloat16 else 16


def _groups(segments: Segments, window: int, group: int, least: int) -> list[_Group]:
    # A multiple of four query rows per call, and ``least`` at least.
    unit = 4 // gcd(group, 4)

    def height(block: _Block) -> int:
        return _height(max(block.rows, -(-least // group)), unit)

    def batches(blocks: list[_Block], rows: int) -> Iterator[list[_Block]]:
        """Cut so that no call's scratch passes MAX_TILE_ROWS (a single block may)."""
        batch: list[_Block] = []
        size = 0
        for block in blocks:
            cost = block.num_tiles * rows * group
            if batch and size + cost > MAX_TILE_ROWS:
                yield batch
                batch, size = [], 0
            batch.append(block)
            size += cost
        yield batch

    ordered = sorted(_blocks(segments, window), key=lambda b: (height(b), -b.num_tiles))
    return [
        _group(batch, tall, segments, window, group)
        for tall, blocks in groupby(ordered, key=height)
        for batch in batches(list(blocks), tall)
    ]


def _group(
    blocks: list[_Block], height: int, segments: Segments, window: int, group: int
) -> _Group:
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
        # Positions behind the sequence's last page repeat that page: masked, and finite.
        token = torch.tensor(numbers)[:, None] * TILE + torch.arange(TILE)
        last = torch.tensor([len(blocks[b].pages) - 1 for b, _ in pairs])
        table = torch.tensor([blocks[b].pages for b, _ in pairs])
        page = torch.minimum(token // page_size, last[:, None])
        tiles = table.gather(1, page) * page_size + token % page_size

    facts = torch.tensor(
        [
            (blocks[b].row, blocks[b].rows - 1, blocks[b].position - number * TILE)
            for (b, _), number in zip(pairs, numbers, strict=True)
        ]
    )
    inside = torch.minimum(torch.arange(height), facts[:, 1:2])
    ahead = (facts[:, 2:] + inside)[..., None]
    key = torch.arange(TILE)
    seen = key <= ahead
    if window:
        seen &= key > ahead - window
    mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, MASKED)
    mask = mask.repeat_interleave(group, dim=1)[:, None]
    rows = facts[:, :1] + inside
    # With one tile a block there is nothing to merge, so nothing to put in order either.
    results = rows
    if len(counts) > 1:
        results = rows[order[: counts[0]]] if order is not None else rows[: counts[0]]
    elif order is not None and len(at) != len(places):
        results = rows[order]
    else:
        order = None
    return _Group(height, rows.flatten(), mask, tiles, counts, results, span, order)


def _tiles_of(cache: Tensor, plan: _Group) -> Tensor:
    """The tiles of K or V, [T, Hkv, TILE, D]: a view where they lie dense, else gathered."""
    heads, dim = cache.shape[2:]
    if plan.tiles.dim() == 1:
        whole = cache.view(-1, TILE, heads, dim)
        if plan.span is not None:
            found = whole[plan.span[0] : plan.span[1]]
        else:
            found = whole.index_select(0, plan.tiles)
    else:
        found = cache.flatten(0, 1).index_select(0, plan.tiles.flatten())
        found = found.view(-1, TILE, heads, dim)
    return found.transpose(1, 2)


def _partials(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention within each tile, [T, Hkv, rows, D] and its log-sum-exp [T, Hkv, rows] fp32."""
    if not softcap:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap).add_(mask)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.float()).div_(total)
    return out, (highest + total.log_()).squeeze(-1)


def _merge(out: Tensor, lse: Tensor, counts: list[int], sinks: Tensor | None) -> Tensor:
    """Weigh the partials of each block by their log-sum-exp, one after the other.

    out [T, Hkv, rows, D], which is overwritten, lse [T, Hkv, rows], ordered by depth;
    sinks [Hkv, rows] -> [B, ...].
    """
    if len(counts) == 1 and sinks is None:
        return out
    blocks = counts[0] if len(counts) > 1 else len(out)
    counts = [blocks, *counts[1:]]
    starts = [sum(counts[:depth]) for depth in range(len(counts))]
    highest = lse[:blocks].clone() if sinks is None else torch.maximum(lse[:blocks], sinks)
    for start, count in zip(starts[1:], counts[1:], strict=True):
        highest[:count] = torch.maximum(highest[:count], lse[start : start + count])
    merged = torch.zeros(blocks, *out.shape[1:], dtype=torch.float32)
    total = torch.zeros_like(highest) if sinks is None else (sinks - highest).exp_()
    for start, count in zip(starts, counts, strict=True):
        weight = (lse[start : start + count] - highest[:count]).exp_()
        total[:count] += weight
        merged[:count] += out[start : start + count].float().mul_(weight[..., None])
    return merged.div_(total[..., None])


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's pages.

    q [R, Hq, D], caches [N, page_size, Hkv, D] -> [R, Hq, D] in q's dtype; padding rows are 0.
    window: keys a row sees, itself included (0: all). softcap: c * tanh(s / c) on the scaled
    scores (0: none). sinks [Hq]: one more logit per head in the softmax's denominator.
    """
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    key = window, group, _least_rows(q)
    plans = segments.derived.get(key)
    if plans is None:
        plans = segments.derived[key] = _groups(segments, *key)

    result = torch.zeros(q.shape, dtype=q.dtype)
    for plan in plans:
        height = plan.height
        packed = q.index_select(0, plan.rows).view(-1, height, kv_heads, group, dim)
        packed = packed.transpose(1, 2).reshape(-1, kv_heads, height * group, dim)
        k, v = _tiles_of(k_cache, plan), _tiles_of(v_cache, plan)
        out, lse = _partials(packed, k, v, plan.mask, scale, softcap)
        if plan.order is not None:
            out, lse = out.index_select(0, plan.order), lse.index_select(0, plan.order)
        sink_rows = None
        if sinks is not None:
            sink_rows = sinks.float().view(kv_heads, 1, group).expand(-1, height, -1).flatten(1)
        merged = _merge(out, lse, plan.counts, sink_rows).to(q.dtype)
        merged = merged.view(-1, kv_heads, height, group, dim).transpose(1, 2)
        # A block's repeated last row is the same row computed again: the same bits, written twice.
        result.index_copy_(0, plan.results.flatten(), merged.reshape(-1, heads, dim))
    return result
