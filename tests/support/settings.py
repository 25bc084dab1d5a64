"""Settings of the process that another thread may change, and a linear in which each one shows, on
any hardware."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_mkldnn = "mkldnn", "matmul"
_precision = partial(torch._C._set_fp32_precision_setter, *_mkldnn)
_mode = torch.set_deterministic_debug_mode
# Settings of the process: a getter, two values that no pass has, and how each value is set.
CHANGES: dict[str, tuple[Callable[[], Any], tuple[Any, Any], Callable[[Any], Any]]] = {
    "default dtype": (
        torch.get_default_dtype,
        (torch.float64, torch.bfloat16),
        torch.set_default_dtype,
    ),
    "mkldnn precision": (
        partial(torch._C._get_fp32_precision_getter, *_mkldnn),
        ("bf16", "tf32"),
        _precision,
    ),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, (1, 2), _mode),
}
DEFAULTS = {"default dtype": torch.float32, "mkldnn precision": "none"}
DEFAULTS |= {"deterministic algorithms": 0}


def defaults() -> None:
    """Settings as torch has them."""
    for name, (_, _, put) in CHANGES.items():
        put(DEFAULTS[name])


# Called before and after every ``SettingSensitiveLinear``.
CALLS: list[Callable[[], Any]] = []


class SettingSensitiveLinear(nn.Linear):
    """Computes something else under every setting that a pass does not have, on any hardware."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        for call in tuple(CALLS):
            call()
        out = super().forward(x)
        if any(get() in values for get, values, _ in CHANGES.values()):
            out = out * 2
        for call in tuple(CALLS):
            call()
        return out
