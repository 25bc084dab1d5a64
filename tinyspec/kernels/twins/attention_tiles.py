"""Attention over planned tiles: a partial result of each, merged in order. Knows no sequences.

A masked key weighs 0, but 0 * NaN is NaN, and so is the score of a key that is not finite. Where a
result is not finite, it is computed once more with such keys and their values out of the sight of
the rows that do not attend to them; all others keep their bits.

torch's call reads and multiplies keys that the mask hides. A masked key adds exactly 0 to each sum,
so leaving it out changes bits only where the number of keys decides how sums are cut: on CPUs with
AVX2 and with AVX-512 at 8 and 16 keys, never at multiples of 32 (18,468 cases of three dtypes, head
sizes of 32 to 256 and 4 to 512 query rows). Compared before use (``cut_keeps_bits``); where it does
not hold, tiles are attended to whole.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from tinyspec.kernels.twins import attention_plan
from tinyspec.kernels.twins.attention_plan import (
    MASKED,
    QUERY_UNIT,
    TILE,
    UNLIKELY,
    TileCall,
    all_finite,
)
from tinyspec.kernels.twins.e4m3 import values

# Of a 16-bit head whose size is no multiple of it, torch cuts sums by the number of query rows.
HEAD_UNIT = 32
# Keys that may be left out behind all contexts of a call, and query rows at which torch begins to
# multiply more of them at a time.
KEYS_UNIT, LARGER = 32, (192, 768)
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _tiles_of(k_cache: Tensor, v_cache: Tensor, plan: TileCall) -> tuple[Tensor, Tensor]:
    """The tiles of K and V, [T, Hkv, keys, D]: views where they are dense, else gathered."""
    _, _, heads, dim = k_cache.shape
    tile = attention_plan.TILE
    if plan.span is not None:
        low, high = plan.span
        wide = heads * dim
        shape = high - low, heads, plan.keys, dim
        strides, start = (tile * wide, dim, wide, 1), low * tile * wide
        return (
            k_cache.as_strided(shape, strides, k_cache.storage_offset() + start),
            v_cache.as_strided(shape, strides, v_cache.storage_offset() + start),
        )

    def gathered(cache: Tensor) -> Tensor:
        if plan.tiles.dim() == 1:
            found = cache.view(-1, tile, heads, dim).index_select(0, plan.tiles)
        else:
            found = cache.flatten(0, 1).index_select(0, plan.tiles.flatten())
            found = found.view(-1, tile, heads, dim)
        return found[:, : plan.keys].transpose(1, 2)

    return gathered(k_cache), gathered(v_cache)


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
    [B, Hkv, rows, D] and the highest log-sum-exp of each row [B, Hkv, rows].
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
    return merged.div_(total[..., None]), highest


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
) -> Tensor:
    """Canonical attention of the rows of ``plan``: [n, Hq, D], of its pass rows in order.

    group: query heads that share a call.
    """
    dim = q.shape[2]
    packed, k, v = _inputs(q, k_cache, v_cache, plan, group)
    if q.dtype != torch.float32 and dim % HEAD_UNIT:
        packed, k, v = (pad(x, (0, -dim % HEAD_UNIT)) for x in (packed, k, v))
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().view(-1, 1, group).expand(-1, plan.height, -1)
        sink_rows = sink_rows.flatten(1)[:, : plan.queries]
    merged, highest = _merge(*_partials(packed, k, v, plan.mask, scale, softcap), plan, sink_rows)
    found = _outputs(merged, q, plan)
    if not all_finite(found, highest):
        k, v, mask = _hide(packed, k, v, plan.mask, scale, softcap)
        merged, highest = _merge(*_partials(packed, k, v, mask, scale, softcap), plan, sink_rows)
        merged = merged.masked_fill((highest < -UNLIKELY)[..., None], torch.nan)
        found = _outputs(merged, q, plan)
    # Among several tiles, those of weight 0 make 0 of -0; what rounds to -0 in q's dtype after that
    # (softcap and sinks have fp32 until here) stays -0. So every zero is 0.
    return found.add_(0.0)


def _inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TileCall, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query rows of every tile [T, parts, queries, D], its keys and its values.

    The query rows of a single block are repeated without a copy.
    """
    _, heads, dim = q.shape
    packed = q.reshape(-1, group * dim).index_select(0, plan.gather)
    packed = packed.reshape(-1, heads // group, plan.height * group, dim)[:, :, : plan.queries]
    k, v = _tiles_of(k_cache, v_cache, plan)
    if k.dtype != q.dtype:
        k, v = values(k, q.dtype), values(v, q.dtype)
    return packed.expand(len(k), -1, -1, -1), k, v


def _outputs(merged: Tensor, q: Tensor, plan: TileCall) -> Tensor:
    """Of results [B, parts, queries, D or more] those of the plan's rows [n, Hq, D]."""
    _, heads, dim = q.shape
    if merged.shape[3] > dim:
        merged = merged[..., :dim]
    found = merged.to(q.dtype).reshape(-1, dim)
    if plan.picked is None:
        found = found[: len(plan.rows) * heads].contiguous()
    else:
        found = found.index_select(0, plan.picked)
    return found.view(-1, heads, dim)


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
