"""Stand-ins for linears: right, shared, and gone without a trace."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.kernels.twins.layers import linear
from tinyspec.model import cpu_linears as linears
from tinyspec.model.cpu_linears import OneDnnLinear, TransposedLinear, cpu_has
from tinyspec.model.linears import KernelLinear, kernel_stand_ins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("llama", "gpt2")
CONFIG = EngineConfig(reference_rows=16, max_rows=32)


def served(model):
    kinds = (OneDnnLinear, TransposedLinear, nn.Linear)
    found = (next((k for k in kinds if isinstance(m, k)), None) for m in model.modules())
    return [kind for kind in found if kind]


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
    with Engine(tiny(), config=CONFIG) as engine:
        first = engine.generate(prompts(3), params)[0]
    monkeypatch.setattr(linears, "_works", lambda: False)
    with Engine(tiny(), config=CONFIG) as engine:
        assert set(served(engine.runner.model)) == {nn.Linear}
        assert engine.generate(prompts(3), params)[0].fingerprint != first.fingerprint


def swap(model, found):
    for parent in list(model.modules()):
        parent._modules |= {n: found[m] for n, m in parent._modules.items() if m in found}
    return list(found.values())


def kernel_linears(model):
    return {name for name, m in model.named_modules() if isinstance(m, KernelLinear)}


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
    swap(model, kernel_stand_ins(model, linear))
    assert kernel_linears(model) == names
    after = model(ids).logits
    assert after.dtype == dtype and after.shape == before.shape
    assert (after.double() - expected).norm() <= 2 * (before.double() - expected).norm()
    assert {n: value.data_ptr() for n, value in model.state_dict().items()} == state


def test_what_is_not_a_plain_linear_stays():
    assert kernel_stand_ins(replace_linears(tiny(), ShapeSensitiveLinear), linear) == {}

    class Packed(torch.Tensor):
        pass

    hooked, patched, wide, packed = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    wide.double()
    packed.weight = nn.Parameter(packed.weight.detach().as_subclass(Packed))
    model = nn.Sequential(hooked, patched, wide, packed, nn.Linear(8, 8))
    assert list(kernel_stand_ins(model, linear)) == [model[4]]
