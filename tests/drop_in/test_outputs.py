"""What a patched model's ``generate`` returns, shows its hooks, and takes its settings from."""

import copy

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from tests.support.judge import (
    BASE,
    BLOCK,
    MASK,
    PAD,
    ROWS,
    by_row,
    close,
    defaults,
    greedy,
    joined,
    listen,
    one,
    pair,
)
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_dict_outputs_equal_transformers():
    model, own = pair()
    settings = lambda: {  # noqa: E731
        **BASE,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": [greedy()[0][4], greedy()[3][6]],
        "repetition_penalty": 1.2,
        "suppress_tokens": [5, 6],
    }
    given = model.generate(BLOCK, attention_mask=MASK, **settings())
    judged = by_row(own, ROWS, settings)
    assert type(given) is type(judged[0]) is GenerateDecoderOnlyOutput
    assert torch.equal(given.sequences, joined(BLOCK, ROWS, judged))
    longest = given.sequences.shape[1] - BLOCK.shape[1]
    for name in ("scores", "logits"):
        steps = getattr(given, name)
        assert isinstance(steps, tuple) and len(steps) == longest
        assert all(step.shape == (len(ROWS), VOCAB) for step in steps)
        for number, output in enumerate(judged):
            theirs = getattr(output, name)
            ours = tuple(step[number : number + 1] for step in steps[: len(theirs)])
            assert close(ours, theirs)
            assert not close(ours, tuple(step + 1e-2 for step in theirs)), "control"
    assert given.attentions is None and given.hidden_states is None
    bare = model.generate(BLOCK, attention_mask=MASK, **BASE, return_dict_in_generate=True)
    assert bare.scores is None and bare.logits is None


def test_return_sequences_equal_transformers():
    (model, own), count = pair(), 3
    settings = lambda: {  # noqa: E731
        **BASE,
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": count,
        "eos_token_id": greedy()[0][3],
    }
    given = model.generate(BLOCK, attention_mask=MASK, **settings())
    assert torch.equal(given, joined(BLOCK, ROWS, by_row(own, ROWS, settings)))
    wanted = {**settings(), "return_dict_in_generate": True, "output_scores": True}
    steps = model.generate(BLOCK, attention_mask=MASK, **wanted).scores
    assert all(step.shape == (count * len(ROWS), VOCAB) for step in steps)
    hot = model.generate(
        BLOCK, attention_mask=MASK, **settings() | {"top_k": 0, "temperature": 3.0}
    )
    assert not torch.equal(hot[0], hot[1])


LAYERS = {
    "model-only": ({"max_new_tokens": 3}, None, {}),
    "kwargs-over-config": ({"max_new_tokens": 3}, {"max_new_tokens": 5}, {"max_new_tokens": 7}),
    "none-over-model": ({"repetition_penalty": 9.0}, None, {"repetition_penalty": None}),
    "config-fills-in": ({"repetition_penalty": 9.0, "max_new_tokens": 4}, {"max_length": 30}, {}),
    "model-max-length-and-new": ({"max_length": 11}, None, {"max_new_tokens": 9}),
    "none-max-length": ({"max_length": 11}, None, {"max_length": None}),
    "model-samples": ({"do_sample": True, "top_k": 1, "temperature": 0.5}, None, {}),
    "model-dict": ({"return_dict_in_generate": True, "output_logits": True}, None, {}),
    "min-both": ({"min_length": 9, "eos_token_id": 5}, None, {"min_new_tokens": 3}),
    "none-over-eos": ({"eos_token_id": greedy()[0][4]}, None, {"eos_token_id": None}),
    "none-over-lists": ({"suppress_tokens": [greedy()[0][1]]}, None, {"suppress_tokens": None}),
    "custom-entry": ({}, {"max_new_tokens": 6, "my_own_entry": 3}, {}),
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_settings_are_merged_as_transformers_merges_them(layers):
    of_model, of_config, of_call = layers
    with defaults(pair(), pad_token_id=PAD, **of_model):
        heard = []
        for model in pair():
            config = None if of_config is None else GenerationConfig(**of_config)
            kept = copy.deepcopy(config), copy.deepcopy(model.generation_config)
            heard.append(listen(model.generate, one(ROWS[0]), generation_config=config, **of_call))
            assert (config, model.generation_config) == kept
    ours, theirs = heard
    assert ours.complaint == theirs.complaint and ours.lines == theirs.lines
    assert type(ours.result) is type(theirs.result)
    if theirs.error is None:
        assert torch.equal(*(getattr(each.result, "sequences", each.result) for each in heard))
