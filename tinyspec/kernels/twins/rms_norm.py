"""Twin of add_rms_norm, in the steps of transformers' norms."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and the sum; of x, and x itself, without a residual.

    x and residual [..., H], weight [H], of one dtype -> two [..., H]. unit_offset: the weight is
    stored less one, and multiplied before the norm is rounded.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * (1.0 + weight.float()) if unit_offset else wide.to(x.dtype) * weight
    return normed.to(x.dtype), summed
