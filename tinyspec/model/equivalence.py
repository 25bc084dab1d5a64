"""Comparing a module with its stand-in bit for bit: inputs, weights, equality, kinds of modules.

Inputs and weights are random: weights of the model that are all zero or one could hide a
difference. Knows modules; no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tinyspec.model.quantized import is_packed

ROWS = 64
DRAWN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Attributes in which modules of one kind may differ; children are listed by themselves.
APART = ("layer_idx", "training", "_modules")
T = TypeVar("T")


def probe_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Random rows [ROWS, *shape] of many magnitudes, so that another rounding or epsilon shows."""
    generator = torch.Generator().manual_seed(ROWS)
    x = torch.randn(ROWS, *shape, generator=generator)
    x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
    sizes = torch.tensor([1.0, 1e2 if dtype == torch.float16 else 1e4, 1e-2, 1e-4])
    sizes = sizes[torch.arange(ROWS) % len(sizes)]
    return (x * sizes.view(-1, *[1] * len(shape))).to(device, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, and not constant: that would prove nothing."""
    if a.shape != b.shape or a.dtype != b.dtype or not len(a):
        return False
    same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return same and bool(a.min() != a.max())


def _scratch(x: Tensor) -> Tensor:
    """A random weight of the same shape: vectors around 1, matrices that keep the scale."""
    generator = torch.Generator(x.device).manual_seed(x.numel())
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    drawn = noise / x.shape[-1] ** 0.5 if x.dim() > 1 else 1 + noise / 4
    return nn.Parameter(drawn, False) if isinstance(x, nn.Parameter) else drawn


class _Holder(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def with_scratch_weights(module: nn.Module, function: Callable[[], T]) -> T:
    """``function()`` while ``module`` has random weights; its own are not written to.

    Packed weights stay.
    """
    holder = _Holder(module)
    weights: dict[str, Tensor] = dict(holder.named_parameters())
    weights |= dict(holder.named_buffers())
    drawn = {
        name: _scratch(weight)
        for name, weight in weights.items()
        if weight.dtype in DRAWN and not is_packed(weight)
    }
    return functional_call(holder, drawn, (function,))


def kind_of(module: nn.Module) -> Hashable:
    """Classes, settings and shapes of a module and its children: equal for modules that differ only
    in ``layer_idx`` and in the values of their weights."""
    found: list[Hashable] = []
    for name, part in module.named_modules():
        settings = {k: v for k, v in vars(part).items() if k not in APART}
        found.append((name, type(part), described(settings)))
    return tuple(found)


def described(value: Any) -> Hashable:
    """A hashable description: tensors by shape and dtype, other objects by identity."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return tuple((key, described(held)) for key, held in value.items())
    if isinstance(value, (list, tuple, set)):
        return type(value), *map(described, value)
    return "object", id(value)


def eps_name(norm: nn.Module) -> str:
    """The attribute that holds a norm's epsilon."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
