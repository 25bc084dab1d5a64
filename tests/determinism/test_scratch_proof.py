"""A proof does not depend on the values of weights: it uses weights of its own making.

Controls: models of these weights differ in every other respect, and a linear that differs at one
row count is found whatever the weights are.
"""

import random

import pytest
import torch
from torch import nn

from tests.support.cases import bits_of, facts_of, one_by_one, run
from tests.support.mixes import crowd
from tests.support.sensitive import ShapeSensitiveLinear, _SplitLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.determinism import proof
from tinyspec.runner import kv_cache

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
DETERMINISTIC = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)


pytestmark = pytest.mark.usefixtures("home")


FILLS = {
    "as they are": lambda parameter: None,
    "zero": nn.init.zeros_,
    "identity": lambda p: nn.init.eye_(p) if p.dim() == 2 else nn.init.ones_(p),
    "nan": lambda parameter: nn.init.constant_(parameter, torch.nan),
}


def fill(model, name):
    """Other weights in the loaded model, as some of these are refused at load."""
    for parameter in model.parameters():
        FILLS[name](parameter)


def broken_by(model, filled="as they are"):
    """What a new proof finds, by rows."""
    with Engine(model, config=CONFIG) as engine:
        fill(model, filled)
        return {b["rows"]: list(b["broken_by"]) for b in facts_of(engine)["buckets"]}


class OtherAtFourRows(_SplitLinear):
    """Splits its sum elsewhere in passes of four rows."""

    def forward(self, x):
        return self._split_at(x, self._cut(1 if x.shape[:-1].numel() == 4 else 2))


def replaced(model, name, kind=OtherAtFourRows):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    return model


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("filled", FILLS)
def test_a_linear_that_differs_at_one_row_count_is_caught(filled):
    found = broken_by(replaced(tiny(), NAME), filled)
    assert [rows for rows, names in found.items() if NAME in names] == [4]


@pytest.mark.parametrize("random_b", [False, True])
def test_an_adapter_with_b_of_zero(random_b):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=8, target_modules=["down_proj"], init_lora_weights=not random_b)
    model = peft.get_peft_model(tiny(), settings).eval()
    layer = model.base_model.model.get_submodule(NAME)
    assert bool(layer.lora_B["default"].weight.any()) == random_b
    assert not any("lora_B" in name for name in broken_by(model)[4]), "control"
    layer.lora_B["default"] = OtherAtFourRows(layer.lora_B["default"])
    assert f"{NAME}.lora_B.default" in broken_by(model)[4]


@pytest.mark.parametrize("filled", ["zero", "identity"])
def test_a_proof_on_other_weights_holds_for_those_loaded_later(filled):
    """The first token's log-probability too: alone, a prompt of one token is a pass of one row."""
    weights = tiny().state_dict()
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    with Engine(model, config=CONFIG) as engine:
        fill(model, filled)
        engine.contract.ensure()
        assert engine.contract.results.canonical == [8]
        engine.generate([[1, 2, 3]], DETERMINISTIC)
        model.load_state_dict(weights)
        requests = [(prompt, DETERMINISTIC) for prompt in prompts(4)]
        together = run(engine, [*requests, *crowd(random.Random(0), 9)])
        assert bits_of(together[:4]) == one_by_one(engine, requests)


SLOW = pytest.mark.slow("crosses", 1)


@pytest.mark.parametrize(
    "family", ["dbrx", *(pytest.param(n, marks=SLOW) for n in ("jetmoe", "longcat_flash"))]
)
def test_routing_by_data_is_found_whatever_the_router_says(family):
    """Of experts in loops of their own. A router of zeros sends all rows to the same experts, so
    that nothing seems to depend on them."""
    for filled in ("as they are", "zero"):
        model = of_zoo(family)
        with Engine(model) as engine:
            fill(model, filled)
            with pytest.raises(DeterminismError, match="shapes of its matmuls"):
                engine.generate([[1, 2, 3]], DETERMINISTIC)


def test_too_little_memory_is_refused_with_the_bytes(monkeypatch):
    """Of a proof; results on disk take none."""
    model, plain = tiny(), SamplingParams()
    largest = max(p.nbytes for p in model.parameters())

    def refuse(needed, device):
        with monkeypatch.context() as patches:
            patches.setattr(kv_cache, "_free_memory", lambda device: largest)
            kv_cache.refuse_shortage(needed, device)

    with Engine(model, config=CONFIG) as engine:
        with monkeypatch.context() as patches:
            patches.setattr(proof, "refuse_shortage", refuse)
            with pytest.raises(DeterminismError, match=rf"a proof takes \d+ bytes.* {largest} "):
                engine.generate([[1, 2, 3]], DETERMINISTIC)
            assert engine.generate([[1, 2, 3]], plain)[0].completions[0].finish_reason == "length"
        first = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
    monkeypatch.setattr(proof, "refuse_shortage", refuse)
    with Engine(tiny(seed=1), config=CONFIG) as engine:
        assert engine.generate([[1, 2, 3]], DETERMINISTIC)[0].fingerprint != first.fingerprint
