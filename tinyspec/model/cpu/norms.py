"""RMSNorm on a CPU in fewer operators with the same bits, and in fast mode in fewer still.

A module is replaced if the stand-in gives its bits. Knows modules, not when fast mode is on.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.equivalence import (
    eps_name,
    kind_of,
    probe_rows,
    same_bits,
)
from tinyspec.model.modules import children
from tinyspec.model.quantized import is_packed
from tinyspec.model.scratch_weights import with_scratch_weights
from tinyspec.model.wrappers import has_hooks, own_forward


class CpuRMSNorm(nn.Module):
    """An RMSNorm that shares the weight of the module that it replaces."""

    weight: Tensor

    def __init__(self, norm: nn.Module, fast_mode: FastMode):
        super().__init__()
        self.register_parameter("weight", norm.weight)  # type: ignore[arg-type]
        self._eps_name = eps_name(norm)
        setattr(self, self._eps_name, getattr(norm, self._eps_name))
        self._fast_mode = fast_mode
        self._eps: tuple[float, Tensor] | None = None
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., n]; the original's bits unless in fast mode."""
        eps: float = getattr(self, self._eps_name)
        wide = x.float()
        if self._fast_mode.on:
            # Reads the rows once; squares and their mean read them twice.
            length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            mean = torch.addcmul(self._addend(eps), length, length, value=1 / x.shape[-1])
        elif wide is x and self.weight.dtype == x.dtype:
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, eps)
        else:
            mean = wide.square().mean(-1, keepdim=True).add_(eps)
        if wide is x:
            return (wide * mean.rsqrt_()).mul_(self.weight)
        scaled = wide.mul_(mean.rsqrt_()).to(x.dtype)
        return scaled.mul_(self.weight) if self.weight.dtype == x.dtype else self.weight * scaled

    def _addend(self, eps: float) -> Tensor:
        """The epsilon as a tensor: quicker to add than a number."""
        if self._eps is None or self._eps[0] != eps:
            self._eps = eps, torch.tensor(eps)
        return self._eps[1]


def norm_stand_ins(
    model: nn.Module, fast_mode: FastMode, dtype: torch.dtype
) -> list[tuple[nn.Module, str, CpuRMSNorm]]:
    """(parent, name, stand-in) for every RMSNorm of ``model``, whose rows are of ``dtype``, on a
    CPU."""
    tried: dict[Hashable, bool] = {}
    found = []
    for parent, name, child in children(model):
        if not has_hooks(child) and _has_parts(child):
            kind = kind_of(child)
            if kind not in tried:
                tried[kind] = is_rms_norm(child, dtype)
            if tried[kind]:
                found.append((parent, name, CpuRMSNorm(child, fast_mode)))
    return found


def _has_parts(module: nn.Module) -> bool:
    """Whether a module has the parts of an RMSNorm on a CPU, and its class's forward."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or is_packed(weight):
        return False
    own = own_forward(module) is not None or type(module).__call__ is not nn.Module.__call__
    eps = getattr(module, eps_name(module), None)
    return weight.device.type == "cpu" and isinstance(eps, float) and not own


def is_rms_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Whether ``CpuRMSNorm`` gives the bits of a module, for rows of ``dtype`` and wider ones."""

    def equal() -> bool:
        stand_in = CpuRMSNorm(norm, FastMode())
        width = tuple(stand_in.weight.shape)
        for kind in {dtype, stand_in.weight.dtype, torch.float32}:
            x = probe_rows(width, kind, stand_in.weight.device)
            try:
                found = norm(x)
            except Exception:  # it takes other arguments
                return False
            if not isinstance(found, Tensor) or not same_bits(found, stand_in(x)):
                return False
        return True

    with torch.no_grad():
        return _has_parts(norm) and with_scratch_weights(norm, equal)
