"""Twins of the kernels over hidden states: RMSNorm in the steps of transformers' norms, and the
product of a gated MLP, row by row.

Torch rounds what is left behind whole vectors by another function, and threads divide a tensor of
many rows at places that depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATIONS = tuple(_FUNCTIONS)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, each rounded once; gate and up [..., I] of one dtype -> [..., I].

    activation: one of ACTIVATIONS.
    """
    function, size = _FUNCTIONS[activation], gate.shape[-1]
    rows = [function(row) for row in gate.reshape(-1, size)]
    return torch.stack(rows).view(gate.shape) * up if rows else gate * up


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
