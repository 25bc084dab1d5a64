"""Linear against fp64, and a row against itself alone: the kernel and its twin, one set of tests.

The twin runs on the CPU, the kernel on the tests' device. Sums cancel where bits are compared, so
that another order of additions shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import cases
from tests.kernels.cases import DEVICE, NAMES, assert_row_invariant, normal
from tests.support.tolerances import OPERATOR_16, assert_as_good_as_torch, close
from tinyspec.determinism.rows import cancelling_inputs, keeps_places, probe_pool
from tinyspec.kernels.hidden_states import linear
from tinyspec.kernels.twins import layers as twins

NAN = float("nan")
ROWS = 70
Linear = Callable[..., Tensor]

both = cases.both("fn", linear, twins.linear)
BOTH = both.args[1]
stored = pytest.mark.parametrize("stored", ["nk", "kn"])


def layer(
    fn: Linear, width: int, outputs: int, dtype: torch.dtype, stored: str = "nk"
) -> tuple[Tensor, Tensor]:
    """Weight [N, K] and bias [N]; "kn": the weight lies as ``Conv1D`` has it."""
    device = "cpu" if fn is twins.linear else DEVICE
    weight = (normal(outputs, width, seed=width) * width**-0.5).to(device, dtype)
    if stored == "kn":
        weight = weight.T.contiguous().T
    return weight, normal(outputs, seed=outputs, dtype=dtype).to(device)


SHAPES = {
    "smallest": (1, 1, 1),
    "odd": (5, 63, 37),
    "one-row": (1, 1000, 100),
    "one-output": (19, 100, 1),
    "full-tiles": (64, 128, 128),
    "tails-everywhere": (67, 100, 130),
    "long-and-odd": (17, 997, 65),
}


@both
@stored
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_reference(shape, stored, fn, dtype):
    rows, width, outputs = shape
    weight, bias = layer(fn, width, outputs, dtype, stored)
    # Torch's error is taken at sixteen rows: for one it has a dot product of another accuracy.
    pool = normal(max(rows, 16), width, seed=rows, dtype=dtype).to(weight.device)
    x = pool[:rows]
    for shift in (None, bias):
        out = fn(x, weight, shift)
        assert out.shape == (rows, outputs) and out.dtype == dtype
        wide = None if shift is None else shift.double()
        exact = F.linear(x.double(), weight.double(), wide)
        assert_as_good_as_torch(out, by_torch(fn, pool, weight, shift, exact), exact)
    assert fn(x[:0], weight, bias).shape == (0, outputs)


def by_torch(
    fn: Linear, pool: Tensor, weight: Tensor, bias: Tensor | None, exact: Tensor
) -> Tensor:
    """The first rows of torch's product. Of the twin in fp32 the less exact of torch's two: at
    width 1000 on AVX2 alone oneDNN's error is 2.3e-6 and MKL's 0.8e-6. Of the kernel in fp32 the
    less exact of torch's and of one sum from the first product to the last, which it is defined
    as: cuBLAS adds up parts of K, to an error of 0.8e-6 where such a sum has 2.3e-6.
    """
    found = [F.linear(pool, weight, bias)]
    if fn is twins.linear and pool.dtype == torch.float32:
        found.append(torch.ops.mkldnn._linear_pointwise(pool, weight, bias, "none", [], ""))
    elif pool.dtype == torch.float32:
        products = (pool[: len(exact), None] * weight).cpu().numpy()
        one_sum = torch.from_numpy(np.add.accumulate(products, axis=-1)[..., -1]).to(pool)
        found.append(one_sum if bias is None else one_sum + bias)
    first = [product[: len(exact)] for product in found]
    return max(first, key=lambda product: (product.double() - exact).abs().max().item())


@both
@stored
@pytest.mark.parametrize("largest", [2, 30])
def test_exact(largest, stored, fn, dtype):
    """Small integers: every sum is exact in fp32, so the one rounding at the end is all there is.

    The larger ones exceed what the 16-bit formats hold: the bias, too, joins before the rounding.
    """
    generator = torch.Generator().manual_seed(largest)
    parts = [
        torch.randint(-largest, largest + 1, s, generator=generator)
        for s in ((37, 299), (70, 299), (70,))
    ]
    weight, _ = layer(fn, 299, 70, dtype, stored)
    x, whole, bias = (part.to(weight.device, dtype) for part in parts)
    weight.copy_(whole)
    exact = F.linear(x.double(), weight.double())
    assert exact.abs().max() < 2**24
    assert torch.equal(fn(x, weight), exact.to(dtype))
    assert torch.equal(fn(x, weight, bias), (exact + bias.double()).to(dtype))


# The first for the interpreter; oneDNN and MKL have paths of their own for many others.
WIDTHS = [(100, 48), (64, 64), (63, 997), (997, 100), (512, 192), (1000, 1), (2048, 64)]
INVARIANT = [
    pytest.param(*case.values, *widths, id=f"{case.id}-{widths[0]}x{widths[1]}", marks=case.marks)
    for case in BOTH
    for widths in (WIDTHS if case.values[0] is twins.linear else WIDTHS[:1])
]


@pytest.mark.crossed(0.4)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@stored
@pytest.mark.parametrize("fn, dtype, width, outputs", INVARIANT)
def test_row_invariant(width, outputs, stored, fn, dtype):
    weight, bias = layer(fn, width, outputs, dtype, stored)
    rows = ROWS if fn is twins.linear else 20  # through the interpreter more take long
    x = cancelling_inputs(rows, width, dtype, weight=weight).to(weight.device)
    # Whether there is a bias has nothing to do with the layout: one of each.
    shift = bias if stored == "kn" else None
    assert_row_invariant(lambda rows: fn(rows, weight, shift), x)
    pool = probe_pool(width, dtype, weight.device, weight)
    for rows in (2, 16, 33):
        assert keeps_places(lambda rows: fn(rows, weight, shift), [pool], rows)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_row_invariant_with_two_threads(two_threads, dtype):
    """The twin, with the work of a call cut in two."""
    for width, outputs in ((256, 64), (512, 1408)):
        weight, bias = layer(twins.linear, width, outputs, dtype)
        x = cancelling_inputs(ROWS, width, dtype, weight=weight)
        assert_row_invariant(lambda rows, w=weight, b=bias: twins.linear(rows, w, b), x)


@pytest.mark.parametrize("fn, dtype", [BOTH[0], BOTH[-2]])
def test_row_invariant_can_fail(fn, dtype):
    """Control: sums whose split over K depends on the number of rows, or on the row index."""
    weight, _ = layer(fn, 100, 48, dtype)
    x = cancelling_inputs(12, 100, dtype, weight=weight).to(weight.device)

    def split(rows: Tensor, cut: int) -> Tensor:
        return fn(rows[:, :cut], weight[:, :cut]) + fn(rows[:, cut:], weight[:, cut:])

    with pytest.raises(AssertionError):
        assert_row_invariant(lambda rows: split(rows, 20 + len(rows) % 50), x)
    pool = probe_pool(100, dtype, weight.device, weight)
    assert not keeps_places(
        lambda rows: torch.cat([split(rows[:1], 20), split(rows[1:], 60)]), [pool], 4
    )


@both
@stored
@pytest.mark.usefixtures("poisoned")
def test_padding_untouched(stored, fn, dtype):
    """Rows, features and outputs that lie around what is asked for do not enter; all is written."""
    weight, bias = layer(fn, 77, 50, dtype, stored)
    x = normal(21, 77, dtype=dtype).to(weight.device)
    expected = fn(x, weight, bias)
    assert expected.isfinite().all()

    def amid(inner: Tensor, *pad: int) -> Tensor:
        return F.pad(inner, pad, value=NAN).contiguous()

    wide_x = amid(x, 3, 16, 1, 2)[1:-2, 3:-16]
    wide_bias = amid(bias, 1, 1)[1:-1]
    if stored == "nk":
        wide_weight = amid(weight, 5, 8, 1, 1)[1:-1, 5:-8]
    else:
        wide_weight = amid(weight.T, 5, 8, 1, 1)[1:-1, 5:-8].T
    # BLAS may take another path for another stride of the weight: the twin is held to values.
    out = fn(wide_x, weight, wide_bias)
    assert torch.equal(out, expected)
    out = fn(wide_x, wide_weight, wide_bias)
    assert torch.equal(out, expected) if fn is linear else close(out, expected, OPERATOR_16)
    assert wide_x._base is not None and wide_x._base[0].isnan().all()
