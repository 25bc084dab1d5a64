"""Does an element-wise op or a reduction depend on a row's index, or on how many rows there are?

Vectorised loops compute the last elements of a thread's share by other instructions; at odd widths
which elements these are depends on the row index. Knows no model, only widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.row_classes import row_classes
from tinyspec.determinism.probes.bits import position_invariant

ODD_WIDTHS = (1, 100, 997, 1000)  # 1: what the rsqrt of a norm sees
ROW_COUNTS = (1, 2, 3, 5, 8, 32, 33)
POOL = 66

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": lambda x: torch.exp(x.clamp(-20, 10)),
    "log": lambda x: torch.log(x.abs() + 1e-3),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-3),
    "cos": torch.cos,
    "sin": torch.sin,
    "x * y": lambda x: x * x.roll(1, -1),
    "x / y": lambda x: x / (x.roll(1, -1).abs() + 1e-3),
    "mean of squares": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1, keepdim=True),
    "argmax": lambda x: x.argmax(-1, keepdim=True),
}


def checks(widths: Iterable[int], dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """One dict an op and width: the row counts where the index matters, and the classes."""
    found = []
    for width in sorted({*widths, *ODD_WIDTHS}):
        generator = torch.Generator().manual_seed(width)
        inputs = (torch.randn(POOL, width, generator=generator) * 4).to(device, dtype)
        for name, op in OPS.items():
            classes = row_classes(op, inputs, ROW_COUNTS, reference=32).classes
            moved = [n for n in ROW_COUNTS if not position_invariant(op, inputs, n, passes=8)]
            found.append(
                {
                    "op": name,
                    "width": width,
                    "position_dependent": moved,
                    "classes": [list(members) for members in classes],
                }
            )
    return found
