"""oneDNN linears: right, shared, and gone without a trace."""

import pytest
import torch
from torch import nn

from tests.support.tiny import prompts, tiny
from tinyspec import Engine, SamplingParams, linears
from tinyspec.linears import OneDnnLinear, by_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_matches_reference(rows, bias):
    linear = nn.Linear(96, 40, bias=bias)
    (_, _, found) = by_onednn(nn.Sequential(linear))[0]
    x = torch.randn(2, rows, 96)
    exact = nn.functional.linear(x.double(), linear.weight.double())
    exact = exact + linear.bias.double() if bias else exact
    with torch.no_grad():
        error = (found(x).double() - exact).norm()
        assert error <= 2 * max((linear(x).double() - exact).norm(), 1e-7 * exact.norm())


def served(model):
    return [type(m) for m in model.modules() if isinstance(m, (nn.Linear, OneDnnLinear))]


def test_an_engine_serves_plain_fp32_linears_alone():
    model = tiny()
    before = served(model)
    weights = {id(p) for p in model.parameters()}
    with Engine(model):
        assert set(served(model)) == {OneDnnLinear}
        assert {id(p) for p in model.parameters()} == weights
    assert served(model) == before
    with Engine(tiny("llama", torch.bfloat16)) as engine:
        assert set(served(engine.model)) == {nn.Linear}


def test_without_the_operator_linears_stay(monkeypatch):
    """And the fingerprint says so, for the bits are others."""
    params = SamplingParams(max_new_tokens=5, deterministic=True)
    with Engine(tiny()) as engine:
        first = engine.generate(prompts(3), params)[0]
    monkeypatch.setattr(linears, "_works", lambda: False)
    with Engine(tiny()) as engine:
        assert set(served(engine.model)) == {nn.Linear}
        assert engine.generate(prompts(3), params)[0].fingerprint != first.fingerprint
