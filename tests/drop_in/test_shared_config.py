"""Two models of one config share it: to patch one leaves the other as it is, at any moment.

Control: the engine does change what its own model's modules see of the config.
"""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support.budget import first
from tests.support.drop_in import SMALL, greedy, patched, portrait, random_ids
from tests.support.moe import tiny_moe
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tinyspec import Engine, SamplingParams
from tinyspec.model.attention import IMPLEMENTATION

PROMPT = random_ids(9)
# The first row is padded: a mask that is left out shows.
PADDED = {
    "input_ids": torch.tensor([[0, 0, *PROMPT], random_ids(11, 1)]),
    "attention_mask": torch.tensor([[0] * 2 + [1] * 9, [1] * 11]),
}


def pair(make=tiny):
    """Models a and b of one config, and what b answers by itself."""
    a = make()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        b = AutoModelForCausalLM.from_config(a.config).eval()
    b.config = a.config
    for module in b.modules():
        if getattr(module, "config", None) is not None:
            module.config = a.config
    return a, b


def plain(model):
    with torch.no_grad():
        logits = model(**PADDED).logits
    return logits


@pytest.mark.parametrize("make", first(1, (tiny, tiny_moe), 0.5))
def test_an_engine_beside_another_model(make):
    a, b = pair(make)
    before, expected = portrait(b), plain(b)
    tokens = greedy(b, PROMPT)
    with Engine(a, config=SMALL) as engine:
        served = engine.runner.model.config
        assert served._attn_implementation == IMPLEMENTATION, "control"
        assert portrait(b) == before and b.config._attn_implementation == "sdpa"
        for _ in range(2):
            assert torch.equal(plain(b), expected)
            assert greedy(b, PROMPT) == tokens
            engine.generate([PROMPT], SamplingParams(max_new_tokens=2))
    assert portrait(b) == before and a.config is b.config


def test_the_other_model_as_assistant():
    a, b = pair()
    before, expected = portrait(b), greedy(a, PROMPT)
    with patched(a):
        assert greedy(a, PROMPT, assistant_model=b) == expected
    assert portrait(b) == before


def test_the_other_model_in_a_processor():
    a, b = pair()
    expected, seen = plain(b), []

    def asks(ids, scores):
        seen.append(plain(b))
        return scores

    tokens = greedy(a, PROMPT)
    with patched(a):
        assert greedy(a, PROMPT, logits_processor=[asks]) == tokens
    assert len(seen) == 8 and all(torch.equal(one, expected) for one in seen)


def test_the_other_model_in_another_thread():
    """In the middle of the passes of the first."""
    a, b = pair()
    expected, seen = plain(b), []

    def meanwhile(*_):
        thread = threading.Thread(target=lambda: seen.append(plain(b)))
        thread.start()
        thread.join(PATIENCE)

    tokens = greedy(a, PROMPT)
    a.model.layers[0].mlp.register_forward_hook(meanwhile)
    with patched(a):
        seen.clear()
        assert greedy(a, PROMPT) == tokens
    assert len(seen) >= 8 and all(torch.equal(one, expected) for one in seen)


def test_both_are_served():
    a, b = pair()
    expected = greedy(a, PROMPT), greedy(b, PROMPT)
    with patched(a), patched(b):
        assert (greedy(a, PROMPT), greedy(b, PROMPT)) == expected
        tinyspec.unpatch(a)
        assert (greedy(a, PROMPT), greedy(b, PROMPT)) == expected


def test_what_is_set_on_the_config_is_set_for_both():
    a, b = pair()
    with Engine(a, config=SMALL):
        a.config.pad_token_id = 7
        assert b.config.pad_token_id == 7
        b.config.pad_token_id = 8
        assert a.config.pad_token_id == 8
        assert a.config == b.config and a.config.to_dict() == b.config.to_dict()
        assert isinstance(a.config, type(b.config))
    assert a.config is b.config and a.config.pad_token_id == 8
