"""Attention over planned tiles: a partial result of each, merged in order. Knows no segments."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.twins import tile_plan
from tinyspec.kernels.twins.tile_plan import Group


def _tiles_of(cache: Tensor, plan: Group) -> Tensor:
    """The tiles of K or V, [T, Hkv, keys, D]: a view where they lie dense, else gathered."""
    (heads, dim), tile = cache.shape[2:], tile_plan.TILE
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
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
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


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Group,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of ``plan``: [n, Hq, D], of the pass rows ``plan.results`` in order.

    group: query heads that share a call.
    """
    heads, dim = q.shape[1:]
    height, parts = plan.height, heads // group
    rows = q if plan.straight and len(q) == len(plan.rows) else q.index_select(0, plan.rows)
    if height == 1:
        packed = rows.view(-1, parts, group, dim)
    else:
        packed = _between_heads(rows.reshape(-1, height, parts, group, dim))
        packed = packed.reshape(-1, parts, height * group, dim)
    k, v = _tiles_of(k_cache, plan), _tiles_of(v_cache, plan)
    out, lse = _partials(packed, k, v, plan.mask, scale, softcap)
    if plan.order is not None:
        out, lse = out.index_select(0, plan.order), lse.index_select(0, plan.order)
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().view(parts, 1, group).expand(-1, height, -1).flatten(1)
    merged = _merge(out, lse, plan.counts, sink_rows).to(q.dtype)
    if height == 1:
        return merged.reshape(-1, heads, dim)
    merged = _between_heads(merged.reshape(-1, parts, height, group, dim))
    return merged.view(-1, heads, dim)


def _between_heads(x: Tensor) -> Tensor:
    """[n, rows, heads, ...] as [n, heads, rows, ...] or back, contiguous."""
    if x.shape[1] == 1 or x.shape[2] == 1:
        return x.view(x.shape[0], x.shape[2], x.shape[1], *x.shape[3:])
    return x.transpose(1, 2).contiguous()
