"""Twin of the fused KV write: q/k norm, RoPE, scatter of k and v into their slots.

Follows transformers operation by operation and dtype by dtype, so it rounds where transformers
does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tinyspec.kernels.twins.e4m3 import stored

Derived = dict[Hashable, Any]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def _signed(sin: Tensor, interleaved: bool) -> Tensor:
    """(-sin, sin): (-x2, x1) * sin is (x2, x1) * (-sin, sin), to the bit."""
    if interleaved:
        return torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    first, second = sin.split(sin.shape[-1] // 2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def _rotate(x: Tensor, cos: Tensor, signed: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the head's first ``cos.shape[-1]`` dimensions, rounded once where cos and sin are
    wider than x; the pairs are halves, or even and odd dimensions (``interleaved``)."""
    rot = cos.shape[-1]
    part = x if rot == x.shape[-1] else x[..., :rot]
    if cos.dtype != x.dtype:
        part = part.to(torch.promote_types(x.dtype, cos.dtype))
    if interleaved:
        partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = part.roll(rot // 2, dims=-1)
    out = (part * cos).add_(partner.mul_(signed))
    if out.dtype != x.dtype:
        out = out.to(x.dtype)
    return out if rot == x.shape[-1] else torch.cat((out, x[..., rot:]), dim=-1)


def _angles(cos: Tensor, sin: Tensor, interleaved: bool, derived: Derived) -> tuple[Tensor, Tensor]:
    """cos and signed sin [R, 1, rot] for ``_rotate``, once for all layers that share them."""
    key = "angles", interleaved, id(cos), id(sin)
    if key not in derived:
        # Keep cos and sin alive: ``id()`` is the key.
        derived[key] = cos[:, None], _signed(sin, interleaved)[:, None], cos, sin
    return derived[key][:2]


def _written(slot_mapping: Tensor, derived: Derived) -> tuple[Tensor | None, Tensor]:
    """The rows that are written, None for all, and their slots."""
    key = "written", id(slot_mapping)
    if key not in derived:
        rows, slots = None, slot_mapping
        if int(slot_mapping.min()) < 0:
            rows = (slot_mapping >= 0).nonzero().squeeze(-1)
            slots = slot_mapping[rows]
        derived[key] = rows, slots, slot_mapping
    return derived[key][:2]


def fused_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    derived: Derived | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v where ``slot_mapping`` says, return the rotated q.

    q [R, Hq, D], k and v [R, Hkv, D]; cos and sin [R, rot] with rot <= D, in any float dtype (a
    wider one: rotated in it, rounded once), or None for no RoPE; caches [N, page_size, Hkv, D], of
    q's dtype or uint8: e4m3 codes of what was rounded; slot_mapping [R] int64, page * page_size +
    offset, -1 to skip. q_weight and k_weight [D]: RMSNorm over the head before RoPE (Qwen3).
    interleaved: RoPE rotates even with odd dimensions (GLM) instead of the first with the second
    half. derived: ``AttentionMetadata.derived``; between calls that share it cos, sin and
    slot_mapping do not change.
    """
    derived = {} if derived is None else derived
    if q_weight is not None:
        q = _rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = _rms_norm(k, k_weight, eps)
    if cos is not None and sin is not None:
        angles = _angles(cos, sin, interleaved, derived)
        both = _rotate(torch.cat((q, k), dim=1), *angles, interleaved)
        q, k = both.split((q.shape[1], k.shape[1]), dim=1)
    rows, slots = _written(slot_mapping, derived)
    if rows is not None:
        k, v = k[rows], v[rows]
    for cache, x in ((k_cache, k), (v_cache, v)):
        held = x if cache.dtype == x.dtype else stored(x, cache.dtype)
        cache.flatten(0, 1).index_copy_(0, slots, held)
    return q
