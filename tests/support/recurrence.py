"""Recurrent layers as their rules are written: token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def scanned(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, delta: bool) -> Tensor:
    """What each token reads, [T, H, Dv], in the dtype that is given: q, k [T, Hk, Dk], v [T, H,
    Dv], decay (a logarithm), beta [T, H]. delta: the delta rule; else Mamba 2's."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, found = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        update = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if delta else v[t]
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * update)
        found.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(found)
