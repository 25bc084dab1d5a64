"""oneDNN for fp32 linears on a CPU, on the plain shared weight: faster there than torch's default.

The operator is private (it is what inductor emits), so it is looked for and compared before use;
where it is missing or disagrees, linears stay as they are. Its bits are its own: which linears
it serves is part of the fingerprint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OneDnnLinear(nn.Module):
    """An ``nn.Linear`` by oneDNN; shares the parameters of the module that it stands in for."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], fp32."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def _works() -> bool:
    """Whether the operator is there and agrees with ``F.linear``."""
    x, weight, bias = torch.ones(4, 64), torch.linspace(-1, 1, 64 * 8).view(8, 64), torch.ones(8)
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias), atol=1e-4)


def by_onednn(model: nn.Module) -> list[tuple[nn.Module, str, OneDnnLinear]]:
    """(parent, name, stand-in) for every plain fp32 ``nn.Linear`` of ``model`` on a CPU."""
    found: list[tuple[nn.Module, str, OneDnnLinear]] = []
    with torch.inference_mode():
        if not _works():
            return found
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                # Hooks on a linear would be lost with it.
                hooked = child._forward_hooks or child._forward_pre_hooks
                if child.weight.dtype == torch.float32 and not hooked:
                    found.append((parent, name, OneDnnLinear(child)))
    return found
