"""Attention of rows that need not be canonical: the same pages, by the fastest calls on a CPU.

Rows that are alone in their segments (decode rows) are not padded, in calls of one query row (bf16,
fp16) or of one group of heads (fp32): one call over all their contexts where those lie in the cache
at even distances, else calls over the tiles of the canonical reduction. Several rows of a sequence
go in one call over its context. Same mathematics, other bits, which may depend on what shares the
pass; but not whether they are finite. Many rows behind a long context attend to what lies before
them and to each other in a call each: neither needs a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.twins.attention_mask import CausalMask, all_finite, masked, segments
from tinyspec.kernels.twins.attention_plan import TileCall, plan_calls, query_blocks
from tinyspec.kernels.twins.attention_tiles import attend_plainly, flash_attention
from tinyspec.kernels.twins.e4m3 import values
from tinyspec.kernels.twins.index_tensors import integers

# Rows of a call that has a mask: rows * context * 4 bytes.
MASK_ROWS = 512
# Keys of a call are a multiple of it where the pages have so many: in bf16 512 rows over 501 or 502
# keys take twice as long as over 512, over 508 half as long again.
KEYS_UNIT = 16
# From so many rows and keys before them on these have a call of their own: 2048 rows from position
# 2048 on take 96 ms instead of 129 in fp32, 33 instead of 49 in bf16 (8 heads of 64, one thread),
# 256 rows from 256 on as long as in one call.
APART = 256


@dataclass
class _PromptCall:
    """Consecutive rows of one sequence, and the pages that they attend to.

    pages: their slots as a range, where they follow each other in the cache, else the pages.
    keys:  of these slots, how many are attended to: the context and, masked, a few after it.
    apart: the first of these, to which all rows attend in a call of their own.
    mask:  [1, 1, rows, keys - apart] fp32; None where the rows are the rest, without a bound.
    """

    rows: slice
    pages: slice | Tensor
    keys: int
    apart: int
    mask: Tensor | None


@dataclass
class _DecodeCall:
    """All rows that are alone in their segments; their contexts start at even distances.

    rows: they follow each other. start, step: slot of the first context, and from one to the next.
    keys: of each context, what any row attends to. mask: [rows, 1, 1, keys] fp32; None where every
    row attends to them all.
    """

    rows: slice
    start: int
    step: int
    keys: int
    mask: Tensor | None


@dataclass
class _Plan:
    """Calls for some rows of the pass each; ``tiles`` for decode rows that no ``decode`` serves."""

    decode: _DecodeCall | None
    tiles: list[TileCall]
    prompts: list[_PromptCall]


def _prompt_call(
    first: int, end: int, length: int, pages: list[int], size: int, causal: CausalMask
) -> _PromptCall:
    rows = end - first
    position = length - rows
    lowest = max(0, causal.lowest_key(position)) // size
    read = pages[lowest : -(-length // size)]
    skipped = lowest * size
    keys = min(-(-(length - skipped) // KEYS_UNIT) * KEYS_UNIT, len(read) * size)
    mask = None
    # Whether any of these keys is too old for a row, and so for the last one.
    bounded = causal.lowest_key(length - 1) > skipped
    apart = 0 if bounded else _apart(rows, position)
    if position > apart or bounded:
        row = integers(range(position, length))[:, None]
        key = integers(range(skipped + apart, skipped + keys))
        hidden = key > row
        if bounded:
            hidden |= key < causal.lowest_key(row)
        mask = masked(hidden)[None, None]
    where = slice(read[0], read[-1] + 1) if _consecutive(read) else integers(read)
    return _PromptCall(slice(first, end), where, keys, apart, mask)


def _apart(rows: int, position: int) -> int:
    """How many keys ``rows`` rows from ``position`` on attend to in a call of their own, where no
    bound hides any from them."""
    return position - position % KEYS_UNIT if min(rows, position) >= APART else 0


def _prompt_calls(
    first: int, end: int, length: int, pages: list[int], size: int, causal: CausalMask
) -> Iterator[_PromptCall]:
    """The rows of a sequence: all at once where no mask is needed, else cut, to bound the masks."""
    rows, bounded = end - first, causal.lowest_key(length - 1) > 0
    masked = bounded or _apart(rows, length - rows) < length - rows
    step = MASK_ROWS if masked else rows
    for row in range(first, end, step):
        last = min(row + step, end)
        yield _prompt_call(row, last, length - (end - last), pages, size, causal)


def _decode_call(
    rows: list[int], lengths: list[int], tables: list[list[int]], size: int, causal: CausalMask
) -> _DecodeCall | None:
    """One call for these rows over contexts of these lengths on these pages, if they lie so."""
    count = -(-lengths[0] // size)
    firsts = [pages[0] for pages in tables]
    step = firsts[1] - firsts[0] if len(firsts) > 1 else count
    even = (
        all(causal.lowest_key(length - 1) <= 0 for length in lengths)
        # Masked keys have to be finite: each context's own, not what lies between two of them.
        and all(-(-length // size) == count for length in lengths)
        and step >= count
        and all(after - before == step for before, after in pairwise(firsts))
        and _consecutive(rows)
        and all(_consecutive(pages[:count]) for pages in tables)
    )
    if not even:
        return None
    keys = max(lengths)
    mask = None
    if min(lengths) < keys:
        hidden = integers(range(keys)) >= integers(lengths)[:, None]
        mask = masked(hidden)[:, None, None]
    return _DecodeCall(slice(rows[0], rows[-1] + 1), firsts[0] * size, step * size, keys, mask)


def _consecutive(numbers: list[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(numbers))


def _plan(metadata: AttentionMetadata, causal: CausalMask, group: int, parts: int) -> _Plan:
    size = metadata.page_size
    alone: list[tuple[int, int, list[int]]] = []
    prompts: list[_PromptCall] = []
    for (first, end), length, pages in segments(metadata):
        if end == first + 1:
            alone.append((first, length, pages))
        elif end > first:  # passes of a fixed layout have segments without rows
            prompts += _prompt_calls(first, end, length, pages, size, causal)
    if not alone:
        return _Plan(None, [], prompts)
    rows, lengths, tables = map(list, zip(*alone, strict=True))
    decode = _decode_call(rows, lengths, tables, size, causal)
    if decode is not None:
        return _Plan(decode, [], prompts)
    single = set(rows)
    blocks = [block for block in query_blocks(metadata, causal) if block.row in single]
    tiles = plan_calls(blocks, size, causal, group, parts, unit=1)
    return _Plan(None, tiles, prompts)


def _attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, call: _DecodeCall, group: int, scale: float
) -> Tensor | None:
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    shape = rows, kv_heads, call.keys, dim
    wide = kv_heads * dim
    strides = call.step * wide, dim, wide, 1
    k, v = (
        x.as_strided(shape, strides, x.storage_offset() + call.start * wide)
        for x in (k_cache, v_cache)
    )
    if k.dtype != q.dtype:
        k, v = values(k, q.dtype), values(v, q.dtype)
    out, lse = flash_attention(
        q.view(rows, heads // group, group, dim), k, v, 0.0, attn_mask=call.mask, scale=scale
    )
    if call.mask is not None and not all_finite(out, lse):
        return None
    return out.reshape(rows, heads, dim).contiguous()


def _context(cache: Tensor, call: _PromptCall) -> Tensor:
    """Keys or values of a call, [1, Hkv, keys, D]: a view where its pages follow each other."""
    pages = call.pages
    found = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return found.flatten(0, 1)[: call.keys].transpose(0, 1)[None]


def plain_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    bounds: tuple[int, int],
) -> Tensor | None:
    """As ``paged_attention``, without softcap and sinks, and without a promise for the bits.

    bounds: window and chunk.
    None where something is not finite, and it may be what a row does not attend to: these ways
    cannot tell.
    """
    group = q.shape[1] // k_cache.shape[2] if q.dtype == torch.float32 else 1
    key = "plain", bounds, group
    plan = metadata.derived.get(key)
    if plan is None:
        plan = _plan(metadata, CausalMask(*bounds), group, q.shape[1] // group)
        metadata.derived[key] = plan
    decode = plan.decode
    if decode is not None and decode.rows == slice(0, len(q)):
        return _attend_decode(q, k_cache, v_cache, decode, group, scale)

    parts = [attend_plainly(q, k_cache, v_cache, call, group, scale) for call in plan.tiles]
    rows: list[slice | Tensor] = [call.layout.rows for call in plan.tiles]
    if decode is not None:
        rows.append(decode.rows)
        parts.append(_attend_decode(q[decode.rows], k_cache, v_cache, decode, group, scale))
    for prompt in plan.prompts:
        rows.append(prompt.rows)
        parts.append(_attend_prompt(q[prompt.rows], k_cache, v_cache, prompt, scale))
    if len(parts) == 1 and parts[0] is not None and len(parts[0]) == len(q):
        return parts[0]
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for place, part in zip(rows, parts, strict=True):
        if part is None:
            return None
        result[place] = part
    return result


def _attend_prompt(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, call: _PromptCall, scale: float
) -> Tensor | None:
    k, v = _context(k_cache, call), _context(v_cache, call)
    if k.dtype != q.dtype:
        k, v = values(k, q.dtype), values(v, q.dtype)
    rows, apart = q.transpose(0, 1)[None], call.apart
    out, lse = flash_attention(
        rows,
        k[:, :, apart:],
        v[:, :, apart:],
        0.0,
        call.mask is None,
        attn_mask=call.mask,
        scale=scale,
    )
    if not all_finite(out, lse):
        return None
    if apart:
        earlier, its = flash_attention(rows, k[:, :, :apart], v[:, :, :apart], 0.0, scale=scale)
        weight = torch.sigmoid(its - lse)[..., None]
        out = torch.lerp(out.float(), earlier.float(), weight).to(q.dtype)
        if not all_finite(out, its):
            return None
    return out[0].transpose(0, 1).contiguous()
