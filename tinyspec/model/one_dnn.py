"""oneDNN's product of rows and a weight, and weights that are laid out for it beforehand.

A product lays its weight out anew, which takes longer than multiplying few rows by it. While
requests run, a weight that is used often is *prepacked*: one copy for all its products, with the
bits of products by the weight itself. The operators are private to torch (inductor emits them).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tinyspec.model.checksum import same_bits
from tinyspec.model.quantized import trace

# Elsewhere the operators call other libraries.
MACHINES = ("x86_64", "amd64")
DTYPES = (torch.float32, torch.bfloat16)
# For which a copy is laid out; all serve all others, and bits are the same.
USUAL_ROWS = 32
# In larger passes laying weights out is the least part.
COPIED_ROWS = 128
# To prepack takes about as long as so many products save: 500 us of 512 by 1408.
REPAID = 6
# Of the memory that is free when the first weight is prepacked, all of them take one part in SHARE.
SHARE = 4


def one_dnn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows x [..., in] times weight [out, in], which may be prepacked, plus bias [out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def prepacked(weight: Tensor) -> Tensor:
    """A copy of a weight, laid out for products of any number of rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_ROWS)
    return copy


@cache
def serves(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies numbers of this dtype, prepacked ones as well: it is
    tried."""
    if dtype not in DTYPES or platform.machine().lower() not in MACHINES:
        return False
    with suppress(Exception), torch.inference_mode():  # not there, or no instructions for it
        x = torch.ones(2, 64, dtype=dtype)
        return sys.platform != "darwin" and bool(one_dnn(x, prepacked(x)).eq(64).all())
    return False


@dataclass
class _Use:
    """How often a weight with this address and version was multiplied, and its copy; the weight is
    held, so that no other gets its id."""

    weight: Tensor
    mark: tuple[int, ...]
    times: int = 0
    copy: Tensor | None = None


class PrepackedWeights:
    """Copies of the weights of one engine's linears, while requests run.

    A copy serves as long as its weight is the same tensor at the same address and counts no write.
    Writes that leave no trace (through ``.data``) it would miss: ``forget`` is called when no
    request is left, so that those between calls need not be seen, and when weights changed.

    room: tells bytes of free memory. proven: row counts of which exact passes use copies, as these
    were seen to have the weights' own bits. most_bytes: of all copies at once, so far.
    """

    def __init__(self, room: Callable[[], int]):
        self._room = room
        self._left: int | None = None
        self._uses: dict[int, _Use] = {}
        self.proven: Collection[int] = ()
        self._nbytes = self.most_bytes = 0

    def forget(self) -> None:
        """Free all copies."""
        self._uses.clear()
        self._left, self._nbytes = None, 0

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
        """``one_dnn(x, weight, bias)``; bit for bit if ``exact``."""
        rows = x.numel() // weight.shape[1]
        copy = self._copy(weight) if rows <= COPIED_ROWS else None
        if copy is None or (exact and rows not in self.proven):
            return one_dnn(x, weight, bias)
        return one_dnn(x, copy, bias)

    def keeps_bits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether there is room for a copy of a weight, and x times that has the weight's bits."""
        fits = weight.nbytes <= self._room() // SHARE
        return fits and same_bits(one_dnn(x, prepacked(weight), bias), one_dnn(x, weight, bias))

    def _copy(self, weight: Tensor) -> Tensor | None:
        """The weight, prepacked once it was used often enough to repay it."""
        if weight.is_inference():  # counts no writes
            return None
        mark, use = trace(weight), self._uses.get(id(weight))
        if use is None or use.mark != mark:
            use = self._uses[id(weight)] = _Use(weight, mark)
        use.times += 1
        if use.times == REPAID and self._fits(weight):
            use.copy = prepacked(weight)
        return use.copy

    def _fits(self, weight: Tensor) -> bool:
        """Whether there is room for a copy, which is taken."""
        if self._left is None:
            self._left = self._room() // SHARE
        fits = weight.nbytes <= self._left
        self._left -= weight.nbytes * fits
        self._nbytes += weight.nbytes * fits
        self.most_bytes = max(self._nbytes, self.most_bytes)
        return fits
