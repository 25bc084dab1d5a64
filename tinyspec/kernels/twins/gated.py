"""Twin of gated, row by row.

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
