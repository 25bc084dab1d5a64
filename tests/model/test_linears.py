"""Stand-ins for linears: right, shared, and gone without a trace."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.kernels.twins.layers import linear
from tinyspec.model import cpu_linears as linears
from tinyspec.model.cpu_linears import OneDnnLinear, TransposedLinear, cpu_has
from tinyspec.model.linears import kernel_stand_ins

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


def test_what_is_not_a_plain_linear_stays():
    whole, conv = tiny(), tiny("gpt2")
    plain = (nn.Linear, Conv1D)
    for model in (whole, conv):
        linears = [module for module in model.modules() if isinstance(module, plain)]
        assert [*kernel_stand_ins(model, linear)] == linears
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
