"""RMSNorm of a sum and the product of a gated MLP against fp64, and a row against itself elsewhere:
kernels and twins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import cases
from tests.kernels.cases import DEVICE, NAMES, assert_row_invariant, normal
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import hidden_states as kernels
from tinyspec.kernels.twins import layers as twins

EPS = 1e-5
FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
both = cases.both("module", kernels, twins)
# What the interpreter's bf16 computes of numbers like 2 and -2 is right.
modules = pytest.mark.parametrize("module", [kernels, twins], ids=["triton", "twin"])
dtypes = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())


def given(module: ModuleType, rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Two tensors [rows, size], rows of many sizes, and a weight [size]."""
    device = "cpu" if module is twins else DEVICE
    scale = 10.0 ** (torch.arange(rows) % 5 - 3)[:, None].to(DEVICE)
    parts = [normal(rows, size, seed=n) * scale for n in (1, 2)]
    return [part.to(device, dtype) for part in (*parts, 1 + normal(size, seed=size) / 4)]


def formula(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """The norm in torch's operators, rounded where transformers rounds."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.to(wide))).to(x.dtype) if offset else weight * wide.to(x.dtype)


def of_halves(module: ModuleType, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every function, on the halves of rows."""
    return {
        "norm": lambda rows: torch.cat(module.add_rms_norm(*rows.chunk(2, 1), weight, EPS), 1),
        **{name: partial(gated, module, activation=name) for name in FUNCTIONS},
    }


def gated(module: ModuleType, rows: Tensor, activation: str) -> Tensor:
    return module.gated(*rows.chunk(2, 1), activation)


@both
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 100), (2, 1000), (0, 20)], ids=str)
@pytest.mark.crossed(0.1)
@pytest.mark.usefixtures("poisoned")
def test_norm_matches_reference(shape, offset, module, dtype):
    x, residual, weight = given(module, *shape, dtype)
    for other in (residual, None):
        normed, summed = module.add_rms_norm(x, other, weight, EPS, unit_offset=offset)
        expected = x if other is None else x + other
        assert torch.equal(summed, expected) and normed.dtype == dtype
        assert normed.shape == summed.shape == shape
        if len(x):
            exact = formula(expected.double(), weight.double(), offset)
            assert_as_good_as_torch(normed, formula(expected, weight, offset), exact)


@both
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("poisoned")
def test_gated_matches_reference(activation, module, dtype):
    """In pieces of odd sizes, the last of more than one block."""
    gate, up, _ = given(module, 2, 1100, dtype)
    sizes = [1, 63, 1036]
    pieces = zip(gate.split(sizes, 1), up.split(sizes, 1), strict=True)
    found = torch.cat([module.gated(*piece, activation) for piece in pieces], dim=1)
    assert found.dtype == dtype
    act = FUNCTIONS[activation]
    assert_as_good_as_torch(found, act(gate) * up, act(gate.double()) * up.double())
    assert tuple(FUNCTIONS) == kernels.ACTIVATIONS == twins.ACTIVATIONS


@modules
@dtypes
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact(dtype, module):
    """Sums of 2 and -2, whose norm is 1 and -1. Far from zero an activation is 0 or the number
    itself; without rows there is nothing."""
    x, _, weight = given(module, 3, 63, dtype)
    signs = x.sign()
    weight.copy_(torch.arange(63) - 30)
    for offset in (False, True):
        normed, summed = module.add_rms_norm(3 * signs, -signs, weight, 0.0, unit_offset=offset)
        assert torch.equal(summed, 2 * signs)
        assert torch.equal(normed, signs * (weight + offset))
    gate, up, _ = given(module, 2, 4, dtype)
    gate.copy_(torch.tensor([[-200.0, 0.0, 128.0, 200.0], [-100.0, 72.0, -0.0, 256.0]]))
    up.copy_(torch.tensor([[3.0, -2.0, 1.0, -3.0], [-2.0, 5.0, 2.0, 1.0]]))
    for activation in FUNCTIONS:
        assert torch.equal(module.gated(gate, up, activation), gate.relu() * up)
        assert module.gated(gate[:0], up[:0], activation).shape == (0, 4)


@both
def test_exact_as_two_modules(module, dtype):
    """Bit for bit: the norm of the rounded sum, as a layer may leave its last norm to the next one;
    the product of the rounded activation."""
    x, residual, weight = given(module, 9, 100, dtype)
    normed, summed = module.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(module.add_rms_norm(summed, None, weight, EPS)[0], normed)
    for activation in FUNCTIONS:
        active = module.gated(x, torch.ones_like(x), activation)
        assert torch.equal(module.gated(x, residual, activation), active * residual)


@both
@pytest.mark.parametrize("size", [63, 192])
@pytest.mark.parametrize("name", ["norm", "silu"])
@pytest.mark.crossed(0.3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(name, size, module, dtype):
    x, other, weight = given(module, 33 if module is twins else 3, size, dtype)
    assert_row_invariant(of_halves(module, weight)[name], torch.cat([x, other], dim=1))


def test_row_invariant_with_two_threads(two_threads):
    """The twins, with the work of a call cut in two amid a row."""
    x, other, weight = given(twins, 5, 13000, torch.float32)
    for run in of_halves(twins, weight).values():
        assert_row_invariant(run, torch.cat([x, other], dim=1))


@both
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(module, dtype):
    """Rows cut out of wider ones, with NaN around them; halves of one tensor; batches in front."""
    x, other, weight = given(module, 4, 50, dtype)
    wide = [F.pad(part, (3, 8, 1, 1), value=float("nan"))[1:-1, 3:-8] for part in (x, other)]
    halves = torch.cat([x, other], dim=1).chunk(2, dim=1)
    batches = [part.view(2, 2, 50) for part in (x, other)]
    for parts in (wide, halves, batches):
        found = [*module.add_rms_norm(*parts, weight, EPS), module.gated(*parts, "gelu")]
        expected = [*module.add_rms_norm(x, other, weight, EPS), module.gated(x, other, "gelu")]
        for one, own in zip(found, expected, strict=True):
            assert torch.equal(one.reshape(4, 50), own) and own.isfinite().all()
