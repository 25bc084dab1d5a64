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
    assert_row_invariant,
    normal,
    poisoned,  # noqa: F401 - a fixture
)
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import launch
from tinyspec.kernels.hidden_states import add_rms_norm
from tinyspec.kernels.twins import hidden_states as twins

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
    x, residual = ((normal(rows, size, seed=n) * scale).to(device, dtype) for n in (1, 2))
    return x, residual, (1 + normal(size, seed=size) / 4).to(device, dtype)


def formula(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """In torch's operators, rounded where transformers rounds."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.to(wide))).to(x.dtype) if offset else weight * wide.to(x.dtype)


@both
@offsets
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 100), (2, 1000)], ids=str)
@pytest.mark.crossed(0.1)
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


@offsets
@pytest.mark.parametrize("fn", [add_rms_norm, twins.add_rms_norm], ids=["triton", "twin"])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_exact(dtype: torch.dtype, fn: Norm, offset: bool) -> None:
    """Sums of 2 and -2, whose norm is 1 and -1: what the interpreter's bf16 computes is right."""
    x, _, weight = given(fn, 3, 63, dtype)
    signs = x.sign()
    weight.copy_(torch.arange(63) - 30)
    normed, summed = fn(3 * signs, -signs, weight, 0.0, unit_offset=offset)
    assert torch.equal(summed, 2 * signs)
    assert torch.equal(normed, signs * (weight + offset))


@both
def test_exact_norm_of_the_rounded_sum(fn: Norm, dtype: torch.dtype) -> None:
    """Bit for bit: a layer may leave its last norm to the next one."""
    x, residual, weight = given(fn, 9, 100, dtype)
    normed, summed = fn(x, residual, weight, EPS)
    assert torch.equal(fn(summed, None, weight, EPS)[0], normed)


def run_by(fn: Norm, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The norm and sum of the halves of rows."""
    return lambda rows: torch.cat(fn(*rows.chunk(2, 1), weight, EPS), dim=1)


@both
@pytest.mark.parametrize("size", [63, 192])
@pytest.mark.crossed(0.3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(size: int, fn: Norm, dtype: torch.dtype) -> None:
    x, residual, weight = given(fn, 33 if fn is twins.add_rms_norm else 3, size, dtype)
    assert_row_invariant(run_by(fn, weight), torch.cat([x, residual], dim=1))


def test_row_invariant_can_fail() -> None:
    """Control: squares that are summed in other parts where there are fewer rows."""
    x, residual, weight = given(add_rms_norm, 5, 192, torch.float32)

    def norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed = x + residual
        parts = summed.square().split(32 * (1 + len(x) % 4), dim=1)
        mean = sum(part.sum(dim=1, keepdim=True) for part in parts) / 192
        return summed * torch.rsqrt(mean + eps) * weight, summed

    with pytest.raises(AssertionError):
        assert_row_invariant(run_by(norm, weight), torch.cat([x, residual], dim=1))


def test_row_invariant_with_two_threads(two_threads: None) -> None:
    """The twin, with the work of a call cut in two."""
    x, residual, weight = given(twins.add_rms_norm, 5, 13000, torch.float32)
    assert_row_invariant(run_by(twins.add_rms_norm, weight), torch.cat([x, residual], dim=1))


@both
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(fn: Norm, dtype: torch.dtype) -> None:
    """Rows cut out of wider ones, with NaN around them; batches in front."""
    x, residual, weight = given(fn, 4, 50, dtype)
    expected = fn(x, residual, weight, EPS)
    wide = [F.pad(part, (3, 8, 1, 1), value=float("nan"))[1:-1, 3:-8] for part in (x, residual)]
    for found, own in zip(fn(*wide, weight, EPS), expected, strict=True):
        assert torch.equal(found, own) and found.isfinite().all()
    batches = fn(x.view(2, 2, 50), residual.view(2, 2, 50), weight, EPS)
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
