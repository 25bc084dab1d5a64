"""oneDNN's products in fp32, and weights that are laid out for them beforehand.

A product lays its weight out anew, which takes longer than multiplying few rows by it. While
requests run, a weight that is used often is *prepacked*: one copy for all its products, with the
bits of products by the weight itself. The operators are private to torch (inductor emits them).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.model.quantized import trace

OPERATORS = "_linear_pointwise", "_reorder_linear_weight"
# Rows of which products are faster by prepacked weights: one takes another product, with other
# bits, and of many rows laying out is the least part. On an EPYC with AVX-512, two threads, 512 by
# 1408 took 161, 204, 260, 354, 549, 955 and 3,483 us at 2, 8, 16, 32, 64, 128 and 512 rows,
# prepacked 141, 137, 171, 277, 463, 864 and 3,321; with oneDNN kept to AVX2 333, 413, 368, 514, 670
# and 1,443 at 2 to 128, swapped 247, 329, 375, 652, 845 and 1,636, prepacked 183, 261, 281, 418,
# 580 and 1,290.
PREPACKED_ROWS = range(2, 129)
# Below so many elements nothing is gained: 128 by 128 took 20 to 29 us at 4 to 64 rows, prepacked
# 18 to 27, 512 by 8 less than prepacked.
PREPACKED_ELEMENTS = 1 << 17
# For which a copy is laid out; all serve all others, and bits are the same.
USUAL_ROWS = 32
# To prepack takes as long as so many products save: 500 us of 512 by 1408.
REPAID = 8
# Of the memory that is free when the first weight is prepacked, all of them take one part in SHARE.
SHARE = 4


def works() -> bool:
    """Whether oneDNN and its operators are there."""
    there = all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
    return there and torch.backends.mkldnn.is_available()


def one_dnn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's product, a [..., n] times the transpose of b [m, n], which may be prepacked."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return product


@dataclass
class _Use:
    """How often a weight with this address and version was multiplied, and its copy; the weight is
    held, so that no other gets its id."""

    weight: Tensor
    mark: tuple[int, ...]
    times: int = 0
    copy: Tensor | None = None


class PrepackedWeights:
    """Of the linears of one engine while requests run.

    A copy serves as long as its weight is the same tensor at the same address and counts no write.
    Writes that leave no trace (through ``.data``) it would miss: ``forget`` is called when no
    request is left, so that those between calls need not be seen, and when weights changed.

    room: tells bytes of free memory.
    """

    def __init__(self, room: Callable[[], int]):
        self._room = room
        self._left: int | None = None
        self._uses: dict[int, _Use] = {}
        # By threads, rows and sizes of products: whether they have the bits of the weight's own.
        self._same: dict[Hashable, bool] = {}

    def forget(self) -> None:
        """Free all copies."""
        self._uses.clear()
        self._left = None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """``one_dnn(x, weight, bias)``, bit for bit; None where a prepacked weight is not faster,
        not there or not known to keep bits."""
        rows = x.numel() // weight.shape[1]
        if rows not in PREPACKED_ROWS or weight.numel() < PREPACKED_ELEMENTS:
            return None
        if (copy := self._copy(weight)) is None:
            return None
        key = torch.get_num_threads(), rows, *weight.shape, bias is None
        if (same := self._same.get(key)) is False:
            return None
        out = one_dnn(x, copy, bias)
        if same is None:
            own = one_dnn(x, weight, bias)
            if 2 * own.count_nonzero() > own.numel():  # zeros would be equal anyhow
                self._same[key] = torch.equal(out, own)
            return own
        return out

    def _copy(self, weight: Tensor) -> Tensor | None:
        """The weight, prepacked once it was used often enough to repay it."""
        if weight.is_inference():  # counts no writes
            return None
        mark, use = trace(weight), self._uses.get(id(weight))
        if use is None or use.mark != mark:
            use = self._uses[id(weight)] = _Use(weight, mark)
        use.times += 1
        if use.times == REPAID and self._fits(weight):
            use.copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_ROWS)
        return use.copy

    def _fits(self, weight: Tensor) -> bool:
        """Whether there is room for a copy, which is taken."""
        if self._left is None:
            self._left = self._room() // SHARE
        fits = weight.nbytes <= self._left
        self._left -= weight.nbytes * fits
        return fits
