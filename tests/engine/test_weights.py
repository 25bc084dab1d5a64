"""Weights that change between calls without a trace, or lie otherwise. Steps of optimizers:
tests/determinism/test_optimizer_steps.py.

The oracle is a fresh engine on a copy of the model with the same weights.
"""

import copy

import pytest
import torch

from tests.support.mixes import bits
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

CONFIG = EngineConfig(reference_rows=16, page_size=16)
DETERMINISTIC = SamplingParams(
    max_new_tokens=12, deterministic=True, logprobs=True, temperature=0.8, seed=3
)
PROMPTS = prompts(6)


def fresh(model):
    """Bits and fingerprint of a new engine on a copy of the model's weights."""
    twin = tiny()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    with Engine(twin, config=CONFIG) as engine:
        outputs = engine.generate(PROMPTS, DETERMINISTIC)
        return [bits(output) for output in outputs], engine.fingerprint


@pytest.mark.parametrize("told", ["weights_changed", "verify_weights", "nobody"])
def test_writes_through_data(told):
    """They leave no trace: somebody has to say so, or every call has to digest."""
    model = tiny()
    config = EngineConfig(reference_rows=16, page_size=16, verify_weights=told == "verify_weights")
    with Engine(model, config=config) as engine:
        engine.generate(PROMPTS, DETERMINISTIC)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        if told == "weights_changed":
            engine.weights_changed()
        outputs = engine.generate(PROMPTS, DETERMINISTIC)
        expected, fingerprint = fresh(model)
        same = [bits(o) for o in outputs] == expected and outputs[0].fingerprint == fingerprint
    # Control: with nobody told, pages of the old weights are used, and the check sees it.
    assert same == (told != "nobody")


def test_weights_that_lie_otherwise_have_another_fingerprint():
    """Products of a weight that lies column by column may have other bits."""
    model = tiny()
    with Engine(model, config=EngineConfig(reference_rows=8, max_rows=8, linear="never")) as engine:
        fingerprints = []
        for same in (torch.clone, lambda x: x.T.contiguous().T):
            fingerprints.append(engine.fingerprint)
            model.lm_head.weight.data = same(model.lm_head.weight.detach())
            engine.check_model()
        assert fingerprints[0] == fingerprints[1] != engine.fingerprint
