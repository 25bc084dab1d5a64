"""Tensors of the model that its own passes write to, as observers of quantization-aware training
do: named where a request is deterministic; others end as they should."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.ao.quantization import default_fake_quant, disable_observer

from tests.support.cases import engine_of, text
from tests.support.tiny import tiny
from tinyspec import DeterminismError, SamplingParams

NAME = "model.layers.0.mlp.down_proj.1"
PLAIN = SamplingParams(max_new_tokens=5)
EXACT = SamplingParams(max_new_tokens=5, deterministic=True)


def add(module):
    module.count += 1


def replace(module):
    module.count = module.count + 1


def refuse(module):
    assert module.count.min() > 0


class Counts(nn.Module):
    """Counts passes in a buffer, or in a parameter."""

    def __init__(self, write=add, begin=None):
        super().__init__()
        self.register_buffer("count", torch.zeros(()) if begin is None else begin)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return x


WRITES = []


def add_later(module):
    """Writes nothing while it is proven."""
    if WRITES:
        add(module)


def of_a_parameter():
    module = Counts()
    del module.count
    module.count = nn.Parameter(torch.zeros(()))
    return module


KINDS = {
    "written": (Counts, "count"),
    "replaced": (partial(Counts, replace), "count"),
    "a parameter": (of_a_parameter, "count"),
    "fake quantizer": (default_fake_quant, "activation_post_process.max_val"),
}


def model_with(make):
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, make())
    return model.eval()


def ends(engine, params, most=60):
    """The completion of a prompt of several passes, by steps, of which there are not too many."""
    engine.add_request(text(60), params)
    for _ in range(most):
        if outputs := engine.step():
            return outputs[0].completions[0]
    raise AssertionError("the request does not end")


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_named_before_anything_runs(kind):
    make, buffer = KINDS[kind]
    with engine_of(model_with(make), max_rows=16) as engine:
        for _ in range(2):
            with pytest.raises(DeterminismError, match=f"^{NAME}.{buffer} is written to by the"):
                ends(engine, EXACT)
        assert ends(engine, PLAIN).finish_reason == "length"


def test_the_remedy_helps():
    model = model_with(default_fake_quant)
    with engine_of(model) as engine:
        with pytest.raises(DeterminismError, match="disable_observer"):
            ends(engine, EXACT)
        model.apply(disable_observer)
        assert ends(engine, EXACT).finish_reason == "length"


def test_a_write_that_the_proof_does_not_see_ends_the_request(monkeypatch):
    with engine_of(model_with(partial(Counts, add_later)), max_rows=16) as engine:
        assert ends(engine, EXACT).finish_reason == "length"
        monkeypatch.setitem(globals(), "WRITES", [True])
        completion = ends(engine, EXACT)
        assert completion.finish_reason == "abort"
        assert completion.error.startswith(f"{NAME}.count is written to by the model's own")
        with pytest.raises(DeterminismError, match=f"^{NAME}.count is written to"):
            ends(engine, EXACT)
        assert ends(engine, PLAIN).finish_reason == "length"


def test_a_module_that_scratch_weights_do_not_fit_is_named():
    with (
        engine_of(model_with(partial(Counts, refuse, torch.ones(64)))) as engine,
        pytest.raises(DeterminismError, match=rf"raised AssertionError in {NAME}"),
    ):
        ends(engine, EXACT)
