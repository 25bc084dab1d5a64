"""The activation of a gated MLP against fp64, and a row against itself elsewhere: kernel and
twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from tinyspec.kernels import hidden_states as triton
from tinyspec.kernels.hidden_states import gated
from tinyspec.kernels.twins import hidden_states as twins

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BOTH = [pytest.param(gated, *p.values, id=f"triton-{p.id}", marks=p.marks) for p in DTYPES]
BOTH += [pytest.param(twins.gated, d, id=f"twin-{name}") for d, name in NAMES.items()]
both = pytest.mark.parametrize("fn, dtype", BOTH)
activations = pytest.mark.parametrize("activation", FUNCTIONS)
Gated = Callable[[Tensor, Tensor, str], Tensor]


def given(fn: Gated, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = "cpu" if fn is twins.gated else DEVICE
    gate, up = (normal(rows, size, seed=seed) * 3 for seed in (1, 2))
    return gate.to(device, dtype), up.to(device, dtype)


def test_names() -> None:
    assert tuple(FUNCTIONS) == triton.ACTIVATIONS == twins.ACTIVATIONS


@both
@activations
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(activation: str, fn: Gated, dtype: torch.dtype) -> None:
    """In pieces of odd sizes, the last of more than one block."""
    gate, up = given(fn, 2, 1100, dtype)
    sizes = [1, 63, 1036]
    pieces = zip(gate.split(sizes, 1), up.split(sizes, 1), strict=True)
    found = torch.cat([fn(*piece, activation) for piece in pieces], dim=1)
    assert found.dtype == dtype
    act = FUNCTIONS[activation]
    assert_as_good_as_torch(found, act(gate) * up, act(gate.double()) * up.double())


@pytest.mark.parametrize("fn", [gated, twins.gated], ids=["triton", "twin"])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@activations
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact(activation: str, dtype: torch.dtype, fn: Gated) -> None:
    """Far from zero an activation is 0 or the number itself, which the interpreter's bf16 gets
    right as well; without rows there is nothing."""
    gate, up = given(fn, 2, 4, dtype)
    gate.copy_(torch.tensor([[-200.0, 0.0, 128.0, 200.0], [-100.0, 72.0, -0.0, 256.0]]))
    up.copy_(torch.tensor([[3.0, -2.0, 1.0, -3.0], [-2.0, 5.0, 2.0, 1.0]]))
    assert torch.equal(fn(gate, up, activation), gate.relu() * up)
    assert fn(gate[:0], up[:0], activation).shape == (0, 4)


@both
@activations
def test_exact_by_rounding_twice(activation: str, fn: Gated, dtype: torch.dtype) -> None:
    """The product is that of the rounded activation, as of two modules one after the other."""
    gate, up = given(fn, 2, 100, dtype)
    active = fn(gate, torch.ones_like(up), activation)
    assert torch.equal(fn(gate, up, activation), active * up)


@both
@pytest.mark.parametrize("size", [63, 128])
@pytest.mark.crossed(0.3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(size: int, fn: Gated, dtype: torch.dtype) -> None:
    gate, up = given(fn, 33 if fn is twins.gated else 3, size, dtype)
    merged = torch.cat([gate, up], dim=1)
    assert_row_invariant(lambda rows: fn(*rows.chunk(2, 1), "silu"), merged)


@pytest.mark.skipif(DEVICE != "cpu", reason="about torch's own activations on a CPU")
def test_row_invariant_can_fail() -> None:
    """Control: on a CPU torch's own fp32 activation of rows of odd width depends on their place."""
    gate = given(gated, 65, 100, torch.float32)[0]
    with pytest.raises(AssertionError):
        assert_row_invariant(F.silu, gate)


def test_row_invariant_with_two_threads(two_threads: None) -> None:
    """The twin, with the work of a call cut in two amid a row."""
    merged = torch.cat(given(twins.gated, 5, 13000, torch.float32), dim=1)
    assert_row_invariant(lambda rows: twins.gated(*rows.chunk(2, 1), "gelu_tanh"), merged)


@both
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(fn: Gated, dtype: torch.dtype) -> None:
    """What lies around the numbers does not enter; halves of one tensor, batches in front."""
    gate, up = given(fn, 4, 50, dtype)
    expected = fn(gate, up, "gelu")
    wide = [F.pad(part, (3, 8, 1, 1), value=float("nan"))[1:-1, 3:-8] for part in (gate, up)]
    assert torch.equal(fn(*wide, "gelu"), expected)
    merged = torch.cat([gate, up], dim=1)
    assert torch.equal(fn(*merged.chunk(2, dim=1), "gelu"), expected)
    batches = fn(*(part.view(2, 2, 50) for part in (gate, up)), "gelu")
    assert torch.equal(batches.flatten(0, 1), expected)
