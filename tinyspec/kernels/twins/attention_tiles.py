"""Attention over planned tiles: a partial result of each, merged in order. Knows no sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tinyspec.kernels.twins import attention_plan
from tinyspec.kernels.twins.attention_plan import TileCall

# Of a 16-bit head whose size is no multiple of it, torch cuts sums by the number of query rows.
HEAD_UNIT = 32
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _tiles_of(cache: Tensor, plan: TileCall) -> Tensor:
    """The tiles of K or V, [T, Hkv, keys, D]: a view where they are dense, else gathered."""
    (heads, dim), tile = cache.shape[2:], attention_plan.TILE
    if plan.span is not None:
        low, high = plan.span
        start = cache.storage_offset() + low * tile * heads * dim
        shape = high - low, heads, plan.keys, dim
        return cache.as_strided(shape, (tile * heads * dim, dim, heads * dim, 1), start)
    if plan.tiles.dim() == 1:
        found = cache.view(-1, tile, heads, dim).index_select(0, plan.tiles)
    else:
        found = cache.flatten(0, 1).index_select(0, plan.tiles.flatten())
        found = found.view(-1, tile, heads, dim)
    return found[:, : plan.keys].transpose(1, 2)


def _partials(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention within each tile, [T, Hkv, rows, D] and its log-sum-exp [T, Hkv, rows] fp32."""
    if not softcap:
        return flash_attention(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.float()).div_(total)
    return out, (highest + total.log_()).squeeze(-1)


def _at(x: Tensor, places: slice | Tensor) -> Tensor:
    return x[places] if isinstance(places, slice) else x.index_select(0, places)


def _merge(out: Tensor, lse: Tensor, plan: TileCall, sinks: Tensor | None) -> Tensor:
    """Weigh the partials of each block by their log-sum-exp, one after the other.

    out [T, Hkv, rows, D], which may be overwritten, lse [T, Hkv, rows]; sinks [Hkv, rows] ->
    [B, Hkv, rows, D].
    """
    if len(plan.depths) == 1 and sinks is None:
        return _at(out, plan.depths[0])
    highest = _at(lse, plan.depths[0])
    highest = highest.clone() if sinks is None else torch.maximum(highest, sinks)
    for depth in plan.depths[1:]:
        partial = _at(lse, depth)
        torch.maximum(highest[: len(partial)], partial, out=highest[: len(partial)])
    weights = lse.sub(highest if plan.owners is None else highest[plan.owners]).exp_()
    scaled = out.float().mul_(weights[..., None])
    total = torch.zeros_like(highest) if sinks is None else (sinks - highest).exp_()
    merged = torch.zeros(highest.shape + out.shape[-1:], dtype=torch.float32, device=out.device)
    for depth in plan.depths:
        weight = _at(weights, depth)
        total[: len(weight)] += weight
        merged[: len(weight)] += _at(scaled, depth)
    return merged.div_(total[..., None])


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TileCall,
    *,
    group: int,
    scale: float,
    exact: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of ``plan``: [n, Hq, D], of the pass rows ``plan.rows`` in order.

    group: query heads that share a call. exact: whether the rows are canonical.
    """
    heads, dim = q.shape[1:]
    height, parts = plan.height, heads // group
    rows = q if plan.in_order and len(q) == len(plan.rows) else q.index_select(0, plan.rows)
    packed = _swap_rows_and_heads(rows.reshape(-1, height, parts, group, dim))
    packed = packed.reshape(-1, parts, height * group, dim)
    if plan.owners is not None:
        packed = packed.index_select(0, plan.owners)
    k, v = _tiles_of(k_cache, plan), _tiles_of(v_cache, plan)
    if exact and q.dtype != torch.float32 and dim % HEAD_UNIT:
        packed, k, v = (pad(x, (0, -dim % HEAD_UNIT)) for x in (packed, k, v))
    out, lse = _partials(packed, k, v, plan.mask, scale, softcap)
    out = out[..., :dim]
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().view(parts, 1, group).expand(-1, height, -1).flatten(1)
    merged = _merge(out, lse, plan, sink_rows).to(q.dtype)
    merged = _swap_rows_and_heads(merged.reshape(-1, parts, height, group, dim))
    return merged.reshape(-1, heads, dim)


def _swap_rows_and_heads(x: Tensor) -> Tensor:
    """[n, rows, heads, ...] as [n, heads, rows, ...] or back, contiguous."""
    if x.shape[1] == 1 or x.shape[2] == 1:
        return x.view(x.shape[0], x.shape[2], x.shape[1], *x.shape[3:])
    return x.transpose(1, 2).contiguous()
