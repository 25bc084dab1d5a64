"""The norm of a sum against its formula in fp64, and a row against itself: kernel and twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    normal,
    poisoned,  # noqa: F401 - a fixture
)
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import launch
from tinyspec.kernels.rms_norm import add_rms_norm
from tinyspec.kernels.twins import rms_norm as twins

EPS = 1e-5
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BOTH = [pytest.param(add_rms_norm, *p.values, id=f"triton-{p.id}", marks=p.marks) for p in DTYPES]
BOTH += [pytest.param(twins.add_rms_norm, d, id=f"twin-{name}") for d, name in NAMES.items()]
both = pytest.mark.parametrize("fn, dtype", BOTH)
offsets = pytest.mark.parametrize("offset", [False, True])
Norm = Callable[..., tuple[Tensor, Tensor]]


def given(fn: Norm, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight, with rows of many sizes."""
    device = "cpu" if fn is twins.add_rms_norm else DEVICE
    scale = 10.0 ** (torch.arange(rows) % 5 - 3)[:, None].to(DEVICE)
    x, residual = (normal(rows, size, seed=seed) * scale for seed in (1, 2))
    weight = 1 + normal(size, seed=size) / 4
    return tuple(part.to(device, dtype) for part in (x, residual, weight))  # type: ignore[return-value]


def formula(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """In torch's operators, rounded where transformers rounds."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.to(wide))).to(x.dtype) if offset else weight * wide.to(x.dtype)


@both
@offsets
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (9, 100), (2, 1000), (65, 64)], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(
    shape: tuple[int, int], offset: bool, fn: Norm, dtype: torch.dtype
) -> None:
    x, residual, weight = given(fn, *shape, dtype)
    for other in (residual, None):
        normed, summed = fn(x, other, weight, EPS, unit_offset=offset)
        expected = x if other is None else x + other
        assert torch.equal(summed, expected) and normed.dtype == dtype
        exact = formula(expected.double(), weight.double(), offset)
        assert_as_good_as_torch(normed, formula(expected, weight, offset), exact)


@both
def test_matches_reference_without_rows(fn: Norm, dtype: torch.dtype) -> None:
    x, residual, weight = given(fn, 3, 20, dtype)
    normed, summed = fn(x[:0], residual[:0], weight, EPS)
    assert normed.shape == summed.shape == (0, 20)


@both
def test_the_norm_of_a_sum_is_that_of_the_rounded_sum(fn: Norm, dtype: torch.dtype) -> None:
    """Bit for bit: a layer may leave its last norm to the next one."""
    x, residual, weight = given(fn, 40, 100, dtype)
    normed, summed = fn(x, residual, weight, EPS)
    assert torch.equal(fn(summed, None, weight, EPS)[0], normed)


@both
def test_row_invariant(fn: Norm, dtype: torch.dtype) -> None:
    """A row alone, in every row count, at every index."""
    x, residual, weight = given(fn, 33, 192, dtype)

    def run(rows: slice) -> Tensor:
        return torch.cat(fn(x[rows], residual[rows], weight, EPS), dim=1)

    alone = torch.cat([run(slice(r, r + 1)) for r in range(33)])
    for rows in range(1, 33):
        assert torch.equal(run(slice(rows)), alone[:rows])
        assert torch.equal(run(slice(rows, None)), alone[rows:])


def test_control_rows_by_torch() -> None:
    """Where fewer rows are summed in other parts, it shows."""
    x, residual, weight = given(add_rms_norm, 33, 192, torch.float32)

    def run(rows: slice) -> Tensor:
        given = (x[rows] + residual[rows]).double()
        parts = given.square().float().split(32 * (1 + len(given) % 4), dim=1)
        mean = sum(part.sum(dim=1, keepdim=True) for part in parts) / 192
        return (given.float() * torch.rsqrt(mean + EPS)) * weight

    alone = torch.cat([run(slice(r, r + 1)) for r in range(33)])
    assert not all(torch.equal(run(slice(rows)), alone[:rows]) for rows in range(1, 33))


@both
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(fn: Norm, dtype: torch.dtype) -> None:
    """Rows cut out of wider ones, with NaN around them; batches in front."""
    x, residual, weight = given(fn, 6, 50, dtype)
    expected = fn(x, residual, weight, EPS)
    wide = [F.pad(part, (3, 8, 1, 1), value=float("nan"))[1:-1, 3:-8] for part in (x, residual)]
    for found, own in zip(fn(*wide, weight, EPS), expected, strict=True):
        assert torch.equal(found, own) and found.isfinite().all()
    batches = fn(x.view(2, 3, 50), residual.view(2, 3, 50), weight, EPS)
    for found, own in zip(batches, expected, strict=True):
        assert torch.equal(found.flatten(0, 1), own)


def test_sizes() -> None:
    """Every size up to the largest is one block of a row."""
    for size in (1, 64, 1000, 4096, 5120, 8192, launch.MAX_NORM):
        entry = launch.rms_norm(size)
        assert size <= entry.block < 2 * size and entry.block <= 64 * 32 * entry.num_warps
    wide = torch.zeros(1, launch.MAX_NORM + 1)
    with pytest.raises(AssertionError):
        add_rms_norm(wide, None, wide[0], EPS)
