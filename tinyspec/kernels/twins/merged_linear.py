"""Twin of merged_linear: the twin of linear for each weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tinyspec.kernels.twins.linear import linear


def merged_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """``linear`` of x with each of two or three weights and biases, with the same bits.

    x [R, K], weights [N, K] with K contiguous (others are copied), biases [N] or None -> [R, N] of
    each.
    """
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
