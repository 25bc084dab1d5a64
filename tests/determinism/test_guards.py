"""Code of a user's that looks at all rows of a pass at once, or writes to tensors of the model, is
refused, by the name of its module.

Each guard changes what a row gets beside a neighbour with large activations, in plain requests and
where the refusal is taken back; the same modules without a guard are served.
"""

from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.ao.quantization import default_fake_quant, disable_observer

from tests.support.cases import bits_of, engine_of, greedy, text
from tests.support.tiny import tiny
from tinyspec import DeterminismError, SamplingParams
from tinyspec.determinism import proof

# Every model is probed anew.
pytestmark = pytest.mark.usefixtures("no_results_on_disk")
LIMIT, LARGE, WIDTH = 9, 7, 64
MLP, NORM = "model.layers.0.mlp", "model.layers.0.input_layernorm"
# From a row's input and output, and all that it stands beside.
ON_THE_HOST = {
    "bool": lambda x, y: y * 0.5 if (x.abs() > LIMIT).any() else y,
    "item": lambda x, y: y * 0.5 if x.abs().max().item() > LIMIT else y,
    "numpy": lambda x, y: y * 0.5 if x.numpy().max() > LIMIT else y,
    "shape": lambda x, y: y * 0.5 if len(x[x.abs() > LIMIT]) else y,
    "where": lambda x, y: y * 0.5 if len(torch.where(x.abs() > LIMIT)[0]) else y,
    "layout": lambda x, y: y * 0.5 if x.to_mkldnn().to_dense().abs().max() > LIMIT else y,
    "equal": lambda x, y: y if torch.equal(x, x.clamp(-LIMIT, LIMIT)) else y * 0.5,
}
ON_THE_DEVICE = {
    "any": lambda x, y: torch.where((x.abs() > LIMIT).any(), y * 0.5, y),
    "max": lambda x, y: y / x.abs().max().clamp(min=LIMIT),
}
GUARDS = {**ON_THE_HOST, **ON_THE_DEVICE}
HARMLESS = {
    "each row": lambda x, y: torch.where((x.abs() > LIMIT).any(-1, keepdim=True), y * 0.5, y),
    "shapes": lambda x, y: y if x.shape[1] > 0 and len(x) == 1 else y * 0.5,
    "a constant": lambda x, y: y * torch.tensor([0.5, 2.0])[1].item(),
    "layout": lambda x, y: y.to_mkldnn().to_dense(),
    "positions": lambda x, y: y if torch.arange(x.shape[1]).max().item() < 10**6 else y * 0.5,
}


class Around(nn.Module):
    """A module of the user's around another."""

    def __init__(self, inner, rule):
        super().__init__()
        self.inner, self.rule = inner, rule

    def forward(self, x):
        return self.rule(x, self.inner(x))


class AroundLinear(nn.Linear):
    """The rule reads the input of a product."""

    def forward(self, x):
        return self.rule(x, super().forward(x))


def wrapped(model, rule):
    model.model.layers[0].mlp = Around(model.model.layers[0].mlp, rule)
    return MLP


def leaf(model, rule):
    norm = model.model.layers[0].input_layernorm
    around = Around(nn.Identity(), lambda x, _: rule(x, norm(x)))
    model.model.layers[0].input_layernorm = around
    return NORM


def hooked(model, rule):
    module = model.get_submodule(MLP)
    module.register_forward_hook(lambda _, inputs, output: rule(inputs[0], output))
    return MLP


def own_forward(model, rule):
    module = model.get_submodule(MLP)
    inner = module.forward
    module.forward = MethodType(lambda _, x: rule(x, inner(x)), module)
    return MLP


def linear(model, rule):
    down = model.get_submodule(MLP).up_proj
    down.__class__, down.rule = AroundLinear, rule
    return f"{MLP}.up_proj"


PLACES = {f.__name__: f for f in (wrapped, leaf, hooked, own_forward, linear)}


def guarded(rule, place=wrapped):
    """A model, and where it has the rule; ``LARGE`` has large activations in every norm's input,
    of which one weight of the norm keeps enough."""
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[LARGE] = 3e4 * torch.eye(WIDTH)[3]
        model.model.layers[0].post_attention_layernorm.weight[3] *= 5
    return model, place(model, rule)


def alone_and_beside(model, **changes):
    """Bits of one request alone, and beside prompts of ``LARGE``."""
    prompt = [token for token in text(9) if token != LARGE]
    params = greedy(6, **changes)
    with engine_of(model, prefix_cache=False, reference_rows=8, max_rows=8) as engine:
        (alone,) = engine.generate([prompt], params)
        beside = engine.generate([prompt, [LARGE] * 5], params)[0]
    return bits_of([alone]), bits_of([beside])


@pytest.mark.parametrize("rule", GUARDS.values(), ids=GUARDS)
def test_a_guard_over_the_pass_is_refused(rule):
    model, name = guarded(rule)
    how = "on the host" if rule in ON_THE_HOST.values() else "its neighbours"
    with pytest.raises(DeterminismError, match=rf"^{name}: .*{how}"):
        alone_and_beside(model)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_guard_anywhere_is_refused(place):
    """Control: without a guard they are served."""
    model, name = guarded(ON_THE_DEVICE["any"], place)
    with pytest.raises(DeterminismError, match=f"^{name}: "):
        alone_and_beside(model)
    alone, beside = alone_and_beside(guarded(HARMLESS["each row"], place)[0])
    assert alone == beside


@pytest.mark.parametrize("rule", GUARDS.values(), ids=GUARDS)
def test_control_guards_change_bits(rule, monkeypatch):
    """With both checks taken back they are served, and a neighbour changes bits."""
    monkeypatch.setattr(proof, "reads_rows", lambda recorder: [])
    keeps = proof.Prober.keeps_places
    monkeypatch.setattr(
        proof.Prober, "keeps_places", lambda p, name: name.endswith("as a whole") or keeps(p, name)
    )
    alone, beside = alone_and_beside(guarded(rule)[0])
    assert alone != beside


@pytest.mark.parametrize("name", [name for name in HARMLESS if name != "each row"])
def test_what_looks_at_no_other_row_is_served(name):
    alone, beside = alone_and_beside(guarded(HARMLESS[name])[0])
    assert alone == beside


# Tensors of the model that its own passes write to, as observers of quantization-aware training do:
# named where a request is deterministic; others end as they should.

NAME = f"{MLP}.down_proj.1"
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


@pytest.mark.parametrize("verify", [False, True])
def test_a_write_that_the_proof_does_not_see_ends_the_request(monkeypatch, verify):
    """Later ones are refused, also where every call finds by digests what the passes wrote."""
    settings = {"max_rows": 16, "verify_weights": verify}
    with engine_of(model_with(partial(Counts, add_later)), **settings) as engine:
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
