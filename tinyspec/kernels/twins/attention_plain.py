"""Attention for rows that need not be canonical: the same pages, by whatever is quickest on a CPU.

Rows that are alone in their sequences run in calls of one query row (bf16, fp16) or of one group of
heads (fp32), neither padded nor reaching further than any row sees: one call over all of their
context where that lies in the cache at even distances, else over the tiles of the canonical
reduction, in place. Several rows of a sequence run in one call over its context. Same mathematics,
other bits, and they may depend on what shares the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.twins.attention_plan import MASKED, Group, Sight, blocks_of, groups_of
from tinyspec.kernels.twins.attention_tiles import attend_tiles

# Rows of a call that has a mask: rows * context * 4 bytes.
MASK_ROWS = 512
# Keys of a stretch are a multiple of it where its pages have so many: in bf16 512 rows over 501 or
# 502 keys take twice as long as over 512, over 508 half as long again.
KEYS_UNIT = 16


@dataclass
class _Stretch:
    """Consecutive rows of one sequence, and the pages that they can see.

    pages: their slots as a range, where they follow each other in the cache, else the pages.
    keys:  of these slots, how many are attended to: the context and, masked, a few behind it.
    mask:  [1, 1, rows, keys] fp32; None where the rows are the whole context, all of it seen.
    """

    row: int
    rows: int
    pages: slice | Tensor
    keys: int
    mask: Tensor | None


@dataclass
class _Even:
    """All rows alone in their sequences, whose contexts start at even distances in the cache.

    row, rows: the first of them, which follow each other, and how many. start, step: slot of the
    first context, and from one to the next. keys: of each context, what any row sees. mask:
    [rows, 1, 1, keys] fp32; None where every row sees them all.
    """

    row: int
    rows: int
    start: int
    step: int
    keys: int
    mask: Tensor | None


@dataclass
class _Plan:
    """Calls for some rows of the pass each: in place of groups one for all rows that are alone."""

    even: _Even | None
    groups: list[Group]
    stretches: list[_Stretch]


def _stretch(
    first: int, end: int, length: int, pages: list[int], size: int, sight: Sight
) -> _Stretch:
    rows = end - first
    position = length - rows
    lowest = max(0, sight.lowest(position)) // size
    seen = pages[lowest : -(-length // size)]
    behind = lowest * size
    keys = min(-(-(length - behind) // KEYS_UNIT) * KEYS_UNIT, len(seen) * size)
    mask = None
    # Whether any of these keys is behind the sight of a row, and so of the last one.
    bounded = sight.lowest(length - 1) > behind
    if position or bounded:
        place, key = torch.arange(position, length)[:, None], torch.arange(behind, behind + keys)
        hidden = key > place
        if bounded:
            hidden |= key < sight.lowest(place)
        mask = torch.zeros(1, 1, rows, keys).masked_fill_(hidden, MASKED)
    where = slice(seen[0], seen[-1] + 1) if _in_a_row(seen) else torch.tensor(seen)
    return _Stretch(first, rows, where, keys, mask)


def _stretches(
    first: int, end: int, length: int, pages: list[int], size: int, sight: Sight
) -> Iterator[_Stretch]:
    """The rows of a sequence: all at once where no mask is needed, else cut, to bound the masks."""
    masked = length > end - first or sight.lowest(length - 1) > 0
    step = MASK_ROWS if masked else end - first
    for row in range(first, end, step):
        last = min(row + step, end)
        yield _stretch(row, last, length - (end - last), pages, size, sight)


def _even(
    places: list[int], lengths: list[int], tables: list[list[int]], size: int, sight: Sight
) -> _Even | None:
    """Rows at these places over contexts of these lengths on these pages, if they lie so."""
    keys = max(lengths)
    counts = [-(-length // size) for length in lengths]
    firsts = [pages[0] for pages in tables]
    step = firsts[1] - firsts[0] if len(firsts) > 1 else counts[0]
    if any(sight.lowest(length - 1) > 0 for length in lengths):
        return None
    # Masked keys have to be finite: each context's own, not what lies between two of them.
    if len(set(counts)) > 1 or step < counts[0]:
        return None
    if firsts != list(range(firsts[0], firsts[0] + step * len(firsts), step)):
        return None
    if not _in_a_row(places):
        return None
    if not all(_in_a_row(pages[: counts[0]]) for pages in tables):
        return None
    mask = None
    if min(lengths) < keys:
        hidden = torch.arange(keys) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)[:, None, None]
    return _Even(places[0], len(places), firsts[0] * size, step * size, keys, mask)


def _in_a_row(numbers: list[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(numbers))


def _plan(segments: AttentionMetadata, sight: Sight, group: int) -> _Plan:
    size = segments.page_size
    known = zip(
        pairwise(segments.cu_seqlens_q.tolist()),
        segments.seq_lens.tolist(),
        segments.page_table.tolist(),
        strict=True,
    )
    alone: list[tuple[int, int, list[int]]] = []
    stretches: list[_Stretch] = []
    for (first, end), length, pages in known:
        if end == first + 1:
            alone.append((first, length, pages))
        else:
            stretches += _stretches(first, end, length, pages, size, sight)
    if not alone:
        return _Plan(None, [], stretches)
    places, lengths, tables = map(list, zip(*alone, strict=True))
    even = _even(places, lengths, tables, size, sight)
    if even is not None:
        return _Plan(even, [], stretches)
    single = set(places)
    blocks = [block for block in blocks_of(segments, sight) if block.row in single]
    groups = groups_of(blocks, segments, sight, group, unit=1, least=1, whole=False)
    return _Plan(None, groups, stretches)


def _attend_even(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, even: _Even, group: int, scale: float
) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    shape = rows, kv_heads, even.keys, dim
    wide = kv_heads * dim
    k, v = (
        cache.as_strided(
            shape, (even.step * wide, dim, wide, 1), cache.storage_offset() + even.start * wide
        )
        for cache in (k_cache, v_cache)
    )
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.view(rows, heads // group, group, dim), k, v, 0.0, attn_mask=even.mask, scale=scale
    )
    return out.reshape(rows, heads, dim)


def _context(cache: Tensor, stretch: _Stretch) -> Tensor:
    """Keys or values of a stretch, [1, Hkv, keys, D]: a view where its pages follow each other."""
    pages = stretch.pages
    found = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return found.flatten(0, 1)[: stretch.keys].transpose(0, 1)[None]


def quick_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    segments: AttentionMetadata,
    *,
    scale: float,
    sight: Sight,
) -> Tensor:
    """As ``paged_attention``, without softcap and sinks, and without a promise for the bits."""
    group = q.shape[1] // k_cache.shape[2] if q.dtype == torch.float32 else 1
    key = "quick", sight, group
    plan = segments.derived.get(key)
    if plan is None:
        plan = segments.derived[key] = _plan(segments, sight, group)
    even = plan.even
    if even is not None and even.rows == len(q):
        return _attend_even(q, k_cache, v_cache, even, group, scale)

    parts = [
        attend_tiles(q, k_cache, v_cache, tiles, group=group, scale=scale, exact=False)
        for tiles in plan.groups
    ]
    if len(parts) == 1 and plan.groups[0].in_order and len(parts[0]) == len(q):
        return parts[0]
    result = torch.zeros(q.shape, dtype=q.dtype)
    if even is not None:
        rows = slice(even.row, even.row + even.rows)
        result[rows] = _attend_even(q[rows], k_cache, v_cache, even, group, scale)
    for tiles, found in zip(plan.groups, parts, strict=True):
        result.index_copy_(0, tiles.rows, found)
    for stretch in plan.stretches:
        rows = slice(stretch.row, stretch.row + stretch.rows)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[rows].transpose(0, 1)[None],
            _context(k_cache, stretch),
            _context(v_cache, stretch),
            0.0,
            stretch.mask is None,
            attn_mask=stretch.mask,
            scale=scale,
        )
        result[rows] = out[0].transpose(0, 1)
    return result
