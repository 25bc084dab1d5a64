"""Attention of rows that need not be canonical, where it is faster: the same pages, in fewer calls.

Rows that are alone in their segments (decode rows) go in one call over all their contexts where
those lie in the cache at even distances; where they do not, the canonical reduction is as fast.
Several rows of a sequence go in one call over its context. Same mathematics, other bits, which may
depend on what shares the pass; but not whether they are finite. Many rows behind a long context
attend to what lies before them and to each other in a call each: neither needs a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.attention_plan import (
    CausalMask,
    all_finite,
    flash_attention,
    integers,
    masked,
    segments,
)
from tinyspec.kernels.twins.layers import values

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
class PromptCall:
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

    def _context(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values, [1, Hkv, keys, D]: a view where the pages follow each other."""
        pages = self.pages
        found = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
        return values(found.flatten(0, 1)[: self.keys].transpose(0, 1)[None], dtype)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor | None:
        """Attention of its rows [rows, Hq, D]; None where something is not finite, and it may be
        what a row does not attend to."""
        k, v = self._context(k_cache, q.dtype), self._context(v_cache, q.dtype)
        rows, apart, mask = q[self.rows].transpose(0, 1)[None], self.apart, self.mask
        own = k[:, :, apart:], v[:, :, apart:]
        out, lse = flash_attention(rows, *own, 0.0, mask is None, attn_mask=mask, scale=scale)
        if not all_finite(out, lse):
            return None
        if apart:
            earlier, its = flash_attention(rows, k[:, :, :apart], v[:, :, :apart], 0.0, scale=scale)
            weight = torch.sigmoid(its - lse)[..., None]
            out = torch.lerp(out.float(), earlier.float(), weight).to(q.dtype)
            if not all_finite(out, its):
                return None
        return out[0].transpose(0, 1).contiguous()


@dataclass
class DecodeCall:
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

    def _contexts(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values, a view [rows, Hkv, keys, D]."""
        _, _, heads, dim = cache.shape
        wide, rows = heads * dim, self.rows.stop - self.rows.start
        shape, strides = (rows, heads, self.keys, dim), (self.step * wide, dim, wide, 1)
        start = cache.storage_offset() + self.start * wide
        return values(cache.as_strided(shape, strides, start), dtype)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor | None:
        """As ``PromptCall.attend``."""
        k, v = self._contexts(k_cache, q.dtype), self._contexts(v_cache, q.dtype)
        heads, dim = q.shape[1:]
        rows = q[self.rows].reshape(len(k), k.shape[1], -1, dim)
        out, lse = flash_attention(rows, k, v, 0.0, attn_mask=self.mask, scale=scale)
        if self.mask is not None and not all_finite(out, lse):
            return None
        return out.reshape(-1, heads, dim).contiguous()


PlainCall = PromptCall | DecodeCall


def _prompt_call(
    first: int, end: int, length: int, pages: list[int], size: int, causal: CausalMask
) -> PromptCall:
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
    return PromptCall(slice(first, end), where, keys, apart, mask)


def _apart(rows: int, position: int) -> int:
    """How many keys ``rows`` rows from ``position`` on attend to in a call of their own, where no
    bound hides any from them."""
    return position - position % KEYS_UNIT if min(rows, position) >= APART else 0


def _prompt_calls(
    first: int, end: int, length: int, pages: list[int], size: int, causal: CausalMask
) -> Iterator[PromptCall]:
    """The rows of a sequence: all at once where no mask is needed, else cut, to bound the masks."""
    rows, bounded = end - first, causal.lowest_key(length - 1) > 0
    masked = bounded or _apart(rows, length - rows) < length - rows
    step = MASK_ROWS if masked else rows
    for row in range(first, end, step):
        last = min(row + step, end)
        yield _prompt_call(row, last, length - (end - last), pages, size, causal)


def _decode_call(
    rows: list[int], lengths: list[int], tables: list[list[int]], size: int, causal: CausalMask
) -> DecodeCall | None:
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
    return DecodeCall(slice(rows[0], rows[-1] + 1), firsts[0] * size, step * size, keys, mask)


def _consecutive(numbers: list[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(numbers))


def plain_calls(
    metadata: AttentionMetadata, causal: CausalMask, group: int, dtype: torch.dtype
) -> list[PlainCall]:
    """Calls for the rows of a pass but those that the canonical reduction serves as fast.

    group: query heads of a KV head; torch multiplies a single row of bf16 numbers in three times
    the time of the four that the canonical reduction makes of it.
    """
    size = metadata.page_size
    alone: list[tuple[int, int, list[int]]] = []
    calls: list[PlainCall] = []
    for (first, end), length, pages in segments(metadata):
        if end == first + 1:
            alone.append((first, length, pages))
        elif end > first:  # passes of a fixed layout have segments without rows
            calls += _prompt_calls(first, end, length, pages, size, causal)
    if alone and (group > 1 or dtype != torch.bfloat16):
        rows, lengths, tables = map(list, zip(*alone, strict=True))
        decode = _decode_call(rows, lengths, tables, size, causal)
        calls += [] if decode is None else [decode]
    return calls
