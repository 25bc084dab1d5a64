"""Several linears in one launch: the bits of one launch each, by kernel and twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    assert_row_invariant,
    normal,
    poisoned,  # noqa: F401 - a fixture
)
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.determinism.probes.bits import cancelling_inputs
from tinyspec.kernels import launch
from tinyspec.kernels.linear import linear
from tinyspec.kernels.merged_linear import merged_linear
from tinyspec.kernels.twins import linear as twin
from tinyspec.kernels.twins import merged_linear as twins

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BOTH = [
    pytest.param(merged_linear, linear, *p.values, id=f"triton-{p.id}", marks=p.marks)
    for p in DTYPES
]
BOTH += [
    pytest.param(twins.merged_linear, twin.linear, dtype, id=f"twin-{name}")
    for dtype, name in NAMES.items()
]
both = pytest.mark.parametrize("merged, alone, dtype", BOTH)
# In fp32; rows of the other dtypes have the bits of ``linear``, which is tried in all of them.
pairs = pytest.mark.parametrize(
    "merged, alone",
    [(merged_linear, linear), (twins.merged_linear, twin.linear)],
    ids=["triton", "twin"],
)
# (rows, K, the numbers of outputs): of a tile and less, of several, odd ones.
SHAPES = [(1, 64, (64, 64)), (5, 100, (130, 65, 3)), (66, 40, (1, 66, 20))]
Parts = tuple[Tensor, list[Tensor], list[Any]]


def parts(alone: Any, rows: int, width: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Parts:
    """Rows, weights and biases; the second has none. Sums cancel, so that another order shows."""
    device = "cpu" if alone is twin.linear else DEVICE
    weights = [(normal(n, width, seed=n) * width**-0.5).to(device, dtype) for n in sizes]
    biases: list[Any] = [normal(n, seed=7, dtype=dtype).to(device) for n in sizes]
    biases[1] = None
    x = cancelling_inputs(rows, width, dtype, weight=weights[1]).to(device)
    return x, weights, biases


def assert_as_alone(merged: Any, alone: Any, x: Tensor, weights: list, biases: list) -> None:
    found = merged(x, weights, biases)
    assert len(found) == len(weights)
    for out, weight, bias in zip(found, weights, biases, strict=True):
        assert torch.equal(out, alone(x, weight, bias))


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.crossed(0.2)
@pytest.mark.usefixtures("poisoned")
def test_exact(shape: Any, merged: Any, alone: Any, dtype: torch.dtype) -> None:
    x, weights, biases = parts(alone, *shape, dtype)
    assert_as_alone(merged, alone, x, weights, biases)
    assert [out.shape for out in merged(x[:0], weights, biases)] == [(0, n) for n in shape[2]]


def test_exact_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another step along K is another order of additions, and shows."""
    x, weights, biases = parts(linear, 8, 200, (48, 40), torch.float32)
    found, table = merged_linear(x, weights, biases), launch.linear
    monkeypatch.setattr(launch, "linear", lambda dtype: table(dtype)._replace(block_k=16))
    with pytest.raises(AssertionError):
        assert_as_alone(lambda *_: found, linear, x, weights, biases)


@both
def test_matches_reference(merged: Any, alone: Any, dtype: torch.dtype) -> None:
    _, weights, biases = parts(alone, 1, 63, (37, 20), dtype)
    x = normal(16, 63, dtype=dtype).to(weights[0].device)
    for out, weight, bias in zip(merged(x, weights, biases), weights, biases, strict=True):
        wide = None if bias is None else bias.double()
        expected = F.linear(x.double(), weight.double(), wide)
        assert_as_good_as_torch(out, F.linear(x, weight, bias), expected)


def rows_of(alone: Any) -> int:
    """The interpreter has time for a few."""
    return 40 if alone is twin.linear else 3


@pairs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(merged: Any, alone: Any) -> None:
    x, *given = parts(alone, rows_of(alone), 100, (48, 30), torch.float32)
    assert_row_invariant(lambda rows: torch.cat(merged(rows, *given), dim=1), x)


@pairs
def test_row_invariant_can_fail(merged: Any, alone: Any) -> None:
    """Control: sums whose split over K depends on the number of rows."""
    x, weights, _ = parts(alone, rows_of(alone), 100, (48, 30), torch.float32)

    def split(rows: Tensor) -> Tensor:
        cut = 20 + 10 * (len(rows) % 4)
        slices = slice(None, cut), slice(cut, None)
        return sum(
            torch.cat(merged(rows[:, part], [w[:, part] for w in weights], [None, None]), dim=1)
            for part in slices
        )

    with pytest.raises(AssertionError):
        assert_row_invariant(split, x)


def test_weights_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and weights cut out of wider ones are read there where they divide as well."""
    x, weights, biases = parts(linear, 9, 64, (64, 32), torch.float32)
    expected = merged_linear(x, weights, biases)
    wide = [F.pad(part, (0, 16), value=float("nan"))[:, :64] for part in (x, *weights)]

    def copied(*_: object, **__: object) -> Tensor:
        raise AssertionError("a copy")

    monkeypatch.setattr(Tensor, "clone", copied)
    found = merged_linear(wide[0], wide[1:], biases)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("count", [1, 4])
def test_how_many(count: int) -> None:
    x, weights, _ = parts(linear, 2, 16, (16,) * max(count, 2), torch.float32)
    with pytest.raises(AssertionError):
        merged_linear(x, weights[:count], [None] * count)
