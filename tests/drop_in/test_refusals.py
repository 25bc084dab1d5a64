"""What a patched model's ``generate`` refuses: what transformers does, in its words."""

import copy

import pytest
import torch
from transformers.generation import LogitsProcessor

from tests.support.judge import NEW, PAD, ROWS, listen, one, pair
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BASE = {"max_new_tokens": NEW, "pad_token_id": PAD}
ROW = one(ROWS[0])


class Third(LogitsProcessor):
    def __call__(self, input_ids, scores, third):
        return scores


BAD = {
    "trust-remote-code": {"trust_remote_code": False},
    "return-dict": {"return_dict": True},
    "typo": {"max_new_token": 5},
    "two-typos": {"temprature": 0.5, "topk": 3},
    "temperature-0": {"temperature": 0.0, "do_sample": True},
    "temperature-int-0": {"temperature": 0, "do_sample": True},
    "temperature-negative": {"temperature": -1.0, "do_sample": True},
    "temperature-string": {"temperature": "hot", "do_sample": True},
    "top-k-negative": {"top_k": -1, "do_sample": True},
    "top-k-float": {"top_k": 2.5, "do_sample": True},
    "top-p-above-1": {"top_p": 1.5, "do_sample": True, "top_k": 1},
    "top-p-negative": {"top_p": -0.1, "do_sample": True},
    "min-p-above-1": {"min_p": 1.1, "do_sample": True},
    "min-p-negative": {"min_p": -0.1, "do_sample": True},
    "sequences-greedy": {"num_return_sequences": 2},
    "max-length-below-prompt": {"max_length": 3, "max_new_tokens": None},
    "max-length-of-prompt": {"max_length": 5, "max_new_tokens": None},
    "no-new-tokens": {"max_new_tokens": 0},
    "negative-new-tokens": {"max_new_tokens": -3},
    "mask-3-d": {"attention_mask": torch.ones(1, 5, 5)},
    "both-inputs": {"inputs": ROW},
    "embeds-2-d": {"inputs_embeds": torch.zeros(5, 64)},
    "penalty-negative": {"repetition_penalty": -1.0},
    "penalty-0": {"repetition_penalty": 0.0},
    "penalty-int": {"repetition_penalty": 2},
    "encoder-penalty-negative": {"encoder_repetition_penalty": -1.0},
    "ngram-float": {"no_repeat_ngram_size": 1.5},
    "bad-words-empty": {"bad_words_ids": []},
    "bad-words-flat": {"bad_words_ids": [3, 4]},
    "bad-words-negative": {"bad_words_ids": [[-1]]},
    "suppress-string": {"suppress_tokens": "all"},
    "suppress-outside": {"suppress_tokens": [VOCAB + 3]},
    "bias-empty": {"sequence_bias": {}},
    "bias-int": {"sequence_bias": {(3,): 5}},
    "bias-string": {"sequence_bias": "up"},
    "bias-outside": {"sequence_bias": {(VOCAB + 1,): 5.0}},
    "forced-bos-outside": {"forced_bos_token_id": VOCAB + 1},
    "forced-eos-negative": {"forced_eos_token_id": -2},
    "min-length-negative": {"min_length": -2, "eos_token_id": 3},
    "min-new-tokens-negative": {"min_new_tokens": -2, "eos_token_id": 3},
    "decay-without-eos": {"exponential_decay_length_penalty": (2, 1.5)},
    "eos-float": {"eos_token_id": 2.5},
    "eos-string": {"eos_token_id": "stop"},
    "pad-negative": {"pad_token_id": -1},
    "processor-third-argument": {"logits_processor": [Third()]},
    "criteria-not-a-list": {"stopping_criteria": lambda ids, scores: False},
    "stop-strings": {"stop_strings": ["a"]},
    "cache-unknown": {"cache_implementation": "nonsense"},
    "early-stopping-unknown": {"early_stopping": "maybe"},
    "beams-and-streamer": {"num_beams": 2, "streamer": object()},
    "sequences-assisted": {
        "prompt_lookup_num_tokens": 3,
        "num_return_sequences": 2,
        "do_sample": True,
    },
}


# Where transformers stumbles over an argument, tinyspec may name it instead.
STUMBLES = {
    "config-dict": ("generation_config", {"generation_config": {"max_new_tokens": 3}}),
    "processor-not-callable": ("logits_processor", {"logits_processor": [5]}),
    "assistant-is-text": ("assistant_model", {"assistant_model": "gpt2"}),
    "processor-not-a-list": ("logits_processor", {"logits_processor": LogitsProcessor()}),
    "lookup-0": ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 0}),
    "processor-wrong-shape": ("shape", {"logits_processor": [lambda ids, scores: scores[0]]}),
    "ids-outside": ("prompt token id", {"input_ids": torch.tensor([[3, VOCAB + 5]])}),
    "ids-negative": ("prompt token id", {"input_ids": torch.tensor([[3, -5]])}),
    "ids-float": ("input_ids", {"input_ids": torch.tensor([[3.0, 5.0]])}),
    "ids-empty": ("input_ids", {"input_ids": torch.zeros(1, 0, dtype=torch.long)}),
    "ids-3-d": ("input_ids", {"input_ids": torch.ones(1, 2, 3, dtype=torch.long)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_as_transformers(name):
    settings = {"input_ids": ROW, **BASE, **BAD[name]}
    ours, theirs = (listen(m.generate, **copy.deepcopy(settings)) for m in pair())
    if theirs.error is None:
        assert ours.error is None and torch.equal(ours.result, theirs.result)
    assert ours.complaint == theirs.complaint
    assert ours.lines == theirs.lines
    model, own = pair()
    assert torch.equal(model.generate(ROW, **BASE), own.generate(ROW, **BASE))


@pytest.mark.parametrize("name", STUMBLES)
def test_what_transformers_stumbles_over_is_named(name):
    argument, settings = STUMBLES[name]
    ours, theirs = (listen(m.generate, **{"input_ids": ROW, **BASE, **settings}) for m in pair())
    assert theirs.error is not None and ours.error is not None
    named = isinstance(ours.error, ValueError) and argument in str(ours.error)
    assert named or type(ours.error) is type(theirs.error)
    model, own = pair()
    assert torch.equal(model.generate(ROW, **BASE), own.generate(ROW, **BASE))


def test_a_model_config_that_controls_generation():
    heard = []
    for model in pair():
        model.config.temperature = 0.7
        try:
            heard.append(listen(model.generate, ROW, **BASE))
        finally:
            del model.config.temperature
    assert isinstance(heard[1].error, ValueError) and heard[0].complaint == heard[1].complaint


def test_control_complaints_differ():
    heard = [listen(pair()[0].generate, ROW, **BASE | BAD[n]) for n in ("typo", "penalty-0")]
    assert heard[0].complaint != heard[1].complaint and heard[0].error is not None


PER_REQUEST = {
    "too-few": {"max_new_tokens": [3, 4]},
    "too-many-seeds": {"seed": [1, 2, 3], "do_sample": True},
    "shared": {"pad_token_id": [0, 1, 2, 3]},
    "seed": {"seed": -1, "do_sample": True},
    "seed-text": {"seed": "one", "do_sample": True},
    "deterministic": {"deterministic": "yes"},
    "deterministic-count": {"deterministic": [True]},
}


@pytest.mark.parametrize("settings", PER_REQUEST.values(), ids=PER_REQUEST)
def test_bad_values_of_what_only_tinyspec_has_are_named(settings):
    model, _ = pair()
    name = next(iter(settings))
    with pytest.raises(ValueError, match=name):
        model.generate(ROWS, **BASE | settings)


@pytest.mark.parametrize("name", ["seed", "deterministic"])
def test_transformers_has_no_such_argument(name):
    """The copy that judges is not patched: a control for the whole set."""
    _, own = pair()
    with pytest.raises(ValueError, match=name):
        own.generate(ROW, **BASE, **{name: 1})


@pytest.mark.parametrize("seed", [-5, "abc", 1.5])
def test_a_bad_seed_of_a_greedy_request(seed):
    with pytest.raises(ValueError, match="seed"):
        pair()[0].generate([[1, 2]], **BASE, seed=seed)
