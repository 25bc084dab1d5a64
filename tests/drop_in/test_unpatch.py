"""Patching leaves the model as it is, and unpatching leaves no trace; changes in between are seen.

Control: the portrait that is compared shows a hook.
"""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import tinyspec
from tests.support.drop_in import PAD, SMALL, greedy, own, patched, portrait, random_ids
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine, EngineConfig, UnsupportedModelError

PROMPT = random_ids(11)
IDS = torch.tensor([PROMPT])


def busy(family: str = "llama"):
    """A model with something of everything that could get lost."""
    model = tiny(family).train()
    model.get_input_embeddings().eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    norm = [m for m in model.modules() if "Norm" in type(m).__name__][-1]
    norm.register_forward_hook(lambda *_: None)
    norm.register_forward_pre_hook(lambda *_: None)
    norm.register_full_backward_hook(lambda *_: None)
    model.generation_config.max_new_tokens = 5
    model.generation_config.pad_token_id = PAD
    model.note = {"a": 1}
    return model


ADDED = {".generate", ".generate_batch"}


def outside(model):
    """The portrait of a model, but for what is on it while it is patched."""
    return {k: v for k, v in portrait(model).items() if k not in ADDED}


def raises(ids, scores, **_):
    raise KeyError("raised")


def failing_calls(model):
    """Calls that end in errors at all places where a call can."""
    for wrong in (
        {"temperature": -1.0, "do_sample": True},
        {"no_such": 1},
        {"seed": 1, "num_beams": 2},
        {"logits_processor": [raises]},
        {"stopping_criteria": [raises]},
        {"deterministic": True, "max_time": 1.0},
        {"max_new_tokens": 10_000, "seed": 1, "do_sample": True},
    ):
        with pytest.raises((ValueError, NotImplementedError, KeyError)):
            model.generate(IDS, **wrong)


@pytest.mark.crossed(0.3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calls", ["no call", "calls", "failed calls", "released"])
def test_the_model_is_its_own_self(family, calls):
    model = busy(family)
    before = portrait(model)
    tinyspec.patch(model, SMALL)
    assert outside(model) == before
    for _ in range(2):
        if calls == "failed calls":
            failing_calls(model)
        elif calls != "no call":
            model.generate(IDS)
            model.generate(IDS, do_sample=True, seed=1, deterministic=True)
            model.generate(IDS, num_beams=2)  # by transformers
        if calls == "released":
            model.generate.release()
        assert outside(model) == before
    tinyspec.unpatch(model)
    assert portrait(model) == before
    tinyspec.unpatch(model)
    assert portrait(model) == before


def test_control_a_hook_shows():
    model = busy()
    before = portrait(model)
    with Engine(model):
        assert portrait(model) == before
    model.lm_head.register_forward_hook(lambda *_: None)
    assert portrait(model) != before


def test_patched_again_and_again():
    model = busy()
    before = portrait(model)
    for _ in range(3):
        with patched(model):
            assert greedy(model, PROMPT) == greedy(own(), PROMPT)
        assert portrait(model) == before


def test_a_patched_model_is_not_patched_again():
    with patched(tiny()) as model:
        before, generate = portrait(model), model.generate
        for _ in range(2):
            with pytest.raises(ValueError, match=r"patched.*unpatch"):
                tinyspec.patch(model)
            assert model.generate is generate
            assert portrait(model) == before
        with Engine(model) as engine:  # which has a copy of its own
            assert engine.generate([PROMPT])[0].completions[0].finish_reason == "length"
            assert greedy(model, PROMPT) == greedy(own(), PROMPT)


def falcon():
    config = FalconConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config).eval()


def one_layer_of_its_own():
    class OwnAttention(LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            rows = hidden_states.shape[1]
            weights = torch.ones(rows, rows).tril()
            return (weights / weights.sum(-1, keepdim=True)) @ self.v_proj(hidden_states)[
                ..., :1
            ].expand_as(hidden_states), None

    model = tiny()
    model.model.layers[1].self_attn.__class__ = OwnAttention
    return model


def no_known_layer():
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn = nn.Identity()
    return model


@pytest.mark.parametrize("make", [falcon, one_layer_of_its_own, no_known_layer])
def test_a_model_that_is_not_supported_is_left_alone(make):
    model = make()
    before = portrait(model)
    with pytest.raises(UnsupportedModelError):
        tinyspec.patch(model)
    assert portrait(model) == before
    tinyspec.unpatch(model)
    assert portrait(model) == before


def test_a_config_that_is_refused_leaves_the_model_alone():
    model = tiny()
    before = portrait(model)
    with pytest.raises(ValueError, match="max_model_len"):
        tinyspec.patch(model, EngineConfig(max_model_len=4096))
    assert portrait(model) == before
    with patched(model):
        assert greedy(model, PROMPT) == greedy(own(), PROMPT)


def test_a_generate_of_the_models_own_comes_back():
    asked = []

    def own_generate(self, *args, **kwargs):
        asked.append(kwargs.get("num_beams"))
        return type(self).generate(self, *args, **kwargs)

    model = tiny()
    model.generate = types.MethodType(own_generate, model)
    before, mine = portrait(model), model.generate
    with patched(model):
        assert model.generate is not mine
        asked.clear()
        assert greedy(model, PROMPT, num_beams=2) == greedy(own(), PROMPT, num_beams=2)
        assert asked[-1] == 2  # what tinyspec does not serve goes to the model's own
        assert greedy(model, PROMPT) == greedy(own(), PROMPT)
    assert model.generate is mine
    assert portrait(model) == before


def test_a_generate_that_is_put_over_ours_stays():
    model = tiny()
    tinyspec.patch(model, SMALL)
    ours = model.generate
    model.generate = over = lambda *args, **kwargs: ours(*args, **kwargs)
    assert greedy(model, PROMPT) == greedy(own(), PROMPT)
    tinyspec.unpatch(model)
    assert model.generate is over  # not ours to take away
    ours.close()
    assert model.generate is over
    del model.generate
    assert greedy(model, PROMPT) == greedy(own(), PROMPT)


def test_what_is_kept_of_a_generate_says_that_it_is_over():
    model = tiny()
    before = portrait(model)
    tinyspec.patch(model, SMALL)
    kept = model.generate
    greedy(model, PROMPT)
    tinyspec.unpatch(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unpatched; call tinyspec\.patch\(model\) again"):
            kept(IDS, max_new_tokens=2, pad_token_id=PAD)
        assert portrait(model) == before
    with patched(model):
        with pytest.raises(RuntimeError, match=r"unpatched; call tinyspec\.patch\(model\) again"):
            kept(IDS, max_new_tokens=2, pad_token_id=PAD)
        assert greedy(model, PROMPT) == greedy(own(), PROMPT)
    assert portrait(model) == before
