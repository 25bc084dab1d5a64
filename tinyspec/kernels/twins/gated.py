"""Twin of gated.

Rows are padded to whole vectors: the rest behind them would be rounded by another function, so that
a number's bits would depend on its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATIONS = tuple(_FUNCTIONS)
# Numbers: of the longest vector, of which torch takes several at a time.
WHOLE = 64


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, each rounded once; gate and up [..., I] of one dtype -> [..., I].

    activation: one of ACTIVATIONS.
    """
    size = gate.shape[-1]
    active = _FUNCTIONS[activation](F.pad(gate, (0, -size % WHOLE)))
    return active[..., :size] * up
