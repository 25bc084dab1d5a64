"""Several linears in one launch: the bits of one launch each, by kernel and twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    normal,
    poisoned,  # noqa: F401 - a fixture
)
from tinyspec.kernels.linear import linear
from tinyspec.kernels.merged_linear import merged_linear
from tinyspec.kernels.twins import linear as twin
from tinyspec.kernels.twins import merged_linear as twins

BOTH = [
    pytest.param(merged_linear, linear, *p.values, id=f"triton-{p.id}", marks=p.marks)
    for p in DTYPES
]
BOTH += [pytest.param(twins.merged_linear, twin.linear, torch.float32, id="twin")]
both = pytest.mark.parametrize("merged, alone, dtype", BOTH)
# (rows, K, the numbers of outputs): of a tile and less, of several, odd ones.
SHAPES = [(1, 64, (64, 64)), (5, 100, (130, 65, 3)), (70, 40, (1, 200, 64))]


def parts(
    rows: int, width: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str = DEVICE
) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Rows, weights and biases; the second has none."""
    x = normal(rows, width, seed=rows, dtype=dtype).to(device)
    weights = [normal(size, width, seed=size, dtype=dtype).to(device) for size in sizes]
    biases: list[Any] = [normal(size, seed=7, dtype=dtype).to(device) for size in sizes]
    biases[1] = None
    return x, weights, biases


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_exact(shape: tuple[int, int, tuple[int, ...]], merged: Any, alone: Any, dtype) -> None:
    device = "cpu" if alone is twin.linear else DEVICE
    x, weights, biases = parts(*shape, dtype, device)
    found = merged(x, weights, biases)
    assert len(found) == len(weights)
    for out, weight, bias in zip(found, weights, biases, strict=True):
        assert torch.equal(out, alone(x, weight, bias))
    assert [len(out) for out in merged(x[:0], weights, biases)] == [0] * len(weights)


@both
def test_row_invariant(merged: Any, alone: Any, dtype: torch.dtype) -> None:
    device = "cpu" if alone is twin.linear else DEVICE
    x, weights, biases = parts(40, 100, (48, 70), dtype, device)
    whole = torch.cat(merged(x, weights, biases), dim=1)
    for rows in (1, 2, 17, 33):
        assert torch.equal(torch.cat(merged(x[:rows], weights, biases), dim=1), whole[:rows])
        assert torch.equal(torch.cat(merged(x[rows:], weights, biases), dim=1), whole[rows:])


def test_weights_stay_where_they_are() -> None:
    """Rows and weights cut out of wider ones are read there where they divide as well."""
    x, weights, biases = parts(9, 64, (64, 32), torch.float32)
    expected = merged_linear(x, weights, biases)
    wide = [torch.cat([w, w.new_full((len(w), 16), float("nan"))], dim=1)[:, :64] for w in weights]
    assert all(map(torch.equal, merged_linear(x, wide, biases), expected))


@pytest.mark.parametrize("count", [1, 4])
def test_how_many(count: int) -> None:
    x, weights, _ = parts(2, 16, (16,) * max(count, 2), torch.float32)
    with pytest.raises(AssertionError):
        merged_linear(x, weights[:count], [None] * count)
