"""The probes tell apart what keeps the facts and what breaks them; a careless probe does not."""

import pytest
import torch
from torch import nn

from tests.support.sensitive import (
    PositionSensitiveLinear,
    RowByRowLinear,
    ShapeSensitiveLinear,
)
from tests.support.tolerances import SHORT_SUM, close
from tinyspec.determinism.probes.bits import (
    cancelling_inputs,
    in_passes,
    position_invariant,
    unequal_bits,
)
from tinyspec.determinism.probes.row_functions import probe_function, probe_pool
from tinyspec.model.linear_kinds import distinct_linears, linear_shape, linear_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class IntegerLinear(nn.Linear):
    """Exact in fp32 whatever the order of additions: integers far below 2**24."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__(features, out, bias=False)
        nn.init.normal_(self.weight)
        self.weight.data = (self.weight.data * 3).round()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 8).round().clamp(-64, 64) @ self.weight.T


class Conv1D(nn.Module):
    """GPT-2's linear: weight `[in, out]`."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


def make_linear(dtype: torch.dtype, features: int = 192, out: int = 96) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(features, out, bias=False).to(dtype)


def inputs_for(linear: nn.Linear, rows: int = 64) -> torch.Tensor:
    weight = linear.weight
    return cancelling_inputs(rows, linear.in_features, weight.dtype, 0, weight)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_cancel(dtype):
    linear = make_linear(dtype)
    x = cancelling_inputs(16, 192, dtype, 0, linear.weight)
    assert x.dtype == dtype and x.shape == (16, 192) and x.isfinite().all()
    sums = (x.double() @ linear.weight.double().T).abs()
    sizes = x.double().abs() @ linear.weight.double().abs().T
    picks = torch.linspace(0, 95, 24).round().long()
    assert (sums / sizes)[:, picks].median() < 1e-4
    assert (sums / sizes).median() > 1e-3, "the other outputs are ordinary"


def test_inputs_without_a_weight_cancel_in_their_own_sum():
    x = cancelling_inputs(8, 100, torch.bfloat16, 1).double()
    assert (x.sum(1).abs() / x.abs().sum(1)).max() < 1e-4


def test_inputs_are_a_function_of_the_seed():
    a, b, c = (cancelling_inputs(4, 65, torch.float32, seed) for seed in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_unequal_bits_sees_signs_of_zero_and_equal_nans():
    a = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [2.0, 3.0]])
    b = torch.tensor([[-0.0, 1.0], [float("nan"), 1.0], [2.0, 3.0]])
    assert unequal_bits(a, b).tolist() == [[True, False], [False] * 2, [False] * 2]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 32])
def test_exact_linear_is_position_invariant(rows):
    linear = IntegerLinear(100, 60)
    inputs = cancelling_inputs(16, 100, torch.float32, 0, linear.weight)
    probe = position_invariant(linear, inputs, rows)
    assert probe and probe.differing == 0 and probe.checked == (rows + 1) * ((rows + 1) // 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 32])
def test_shape_sensitive_linear_keeps_fact_one(rows, dtype):
    linear = ShapeSensitiveLinear(make_linear(dtype))
    assert position_invariant(linear, inputs_for(linear), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 5, 32])
def test_position_sensitive_linear_is_caught_and_named(rows, dtype):
    linear = PositionSensitiveLinear(make_linear(dtype))
    probe = position_invariant(linear, inputs_for(linear), rows, name="mlp.down_proj")
    assert not probe
    assert 0 <= probe.row_index < rows and 0 <= probe.column < 96
    assert "mlp.down_proj" in str(probe) and str(rows) in str(probe)


def test_position_sensitive_linear_is_caught_with_few_passes():
    linear = PositionSensitiveLinear(make_linear(torch.bfloat16))
    probe = position_invariant(linear, inputs_for(linear), 128, passes=4)
    assert not probe and probe.checked <= 6 * 64


def test_one_bad_row_index_is_caught():
    def bad_at_seventeen(x: torch.Tensor) -> torch.Tensor:
        out = x.double().sum(1, keepdim=True).float()
        if len(x) > 17:
            out[17] = torch.nextafter(out[17], torch.tensor(torch.inf))
        return out

    probe = position_invariant(bad_at_seventeen, torch.randn(16, 64), 32)
    assert not probe and probe.row_index == 17 and probe.column == 0


def test_dependence_on_neighbours_is_caught():
    def scaled_by_the_largest(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return (x / scale).round() * scale

    assert not position_invariant(scaled_by_the_largest, torch.randn(8, 64), 16)


def test_unrepeatable_function_is_caught_at_one_row():
    assert not position_invariant(torch.rand_like, torch.randn(1, 64), 1)


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_in_passes_returns_every_row_once(rows):
    x = torch.randn(16, 4)
    assert torch.equal(in_passes(lambda part: part * 2, x, rows), x * 2)


def test_careless_probe_misses_what_this_one_sees():
    """bf16 results of fp32 sums, split in two by the row count: one ordinary row says "equal"."""
    weight = make_linear(torch.bfloat16, features=256, out=32).weight.float()

    def split_in_fp32(x: torch.Tensor) -> torch.Tensor:
        cut = 100 if len(x) == 1 else 128
        wide = x.float()
        parts = [
            (wide[:, None, piece] * weight[None, :, piece]).sum(-1)
            for piece in (slice(0, cut), slice(cut, None))
        ]
        return (parts[0] + parts[1]).bfloat16()

    torch.manual_seed(0)
    ordinary = torch.randn(256, 256, dtype=torch.bfloat16)
    careless = ordinary[:4]
    careful = cancelling_inputs(64, 256, torch.bfloat16, 0, weight)
    differing = [
        int(unequal_bits(*(in_passes(split_in_fp32, x, n) for n in (4, 1))).any(dim=1).sum())
        for x in (careless, careful)
    ]
    assert differing[0] == 0, "four ordinary rows see nothing"
    assert differing[1] > 32


def test_distinct_linears_takes_one_of_each_and_the_unembedding():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
            self.biasless, self.conv = nn.Linear(8, 8, bias=False), Conv1D(8, 24)

    model = nn.ModuleDict({"a": Layer(), "b": Layer(), "lm_head": nn.Linear(8, 50, bias=False)})
    model["b"].k = nn.Linear(8, 8).bfloat16()
    names = list(distinct_linears(model))
    assert names == ["a.q", "a.biasless", "a.conv", "b.k", "lm_head"]
    assert linear_shape(model["a"].conv) == (24, 8)
    assert linear_weight(model["a"].conv).shape == (8, 24)
    assert linear_shape(nn.LayerNorm(8)) is None


def test_a_packed_weight_is_not_taken_for_a_matrix():
    packed = nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    assert linear_weight(packed) is None


SIZES = [1, 2, 4, 8, 12, 16, 32, 64, 96, 144]


def classes_of(fn, weight=None, dtype=torch.float32, features=192, reference=16):
    pool = probe_pool(features, dtype, "cpu", weight)
    return probe_function(fn, pool, SIZES, reference, "mlp.down_proj")


def canonical(classes):
    return [rows for rows in SIZES if classes.canonical(rows)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_probe_pool_has_needles_among_larger_rows_and_zeros(dtype):
    linear = make_linear(dtype)
    pool = probe_pool(192, dtype, "cpu", linear.weight)
    assert pool.shape == (64, 192) and pool.isfinite().all()
    sums = (pool.double() @ linear.weight.double().T).abs()
    sizes = pool.double().abs() @ linear.weight.double().abs().T
    picks = torch.linspace(0, 95, 24).round().long()
    needles = (sums / sizes)[:, picks].median(dim=1).values < 1e-4
    assert needles[::2].all() and needles[1::4].all() and not needles[3::8].any()
    assert not pool[7::8].any()
    largest = pool.double().abs().amax(1)
    assert largest[1::4].min() > (100 if dtype == torch.float16 else 1000)
    assert largest[::2].max() < 100


def test_bucket_classes_of_rows_computed_one_by_one():
    linear = RowByRowLinear(make_linear(torch.float32))
    found = classes_of(linear, linear.weight)
    assert found.position and found.labels == dict.fromkeys(SIZES, 0) and canonical(found) == SIZES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bucket_classes_of_a_shape_sensitive_linear(dtype):
    linear = ShapeSensitiveLinear(make_linear(dtype))
    found = classes_of(linear, linear.weight, dtype)
    assert found.position and sorted(found.labels.values()) == list(range(len(SIZES)))
    assert canonical(found) == [16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bucket_classes_of_a_position_sensitive_linear(dtype):
    linear = PositionSensitiveLinear(make_linear(dtype))
    found = classes_of(linear, linear.weight, dtype)
    assert not found.position and "mlp.down_proj" in str(found.position)
    assert {rows for rows in SIZES if found.labels[rows] is None} == set(SIZES) - {1}
    assert canonical(found) == []


def nudged(x, row, column=5):
    """``x`` with one element of one row, if it has it, one bit up."""
    out = x.clone()
    if len(x) > row:
        out[row, column] = torch.nextafter(out[row, column], torch.tensor(torch.inf))
    return out


@pytest.mark.parametrize("row", range(16))
def test_a_row_index_that_matters_in_the_reference_bucket(row):
    found = classes_of(lambda x: nudged(x, row))
    assert not found.position and found.position.column == 5
    assert canonical(found) == []


@pytest.mark.parametrize("rows", [4, 96, 144])
def test_a_row_index_that_matters_in_one_other_bucket(rows):
    for row in range(rows):
        found = classes_of(lambda x, row=row: nudged(x, row) if len(x) == rows else x)
        assert found.position and found.labels[rows] is None, row
        assert canonical(found) == [size for size in SIZES if size != rows]


@pytest.mark.parametrize("rows", SIZES)
def test_neighbours_that_matter(rows):
    """A scale of the whole pass: as fp8 linears with dynamic scales have."""

    def scaled_by_the_largest(x):
        scale = x.abs().max() / 127 if len(x) == rows else torch.tensor(0.125)
        return (x / scale).round() * scale

    found = classes_of(scaled_by_the_largest)
    if rows == 1:
        assert canonical(found) == SIZES[1:]  # no neighbours: another function, no more
    else:
        assert found.labels[rows] is None or rows == 144  # where something large is always near
        assert canonical(found) == ([] if rows == 16 else [s for s in SIZES if s != rows])


def test_bucket_classes_are_classes():
    found = classes_of(lambda x: x * (1.0, 1.5, 2.0)[(len(x) > 4) + (len(x) > 16)])
    assert list(found.labels.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert canonical(found) == [8, 12, 16]


def test_sensitive_linears_see_changed_weights():
    linear = make_linear(torch.float32)
    sensitive = ShapeSensitiveLinear(linear)
    x = torch.randn(4, 192)
    before = sensitive(x)
    assert close(before, linear(x), SHORT_SUM)
    linear.weight.mul_(2)
    assert close(sensitive(x), linear(x), SHORT_SUM)
