"""Twin of paged attention: tiles of 128 tokens, each a flash-attention call, merged in order.

Bits depend on the tile, not on the page. A tile's partial result does not depend on how many query
rows or tiles share its call, provided that

- query rows are as many as ``padded_queries`` says and, in fp16, for heads wider than 64 in fp32
  and with a softcap, 16 at least, both of a call and of what torch cuts it into (calls of 4 and 8
  rows differ there, in fp16 with AVX512-FP16 at every head size: measured);
- 16-bit heads come in units of 32;
- keys that are left out behind all contexts of a call leave a multiple of KEYS_UNIT;
- partials are merged one after the other from position 0.

A tile that is masked for a row has weight exactly 0 in that merge, so the tiles that other rows
need, and those that a whole block skips by its window or chunk, change nothing. torch's call reads
and multiplies keys that the mask hides. A masked key adds exactly 0 to each sum, so leaving it out
changes bits only where the number of keys decides how sums are cut: on CPUs with AVX2 and with
AVX-512 at 8 and 16 keys, never at multiples of 32 (18,468 cases of three dtypes, head sizes of 32
to 256 and 4 to 512 query rows). Compared before use (``cut_keeps_bits``); where it does not hold,
tiles are attended to whole.

A masked key weighs 0, but 0 * NaN is NaN, and so is the score of a key that is not finite. Where a
result is not finite, it is computed once more with such keys and their values out of the sight of
the rows that do not attend to them; all others keep their bits. A row is NaN where it attends to a
value that is not finite.

Of passes that need not be canonical (``exact=False``) decode rows whose contexts lie in the cache
at even distances go in one call (``PageRun``): the same mathematics, other bits, which may depend
on what shares the pass; but not whether they are finite. For other rows the canonical reduction is
as fast. Does not know requests or passes; calls share only what ``AttentionMetadata.derived`` keeps
for the layers of one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.attention_plan import (
    MASKED,
    QUERY_UNIT,
    TILE,
    UNLIKELY,
    CausalMask,
    TileCall,
    all_finite,
    integers,
    masked,
    plan_calls,
    query_blocks,
    segments,
)
from tinyspec.kernels.twins.layers import values

# Of a 16-bit head whose size is no multiple of it, torch cuts sums by the number of query rows.
HEAD_UNIT = 32
# Keys that may be left out behind all contexts of a call, and query rows at which torch begins to
# multiply more of them at a time.
KEYS_UNIT, LARGER = 32, (192, 768)
# Decode rows that a call for contexts at even distances has at least, in the mean.
LEAST_ROWS = 4
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _tiles_of(cache: Tensor, plan: TileCall, dtype: torch.dtype) -> Tensor:
    """The tiles of K or V, [T, Hkv, keys, D]: a view if they lie at even steps, else gathered."""
    heads, dim = cache.shape[2:]
    if plan.span is not None:
        tiles = cache.view(-1, TILE, heads, dim)[plan.span]
    elif plan.tiles.dim() == 1:
        tiles = cache.view(-1, TILE, heads, dim).index_select(0, plan.tiles)
    else:
        found = cache.flatten(0, 1).index_select(0, plan.tiles.flatten())
        tiles = found.view(-1, TILE, heads, dim)
    return values(tiles[:, : plan.keys].transpose(1, 2), dtype)


def _partials(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention within each tile, [T, Hkv, rows, D] and its log-sum-exp [T, Hkv, rows] fp32."""
    if not softcap:
        return flash_attention(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    scores = _scores(q, k, scale, softcap).add_(mask)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.float()).div_(total)
    return out, (highest + total.log_()).squeeze(-1)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """[T, Hkv, rows, keys] fp32."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    return scores.mul_(scale / softcap).tanh_().mul_(softcap) if softcap else scores.mul_(scale)


def _hide(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and mask with which every row has the same result, whatever is in keys that the mask
    hides from it.

    Keys with anything that is not finite become 0, and so do such values; a finite value stays, as
    softcap makes a finite score of an infinite one. Rows that attend to them get their scores by
    the mask instead: NaN for +inf, and where it is the value that is not finite.
    """
    bad_keys, bad_values = (~x.isfinite().all(-1) for x in (k, v))
    scores = _scores(q, k, scale, softcap)
    scores.masked_fill_(bad_values[..., None, :] | (scores == torch.inf), torch.nan)
    mask = torch.where((mask == 0) & (bad_keys | bad_values)[..., None, :], scores, mask)
    k, v = k.masked_fill(bad_keys[..., None], 0), v.masked_fill(bad_values[..., None], 0)
    return k, v, mask


def _at(x: Tensor, places: slice | Tensor) -> Tensor:
    return x[places] if isinstance(places, slice) else x.index_select(0, places)


def _merge(out: Tensor, lse: Tensor, plan: TileCall, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weigh the partials of each block by their log-sum-exp, one after the other.

    out [T, Hkv, rows, D], which may be overwritten, lse [T, Hkv, rows]; sinks [Hkv, rows] ->
    [B, Hkv, rows, D] and the log-sum-exp of each row [B, Hkv, rows].
    """
    highest = _at(lse, plan.depths[0])
    if len(plan.depths) == 1 and sinks is None:
        return _at(out, plan.depths[0]), highest
    highest = highest.clone() if sinks is None else torch.maximum(highest, sinks)
    for depth in plan.depths[1:]:
        partial = _at(lse, depth)
        torch.maximum(highest[: len(partial)], partial, out=highest[: len(partial)])
    weights = lse.sub(highest if plan.owners is None else highest[plan.owners]).exp_()
    scaled = out.float().mul_(weights[..., None])
    total = torch.zeros_like(highest) if sinks is None else (sinks - highest).exp_()
    merged = lse.new_zeros(highest.shape + out.shape[-1:])
    for depth in plan.depths:
        weight = _at(weights, depth)
        total[: len(weight)] += weight
        merged[: len(weight)] += _at(scaled, depth)
    return merged.div_(total[..., None]), highest.add_(total.log_())


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TileCall,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Canonical attention of the rows of ``plan``: [n, Hq, D], of its pass rows in order.

    group: query heads that share a call. lse: as for ``paged_attention``.
    """
    _, heads, dim = q.shape
    packed = q.reshape(-1, group * dim).index_select(0, plan.gather)
    packed = packed.reshape(-1, heads // group, plan.height * group, dim)[:, :, : plan.queries]
    k, v = (_tiles_of(cache, plan, q.dtype) for cache in (k_cache, v_cache))
    packed = packed.expand(len(k), -1, -1, -1)  # the query rows of a single block are there once
    if q.dtype != torch.float32 and dim % HEAD_UNIT:
        packed, k, v = (pad(x, (0, -dim % HEAD_UNIT)) for x in (packed, k, v))
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().view(-1, 1, group).expand(-1, plan.height, -1)
        sink_rows = sink_rows.flatten(1)[:, : plan.queries]
    merged, sums = _merge(*_partials(packed, k, v, plan.mask, scale, softcap), plan, sink_rows)
    found = _outputs(merged, q, plan)
    if not all_finite(found, sums):
        k, v, mask = _hide(packed, k, v, plan.mask, scale, softcap)
        merged, sums = _merge(*_partials(packed, k, v, mask, scale, softcap), plan, sink_rows)
        merged = merged.masked_fill((sums < -UNLIKELY)[..., None], torch.nan)
        found = _outputs(merged, q, plan)
    if lse is not None:
        lse[plan.rows] = sums.reshape(-1).index_select(0, plan.picked).view(-1, heads)
    # Among several tiles, those of weight 0 make 0 of -0; what rounds to -0 in q's dtype after that
    # (softcap and sinks have fp32 until here) stays -0. So every zero is 0.
    return found.add_(0.0)


def _outputs(merged: Tensor, q: Tensor, plan: TileCall) -> Tensor:
    """Of results [B, parts, queries, D or more] those of the plan's rows [n, Hq, D]."""
    _, heads, dim = q.shape
    found = merged[..., :dim].to(q.dtype).reshape(-1, dim)
    return found.index_select(0, plan.picked).view(-1, heads, dim)


@dataclass
class PageRun:
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
        """Attention of its rows [rows, Hq, D]; None where something is not finite, and it may be
        what a row does not attend to."""
        k, v = self._contexts(k_cache, q.dtype), self._contexts(v_cache, q.dtype)
        heads, dim = q.shape[1:]
        rows = q[self.rows].reshape(len(k), k.shape[1], -1, dim)
        out, lse = flash_attention(rows, k, v, 0.0, attn_mask=self.mask, scale=scale)
        if self.mask is not None and not all_finite(out, lse):
            return None
        return out.reshape(-1, heads, dim).contiguous()


def page_runs(metadata: AttentionMetadata, causal: CausalMask) -> list[PageRun]:
    """A call for each stretch of decode rows whose contexts lie so; none where stretches would be
    short."""
    size = metadata.page_size
    stretches: list[list[tuple[int, int, int]]] = []  # of rows, their lengths and first pages
    step = count = alone = 0
    for (row, end), length, pages in segments(metadata):
        if end != row + 1:  # several, or none
            continue
        alone += 1
        number = -(-length // size)
        if causal.lowest_key(length - 1) > 0 or not _consecutive(pages[:number]):
            return []
        stretch = stretches[-1] if stretches else []
        ahead = pages[0] - stretch[-1][2] if stretch else 0
        # Masked keys have to be finite: each context's own, not what lies between two of them.
        fits = stretch and row == stretch[-1][0] + 1 and number == count <= ahead
        if not fits or (len(stretch) > 1 and ahead != step):
            stretches.append(stretch := [])
        stretch.append((row, length, pages[0]))
        count, step = number, ahead
    if len(stretches) > max(1, alone // LEAST_ROWS):
        return []
    return [_page_run(stretch, size) for stretch in stretches]


def _page_run(stretch: list[tuple[int, int, int]], size: int) -> PageRun:
    rows, lengths, firsts = map(list, zip(*stretch, strict=True))
    keys = max(lengths)
    step = firsts[1] - firsts[0] if len(firsts) > 1 else -(-keys // size)
    mask = None
    if min(lengths) < keys:
        mask = masked(integers(range(keys)) >= integers(lengths)[:, None])[:, None, None]
    return PageRun(slice(rows[0], rows[-1] + 1), firsts[0] * size, step * size, keys, mask)


def _consecutive(numbers: list[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(numbers))


@cache
def cut_keeps_bits(dtype: torch.dtype, dim: int, least: int) -> bool:
    """Whether flash attention over the first 32, 64 and 96 keys of a tile has the bits of one over
    all 128, those behind masked.

    dim: of a head. least: query rows that a call has at least.
    """
    wide = dim if dtype == torch.float32 else dim + -dim % HEAD_UNIT
    generator = torch.Generator().manual_seed(wide)
    most = LARGER[-1]
    values = torch.randn(
        2, most + 2 * TILE, wide, dtype=torch.float32, device="cpu", generator=generator
    )
    q, k, v = values.to(dtype)[None].split((most, TILE, TILE), dim=2)
    for rows in (least, QUERY_UNIT, *LARGER):
        for keys in range(KEYS_UNIT, TILE, KEYS_UNIT):
            # The last of these keys is hidden as well.
            mask = torch.zeros(1, 1, rows, TILE, dtype=torch.float32, device="cpu")
            mask[..., keys - 1 :] = MASKED
            whole, cut = (
                flash_attention(
                    q[:, :, :rows], k[:, :, :n], v[:, :, :n], 0.0, attn_mask=mask[..., :n]
                )
                for n in (TILE, keys)
            )
            if not all(map(torch.equal, whole, cut)):
                return False
    return True


def _least_rows(q: Tensor, softcap: float) -> int:
    """Query rows that a call has at least: fewer change a row's bits.

    fp16 on a CPU with AVX512-FP16 needs 16 at every head size.
    """
    wide = q.dtype != torch.bfloat16 or softcap  # with a softcap scores are multiplied in fp32
    return 16 if q.dtype == torch.float16 or (wide and q.shape[2] > 64) else 4


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's pages.

    q [R, Hq, D], caches [N, page_size, Hkv, D], in q's dtype or as e4m3 codes (uint8) -> [R, Hq, D]
    in q's dtype; padding rows are 0. window: keys a row attends to, its own included (0: all).
    chunk: a row attends to the keys since the last multiple of it, its own included (0: all; Llama
    4); not along with a window. softcap: c * tanh(s / c) on the scaled scores (0: none). sinks
    [Hq]: one more logit per head in the softmax's denominator. lse [R, Hq] fp32: where the
    logarithm of that denominator is written, of rows of a canonical pass.
    """
    assert not (window and chunk)
    causal, derived = CausalMask(window, chunk), metadata.derived
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    found: list[tuple[Any, Tensor]] = []  # slices or indices of rows
    # torch multiplies a single row of bf16 numbers in three times the time of four.
    one_row = group == 1 and q.dtype == torch.bfloat16
    if not (metadata.exact or softcap or sinks is not None or one_row):
        if ("runs", causal) not in derived:
            derived["runs", causal] = page_runs(metadata, causal)
        for run in derived["runs", causal]:
            part = run.attend(q, k_cache, v_cache, scale)
            if part is not None:
                found.append((run.rows, part))

    if len(found) == 1 and len(found[0][1]) == len(q):
        return found[0][1]
    served = frozenset(row for rows, _ in found for row in range(len(q))[rows])
    key = "tiles", causal, group, q.shape, softcap > 0, served
    if key not in derived:
        blocks = [b for b in query_blocks(metadata, causal) if b.row not in served]
        least = _least_rows(q, softcap)
        cuts = not softcap and cut_keeps_bits(q.dtype, q.shape[2], least)
        unit = KEYS_UNIT if cuts else TILE
        given = blocks, metadata.page_size, causal, group, kv_heads
        derived[key] = plan_calls(*given, least=least, unit=unit, kept=metadata.kept)
    for tiles in derived[key]:
        scores: Any = {"scale": scale, "softcap": softcap, "sinks": sinks, "lse": lse}
        part = attend_tiles(q, k_cache, v_cache, tiles, group=group, **scores)
        found.append((tiles.rows, part))
    if len(found) == 1 and len(found[0][1]) == len(q):
        return found[0][1]
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for rows, part in found:
        result[rows] = part
    return result
