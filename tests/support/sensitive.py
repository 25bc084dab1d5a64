"""Linears that break the facts determinism rests on, on purpose and on any hardware; and one that
keeps them all.

All share the weight of the linear that they replace. Their partial sums are taken in fp64 and
rounded once, so nothing but the rule written here decides the bits: no BLAS, no thread count.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GOLDEN = 0.6180339887498949


def two_sums(x: Tensor, weight: Tensor, bias: Tensor | None, cut: int) -> Tensor:
    """A linear whose sum over K is the sum of two partial sums, each rounded to the dtype."""
    # Kept nowhere: what is written through ``.data`` shows in no version of a parameter.
    wide, exact = x.double(), weight.detach().double()
    first = (wide[..., :cut] @ exact[:, :cut].T).to(x.dtype)
    out = first + (wide[..., cut:] @ exact[:, cut:].T).to(x.dtype)
    return out if bias is None else out + bias


class _SplitLinear(nn.Linear):
    """An `nn.Linear` by ``two_sums``."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def _split_at(self, x: Tensor, cut: int) -> Tensor:
        return two_sums(x, self.weight, self.bias, cut)

    def _cut(self, number: int) -> int:
        return 1 + int((self.in_features - 1) * (number * GOLDEN % 1.0))


class ShapeSensitiveLinear(_SplitLinear):
    """Splits K where the row count says: row counts differ in bits, a fixed one keeps fact 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self._split_at(x, self._cut(x.shape[:-1].numel()))


class PositionSensitiveLinear(_SplitLinear):
    """Splits K elsewhere at every third row index: breaks fact 1 at every row count from 2."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        third = (torch.arange(rows, device=x.device) % 3 == 1).reshape(*x.shape[:-1], 1)
        return torch.where(third, self._split_at(x, self._cut(1)), self._split_at(x, self._cut(2)))


class RowByRowLinear(_SplitLinear):
    """Computes every row by itself: one class of bits, whatever the row count."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 1, self.in_features)
        out = torch.cat([self._split_at(row, self.in_features // 2) for row in rows])
        return out.view(*x.shape[:-1], self.out_features)


def replace_linears(model: nn.Module, cls: type[_SplitLinear]) -> nn.Module:
    """Swap every `nn.Linear` of `model`, the unembedding too, for `cls` in place; returns it."""
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    assert linears, "no nn.Linear to replace"
    for name, linear in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, cls(linear))
    return model
