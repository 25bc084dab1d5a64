"""Twin of the fused KV write: q/k norm, RoPE, scatter of k and v into their slots.

Follows transformers operation by operation and dtype by dtype, so that a model served by the twins
rounds where transformers rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the first ``cos.shape[-1]`` of the head's dimensions, rounded once where cos and sin
    are wider than x; halves form the pairs, or neighbours."""
    rot = cos.shape[-1]
    turned = x if rot == x.shape[-1] else x[..., :rot]
    turned = turned.to(torch.promote_types(x.dtype, cos.dtype))
    # (-x2, x1) * sin is (x2, x1) * (-sin, sin), to the bit.
    if interleaved:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        signed = torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    else:
        partner = turned.roll(rot // 2, dims=-1)
        first, second = sin.split(rot // 2, dim=-1)
        signed = torch.cat((-first, second), dim=-1)
    out = (turned * cos).add_(partner.mul_(signed)).to(x.dtype)
    return out if rot == x.shape[-1] else torch.cat((out, x[..., rot:]), dim=-1)


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
) -> Tensor:
    """Norm and rotate q and k, write k and v where ``slot_mapping`` says, return the rotated q.

    q [R, Hq, D], k and v [R, Hkv, D]; cos and sin [R, rot] with rot <= D, in any float dtype (a
    wider one than q's: turned in it, rounded once), or None for no RoPE; caches [N, page_size, Hkv,
    D]; slot_mapping [R] int64, page * page_size + offset, -1 to skip. q_weight and k_weight [D]:
    RMSNorm over the head before RoPE (Qwen3). interleaved: neighbours of the first rot dimensions
    turn together (GLM), not their halves.
    """
    if q_weight is not None:
        q = _rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = _rms_norm(k, k_weight, eps)
    if cos is not None and sin is not None:
        both = _rotate(torch.cat((q, k), dim=1), cos[:, None], sin[:, None], interleaved)
        q, k = both.split((q.shape[1], k.shape[1]), dim=1)
    if int(slot_mapping.min()) < 0:
        rows = (slot_mapping >= 0).nonzero().squeeze(-1)
        k, v, slot_mapping = k[rows], v[rows], slot_mapping[rows]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
    return q.contiguous()
