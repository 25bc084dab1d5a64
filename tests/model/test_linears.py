"""Stand-ins for linears: right, shared, and gone without a trace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tests.support.tolerances import SHORT_SUM, assert_as_good_as_torch, close
from tinyspec import Engine, SamplingParams
from tinyspec.kernels.twins.layers import linear
from tinyspec.model.cpu import linears
from tinyspec.model.cpu.linears import (
    CpuLinear,
    OneDnnLinear,
    TransposedLinear,
    cpu_has,
    cpu_stand_ins,
)
from tinyspec.model.linear_kinds import linear_shape, linear_weight
from tinyspec.model.linears import KernelLinear, kernel_stand_ins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("llama", "gpt2")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_matches_reference(rows, bias):
    linear = nn.Linear(96, 40, bias=bias)
    (_, _, found) = cpu_stand_ins(nn.Sequential(linear))[0]
    x = torch.randn(2, rows, 96)
    exact = nn.functional.linear(x.double(), linear.weight.double())
    exact = exact + linear.bias.double() if bias else exact
    with torch.no_grad():
        assert_as_good_as_torch(found(x), linear(x), exact)


def served(model):
    return [type(m) for m in model.modules() if isinstance(m, (nn.Linear, CpuLinear))]


def test_an_engine_serves_plain_linears_alone():
    model = tiny()
    before = served(model)
    weights = {id(p) for p in model.parameters()}
    with Engine(model) as engine:
        assert set(served(engine.runner.model)) == {OneDnnLinear}
        assert {id(p) for p in model.parameters()} == weights
    assert served(model) == before
    with Engine(tiny("llama", torch.bfloat16)) as engine:
        assert set(served(engine.runner.model)) == {
            TransposedLinear if cpu_has("amx_bf16") else nn.Linear
        }


def test_without_the_operator_linears_stay(monkeypatch):
    """And the fingerprint says so, for the bits are others."""
    params = SamplingParams(max_new_tokens=5, deterministic=True)
    with Engine(tiny()) as engine:
        first = engine.generate(prompts(3), params)[0]
    monkeypatch.setattr(linears, "_works", lambda: False)
    with Engine(tiny()) as engine:
        assert set(served(engine.runner.model)) == {nn.Linear}
        assert engine.generate(prompts(3), params)[0].fingerprint != first.fingerprint


def swap(found):
    for parent, name, stand_in in found:
        parent._modules[name] = stand_in
    return [stand_in for _, _, stand_in in found]


def mlps(model):
    """The MLP of a layer, a function of rows."""
    return [m for name, m in model.named_modules() if name.endswith("mlp")]


def kernel_linears(model):
    return {name for name, m in model.named_modules() if type(m) is KernelLinear}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_matches_the_model(family, dtype):
    model, exact = tiny(family, dtype), tiny(family).double()
    exact.load_state_dict(model.state_dict())
    ids = torch.tensor(prompts(5)[3:4])
    expected, before = exact(ids).logits, model(ids).logits
    names = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    state = {name: value.data_ptr() for name, value in model.state_dict().items()}
    swap(kernel_stand_ins(model, linear))
    assert kernel_linears(model) == names
    after = model(ids).logits
    assert after.dtype == dtype and after.shape == before.shape
    assert (after.double() - expected).norm() <= 2 * (before.double() - expected).norm()
    assert {n: value.data_ptr() for n, value in model.state_dict().items()} == state


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_row_counts_do_not_show_in_an_mlp(family, dtype):
    model = tiny(family, dtype)
    x = torch.randn(40, 64).to(dtype)
    swap(kernel_stand_ins(model, linear))
    for mlp in mlps(model):
        alone = torch.cat([mlp(row[None, None])[0] for row in x])
        for rows in range(1, 41):
            assert torch.equal(mlp(x[None, :rows])[0], alone[:rows])
            assert torch.equal(mlp(x[-rows:]), alone[-rows:])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_control_row_counts_show_in_an_mlp(family):
    """By a linear that splits its sum where the number of rows says."""

    def split(x, weight, bias):
        cut = 1 + len(x) % (x.shape[1] - 1)
        return linear(x[:, :cut], weight[:, :cut], bias) + linear(x[:, cut:], weight[:, cut:])

    model = tiny(family)
    swap(kernel_stand_ins(model, split))
    x = torch.randn(40, 64)
    mlp = mlps(model)[0]
    assert not torch.equal(mlp(x)[:7], mlp(x[:7]))


@pytest.mark.parametrize("bias", [True, False])
def test_a_kernel_linear_keeps_the_names(bias):
    model = nn.Sequential(nn.Linear(96, 40, bias=bias), Conv1D(24, 40), nn.Linear(24, 8)).eval()
    originals = list(model)
    swap(cpu_stand_ins(model))
    assert type(model[0]) is OneDnnLinear
    found = swap(kernel_stand_ins(model, linear))
    assert [(parent, name) for parent, name, _ in kernel_stand_ins(model, linear)] == []
    assert all(stand_in is child for stand_in, child in zip(found, model, strict=True))
    for original, stand_in in zip(originals, found, strict=True):
        assert linear_shape(stand_in) == linear_shape(original)
        assert torch.equal(linear_weight(stand_in), linear_weight(original))
        assert stand_in.weight is original.weight and stand_in.bias is original.bias
        assert not stand_in.training


def test_only_the_named_are_found():
    model = tiny()
    names = ["model.layers.1.mlp.up_proj", "lm_head", "model.norm", "no.such.module"]
    found = kernel_stand_ins(model, linear, only=names)
    assert {parent._modules[name] for parent, name, _ in found} == {
        model.lm_head,
        model.model.layers[1].mlp.up_proj,
    }
    assert kernel_stand_ins(model, linear, only=()) == []
    assert len(kernel_stand_ins(model, linear)) == 2 * 7 + 1


def test_what_is_not_a_plain_linear_stays():
    assert kernel_stand_ins(replace_linears(tiny(), ShapeSensitiveLinear), linear) == []

    class Packed(torch.Tensor):
        pass

    hooked, patched, wide, packed = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    wide.double()
    packed.weight = nn.Parameter(packed.weight.detach().as_subclass(Packed))
    model = nn.Sequential(hooked, patched, wide, packed, nn.Linear(8, 8))
    assert [name for _, name, _ in kernel_stand_ins(model, linear)] == ["4"]


@torch.no_grad()
def test_weights_are_read_at_the_call():
    layer, x = nn.Linear(16, 8), torch.randn(3, 16)
    stand_in = KernelLinear(layer, linear)
    layer.weight.mul_(2)
    assert torch.equal(stand_in(x), linear(x, layer.weight, layer.bias))
    stand_in.weight, stand_in.bias = nn.Parameter(torch.randn(8, 16)), None
    assert torch.equal(stand_in(x), linear(x, stand_in.weight, None))
    assert close(stand_in(x), F.linear(x, stand_in.weight), SHORT_SUM)
