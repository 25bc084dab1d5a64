"""The activation of a gated MLP against fp64, and a number against itself elsewhere: kernel and
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
    normal,
    poisoned,  # noqa: F401 - a fixture
)
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import gated as triton
from tinyspec.kernels.gated import gated
from tinyspec.kernels.twins import gated as twins

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BOTH = [pytest.param(gated, *p.values, id=f"triton-{p.id}", marks=p.marks) for p in DTYPES]
BOTH += [pytest.param(twins.gated, d, id=f"twin-{name}") for d, name in NAMES.items()]
both = pytest.mark.parametrize("fn, dtype", BOTH)
Gated = Callable[[Tensor, Tensor, str], Tensor]


def given(fn: Gated, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = "cpu" if fn is twins.gated else DEVICE
    gate, up = (normal(rows, size, seed=seed) * 3 for seed in (1, 2))
    return gate.to(device, dtype), up.to(device, dtype)


def test_names() -> None:
    assert tuple(FUNCTIONS) == triton.ACTIVATIONS == twins.ACTIVATIONS


@both
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 1000), (5, 1100)], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(
    shape: tuple[int, int], activation: str, fn: Gated, dtype: torch.dtype
) -> None:
    gate, up = given(fn, *shape, dtype)
    act = FUNCTIONS[activation]
    out = fn(gate, up, activation)
    assert out.shape == shape and out.dtype == dtype
    # Torch's error among many numbers: of a few it may be next to nothing.
    pool = given(fn, 16, 1000, dtype)
    whole = fn(*pool, activation), act(pool[0]) * pool[1], act(pool[0].double()) * pool[1].double()
    assert_as_good_as_torch(*whole)
    assert torch.equal(out, fn(gate.repeat(2, 1), up.repeat(2, 1), activation)[: shape[0]])


@both
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_edges(activation: str, fn: Gated, dtype: torch.dtype) -> None:
    """Far from zero an activation is 0 or the number itself; without rows there is nothing."""
    gate = torch.tensor([-200.0, 0.0, 200.0], dtype=dtype, device=given(fn, 1, 1, dtype)[0].device)
    found = fn(gate[None], torch.ones_like(gate)[None], activation)[0]
    assert found.tolist() == [0.0, 0.0, 200.0]
    assert fn(gate[None][:0], gate[None][:0], activation).shape == (0, 3)


@both
@pytest.mark.parametrize("size", [63, 128])
def test_row_invariant(size: int, fn: Gated, dtype: torch.dtype) -> None:
    gate, up = given(fn, 33, size, dtype)
    alone = torch.cat([fn(gate[r : r + 1], up[r : r + 1], "silu") for r in range(33)])
    for rows in range(1, 33):
        assert torch.equal(fn(gate[:rows], up[:rows], "silu"), alone[:rows])
        assert torch.equal(fn(gate[rows:], up[rows:], "silu"), alone[rows:])


def test_control_rows_by_torch() -> None:
    """On a CPU torch's own fp32 activation of rows of odd width depends on their place."""
    gate = normal(65, 100).cpu()
    alone = torch.cat([F.silu(row[None]) for row in gate])
    assert DEVICE != "cpu" or not torch.equal(F.silu(gate), alone)


@both
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(fn: Gated, dtype: torch.dtype) -> None:
    gate, up = given(fn, 6, 50, dtype)
    expected = fn(gate, up, "gelu")
    wide = [F.pad(part, (3, 8, 1, 1), value=float("nan"))[1:-1, 3:-8] for part in (gate, up)]
    assert torch.equal(fn(*wide, "gelu"), expected)
    merged = torch.cat([gate, up], dim=1)
    assert torch.equal(fn(merged[:, :50], merged[:, 50:], "gelu"), expected)
    batches = fn(gate.view(2, 3, 50), up.view(2, 3, 50), "gelu")
    assert torch.equal(batches.flatten(0, 1), expected)
