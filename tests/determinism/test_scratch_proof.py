"""A proof does not depend on the values of weights: it uses weights of its own making.

Controls: models of these weights differ in every other respect, and a linear that differs at one
row count is found whatever the weights are.
"""

import random

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from tests.support.cases import facts_of
from tests.support.mixes import bits, crowd, solo
from tests.support.sensitive import ShapeSensitiveLinear, _SplitLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.determinism import proof
from tinyspec.runner import kv_cache

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
DETERMINISTIC = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "tinyspec"


@torch.no_grad()
def zero(model):
    for parameter in model.parameters():
        parameter.zero_()


@torch.no_grad()
def identity(model):
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.eye_(parameter)
        else:
            parameter.fill_(1)


@torch.no_grad()
def not_a_number(model):
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


def as_they_are(model):
    pass


FILLS = (as_they_are, zero, identity, not_a_number)


def found_of(model, fill=as_they_are):
    """What a new proof finds. fill: applied to the loaded model, as some of these weights are
    refused at load."""
    with Engine(model, config=CONFIG) as engine:
        fill(model)
        return facts_of(engine)


def broken_by(facts, rows):
    return next(list(b["broken_by"]) for b in facts["buckets"] if b["rows"] == rows)


class OtherAtFourRows(_SplitLinear):
    """Splits its sum elsewhere in passes of four rows."""

    def forward(self, x):
        return self._split_at(x, self._cut(1 if x.shape[:-1].numel() == 4 else 2))


def replaced(model, name, kind=OtherAtFourRows):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    return model


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_a_linear_that_differs_at_one_row_count_is_caught(fill):
    facts = found_of(replaced(tiny(), NAME), fill)
    assert NAME in broken_by(facts, 4)
    for rows in (2, 8, 16):
        assert NAME not in broken_by(facts, rows), "control"


@pytest.mark.parametrize("random_b", [False, True])
def test_an_adapter_with_b_of_zero(random_b):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=8, target_modules=["down_proj"], init_lora_weights=not random_b)
    model = peft.get_peft_model(tiny(), settings).eval()
    layer = model.base_model.model.get_submodule(NAME)
    assert bool(layer.lora_B["default"].weight.any()) == random_b
    other = found_of(model)
    assert not any("lora_B" in n for n in broken_by(other, 4)), "control"
    layer.lora_B["default"] = OtherAtFourRows(layer.lora_B["default"])
    assert f"{NAME}.lora_B.default" in broken_by(found_of(model), 4)


@pytest.mark.parametrize("fill", [zero, identity], ids=lambda fill: fill.__name__)
def test_a_proof_on_other_weights_holds_for_those_loaded_later(fill):
    """The first token's log-probability too: alone, a prompt of one token is a pass of one row."""
    weights = tiny().state_dict()
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    with Engine(model, config=CONFIG) as engine:
        fill(model)
        engine.contract.ensure()
        assert engine.contract.results.canonical == [8]
        engine.generate([[1, 2, 3]], DETERMINISTIC)
        model.load_state_dict(weights)
        alone = [bits(solo(engine, (p, DETERMINISTIC))) for p in prompts(4)]
        together = bits_of(engine, [(p, DETERMINISTIC) for p in prompts(4)])
        assert together == alone


def bits_of(engine, requests):
    """Bits of ``requests`` among others."""
    order = [*requests, *crowd(random.Random(0), 9)]
    outputs = engine.generate([p for p, _ in order], [s for _, s in order])
    return [bits(output) for output in outputs[: len(requests)]]


SLOW = pytest.mark.slow("crosses", 1)


@pytest.mark.parametrize(
    "family", ["dbrx", *(pytest.param(n, marks=SLOW) for n in ("jetmoe", "longcat_flash"))]
)
def test_routing_by_data_is_found_whatever_the_router_says(family):
    """Of experts in loops of their own. A router of zeros sends all rows to the same experts, so
    that nothing seems to depend on them."""
    for fill in (as_they_are, zero):
        model = of_zoo(family)
        with Engine(model) as engine:
            fill(model)
            with pytest.raises(DeterminismError, match="shapes of its matmuls"):
                engine.generate([[1, 2, 3]], DETERMINISTIC)


# Memory


def short(patches, free):
    """A proof finds so many bytes."""

    def refuse(needed, device):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(kv_cache, "_free_memory", lambda device: free)
            kv_cache.refuse_shortage(needed, device)

    patches.setattr(proof, "refuse_shortage", refuse)


def test_too_little_memory_is_refused_with_the_bytes(monkeypatch):
    model = tiny()
    largest = max(p.nbytes for p in model.parameters())
    with Engine(model, config=CONFIG) as engine:
        with monkeypatch.context() as patches:
            short(patches, largest)
            with pytest.raises(DeterminismError, match=rf"a proof takes \d+ bytes.* {largest} "):
                engine.generate([[1, 2, 3]], DETERMINISTIC)
            assert engine.generate([[1, 2, 3]])[0].completions[0].finish_reason == "length"
        first = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
    short(monkeypatch, 0)
    with Engine(tiny(seed=1), config=CONFIG) as engine:
        assert engine.generate([[1, 2, 3]], DETERMINISTIC)[0].fingerprint != first.fingerprint


# Facts on disk


def proven(model):
    with Engine(model, config=CONFIG) as engine:
        engine.contract.ensure()
        return engine.contract.results, engine.fingerprint


def test_another_checkpoint_of_the_same_structure_reads_the_facts(home, probed):
    first = proven(tiny())
    second = proven(tiny(seed=1))
    assert len(probed) == 1 and len(list(home.iterdir())) == 1
    assert second[0] == first[0] and second[1] != first[1]
