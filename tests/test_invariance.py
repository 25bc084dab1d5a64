"""The probes tell apart what keeps the facts and what breaks them; a careless probe does not."""

import pytest
import torch
from torch import nn

from tests.support.sensitive import (
    PositionSensitiveLinear,
    ShapeSensitiveLinear,
    replace_linears,
)
from tinyspec.invariance import (
    cancelling_inputs,
    distinct_linears,
    in_passes,
    linear_shape,
    linear_weight,
    position_invariant,
    probe_positions,
    row_classes,
    unequal_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROW_COUNTS = [1, 2, 3, 4, 8, 16, 32]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_classes_of_a_shape_sensitive_linear(dtype):
    linear = ShapeSensitiveLinear(make_linear(dtype))
    found = row_classes(linear, inputs_for(linear), ROW_COUNTS, reference=16)
    assert found.classes == tuple((rows,) for rows in ROW_COUNTS)
    assert found.canonical == (16,) and found.pool == 64
    assert found.differing[16] == 0 and all(found.differing[r] for r in ROW_COUNTS if r != 16)


def test_row_classes_of_an_exact_linear():
    linear = IntegerLinear(100, 60)
    inputs = cancelling_inputs(50, 100, torch.float32, 0, linear.weight)
    found = row_classes(linear, inputs, [*ROW_COUNTS, 100], reference=32)
    assert found.classes == ((*ROW_COUNTS, 100),) and found.canonical == found.classes[0]
    assert not any(found.differing.values())


def test_row_classes_are_classes_not_only_agreement_with_the_reference():
    def rounds_by_row_count(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0, 1.5, 2.0)[min(len(x) // 4, 2)]

    found = row_classes(rounds_by_row_count, torch.randn(32, 8), [1, 2, 4, 6, 8, 9], reference=9)
    assert found.classes == ((1, 2), (4, 6), (8, 9)) and found.canonical == (8, 9)


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
    careless = row_classes(split_in_fp32, ordinary[:4], [1, 4], reference=4)
    assert careless.classes == ((1, 4),), "four ordinary rows see nothing"
    careful = row_classes(
        split_in_fp32, cancelling_inputs(64, 256, torch.bfloat16, 0, weight), [1, 4], reference=4
    )
    assert careful.classes == ((1,), (4,)) and careful.differing[1] > 32


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


@pytest.mark.parametrize(
    ("cls", "holds"), [(ShapeSensitiveLinear, True), (PositionSensitiveLinear, False)]
)
def test_probe_positions_of_a_model(cls, holds):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    weights = [linear.weight for linear in distinct_linears(model).values()]
    replace_linears(model, cls)
    assert model[0].weight is weights[0] and len(list(model.parameters())) == 4
    probes = probe_positions(model, 32, torch.float32, "cpu")
    assert [probe.name for probe in probes] == ["0", "2"]
    assert [bool(probe) for probe in probes] == [holds, holds]


def test_sensitive_linears_see_changed_weights():
    linear = make_linear(torch.float32)
    sensitive = ShapeSensitiveLinear(linear)
    x = torch.randn(4, 192)
    before = sensitive(x)
    torch.testing.assert_close(before, linear(x))
    linear.weight.mul_(2)
    torch.testing.assert_close(sensitive(x), linear(x))
