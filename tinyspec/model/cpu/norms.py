"""A stand-in for RMSNorm on a CPU, on its own shared weight: fewer operators for the same bits, and
fewer still where they are nobody's business.

Told by the source, not by a list of models. Knows modules, and nothing of why a pass is in haste.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.deferrable import essence, of_family, source_of, text_of
from tinyspec.model.wrappers import has_hooks, own_forward


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether a module's forward does what Llama's RMSNorm does."""
    kind = type(norm)
    if own_forward(norm) is not None or kind.__call__ is not nn.Module.__call__:
        return False
    reference = of_family("llama", "LlamaRMSNorm").forward
    # By its own text first, which asks nothing of the functions that any module may call.
    if kind.forward is reference:
        return True
    tree, other = source_of(kind.forward), source_of(reference)
    alike = tree is not None and other is not None and text_of(tree) == text_of(other)
    return alike and essence(kind.forward) == essence(reference)


class CpuRMSNorm(nn.Module):
    """An RMSNorm that shares the weight of the module that it stands in for."""

    weight: Tensor

    def __init__(self, norm: nn.Module, fast_mode: FastMode):
        super().__init__()
        self.register_parameter("weight", norm.weight)  # type: ignore[arg-type]
        self.variance_epsilon: Any = norm.variance_epsilon
        self._fast_mode = fast_mode
        self._eps: tuple[float, Tensor] | None = None
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., n] in its dtype; out of haste with transformers' bits."""
        wide = x.float()
        if self._fast_mode.on:
            # One walk over the rows, where squares and their mean take two.
            length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            mean = torch.addcmul(self._least(), length, length, value=1 / x.shape[-1])
        elif wide is x and self.weight.dtype == x.dtype:
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
        else:
            mean = wide.square().mean(-1, keepdim=True).add_(self.variance_epsilon)
        if wide is x:
            return (wide * mean.rsqrt_()).mul_(self.weight)
        scaled = wide.mul_(mean.rsqrt_()).to(x.dtype)
        return scaled.mul_(self.weight) if self.weight.dtype == x.dtype else self.weight * scaled

    def _least(self) -> Tensor:
        """The epsilon as a tensor, which costs less to add than a number."""
        if self._eps is None or self._eps[0] != self.variance_epsilon:
            self._eps = self.variance_epsilon, torch.tensor(self.variance_epsilon)
        return self._eps[1]


def norm_stand_ins(
    model: nn.Module, fast_mode: FastMode
) -> list[tuple[nn.Module, str, CpuRMSNorm]]:
    """(parent, name, stand-in) for every RMSNorm of ``model`` on a CPU."""
    return [
        (parent, name, CpuRMSNorm(child, fast_mode))
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_rms_norm(child) and not has_hooks(child) and _fits(child.weight)
    ]


def _fits(weight: object) -> TypeGuard[nn.Parameter]:
    return isinstance(weight, nn.Parameter) and weight.device.type == "cpu"
