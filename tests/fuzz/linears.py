"""Linears whose rows have the same bits at every row count but one, and that one not always: what a
proof must look at, on any hardware.
"""

from __future__ import annotations

from torch import Tensor, nn

from tests.fuzz.changes import WIDE
from tests.support.sensitive import RowByRowLinear, replace_linears
from tests.support.zoo import tiny

# Bytes: where torch's own allocations begin.
ALIGNMENT = 64


class OneRowLinear(RowByRowLinear):
    """A single row is split elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() == 1 and self._splits_elsewhere():
            return self._split_at(x, self._cut(1))
        return super().forward(x)

    def _splits_elsewhere(self) -> bool:
        return True


class LayoutLinear(OneRowLinear):
    """A single row is split elsewhere where the weight does not lie as torch allocates it."""

    def _splits_elsewhere(self) -> bool:
        weight = self.weight
        return not weight.is_contiguous() or weight.data_ptr() % ALIGNMENT != 0


KINDS: dict[str, type[RowByRowLinear]] = {"one row": OneRowLinear, "layout": LayoutLinear}


def model_with(kind: str, seed: int) -> nn.Module:
    """A llama with linears of one of ``KINDS`` outside attention; all others keep every fact."""
    model = replace_linears(tiny("llama", seed), RowByRowLinear)
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, RowByRowLinear)]
    for name, module in named:
        if any(word in name for word in WIDE):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, KINDS[kind](module))
    return model
