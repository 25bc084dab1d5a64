"""``model.generate`` of a patched model decodes as transformers' own does, setting by setting,
returns what it returns, takes its settings from where it takes them, and refuses what it refuses,
in its words."""

import copy

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers import generation as hf

from tests.support import judge
from tests.support.hooks import Backwards, Only, Sure, Until
from tests.support.judge import BASE, BLOCK, MASK, ROWS, by_row, greedy, joined, listen, one, pair
from tests.support.tiny import VOCAB
from tinyspec import generate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def infinite(input_ids, scores):
    """Forces a token as some do, by an infinite score."""
    scores[:, 9] = torch.inf
    return scores


# Settings that change the greedy tokens, beside those of test_random.py; g: what follows ROWS in
# greedy decoding.
PROCESSORS = {
    "repetition-penalty": lambda g: {"repetition_penalty": 3.0},
    "suppress": lambda g: {"suppress_tokens": [row[2] for row in g]},
    "sequence-bias": lambda g: {"sequence_bias": {(g[0][1],): -20.0, (g[1][0], 9): 30.0}},
    "sequence-bias-lists": lambda g: {"sequence_bias": [[[g[0][1]], -20.0], [[g[3][0], 9], 30.0]]},
    "forced-eos-list": lambda g: {"forced_eos_token_id": [12, 13], "max_new_tokens": 5},
    "eos-list": lambda g: {"eos_token_id": [g[0][4], g[1][2], g[3][6]]},
    "eos-is-pad": lambda g: {"eos_token_id": g[0][4], "pad_token_id": g[0][4]},
    "pad-falls-back-to-eos": lambda g: {"eos_token_id": g[0][4], "pad_token_id": None},
    "min-new-tokens": lambda g: {"eos_token_id": [row[2] for row in g], "min_new_tokens": 6},
    "decay": lambda g: {"eos_token_id": 3, "exponential_decay_length_penalty": (2, 2.5)},
    "custom-double": lambda g: {"logits_processor": [lambda ids, scores: -scores.double()]},
    "custom-infinite": lambda g: {"logits_processor": [infinite]},
    "allowed": lambda g: {"prefix_allowed_tokens_fn": lambda n, ids: [int(ids[-1]) // 2, 5 + n]},
    "custom-list": lambda g: {"logits_processor": hf.LogitsProcessorList([Only(), Backwards()])},
    "custom-of-a-made-type": lambda g: {
        "repetition_penalty": 1.1,
        "logits_processor": [hf.RepetitionPenaltyLogitsProcessor(4.0)],
    },
    "custom-warper-greedy": lambda g: {
        "repetition_penalty": 2.0,
        "logits_processor": [hf.TemperatureLogitsWarper(0.1), Backwards()],
    },
    "criterion": lambda g: {"stopping_criteria": [Until(12)], "eos_token_id": 1},
    "criterion-max-length": lambda g: {
        "stopping_criteria": hf.StoppingCriteriaList([hf.MaxLengthCriteria(20)]),
        "max_new_tokens": 30,
    },
    "criterion-of-scores": lambda g: {**DICT, "stopping_criteria": [Sure()]},
    "criterion-eos": lambda g: {"stopping_criteria": [hf.EosTokenCriteria(g[0][4])]},
    "criterion-time": lambda g: {"stopping_criteria": [hf.MaxTimeCriteria(9.0, 0.0)]},
    "no-time": lambda g: {"max_time": 0.0},
    "max-length": lambda g: {"max_length": 21, "max_new_tokens": None},
    "default-length": lambda g: {"max_new_tokens": None},
}


# Settings that leave the greedy tokens as they are.
QUIET = {
    "greedy": lambda g: {},
    "eos-negative-in-list": lambda g: {"eos_token_id": [-1, 500]},
    "warpers-not-sampling": lambda g: {"temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.3},
    "sample-top-k-1": lambda g: {"do_sample": True, "top_k": 1},
    "sample-nearly-0": lambda g: {"do_sample": True, "temperature": 1e-9},
    "numpy-numbers": lambda g: {
        "max_new_tokens": np.int64(judge.NEW),
        "num_return_sequences": np.int64(1),
        "eos_token_id": np.int64(1),
    },
    "nones": lambda g: {"top_k": None, "temperature": None, "top_p": None, "stop_strings": None},
    "inert": lambda g: {"length_penalty": 2.0, "early_stopping": True, "num_beams": 1},
    "no-invalid-values": lambda g: {"remove_invalid_values": True},
    "no-cache": lambda g: {"use_cache": False},
}


# The table on one family, and what touches a model on the others.
# Code of the user's that sees all rows of a call, padded, or their numbers.
OF_ALL_ROWS = ("criterion", "criterion-of-scores", "allowed")
# What transformers makes of a padded block before it calls ``custom_generate``.
OF_PADS = ("max-length",)
ELSEWHERE = ("greedy", "custom-list", "criterion")
CASES = [("llama", name) for name in [*PROCESSORS, *QUIET]]
CASES += [(family, name) for family in judge.FAMILIES[1:] for name in ELSEWHERE]


@pytest.mark.parametrize("family, name", CASES)
def test_tokens_equal_transformers(family, name):
    """By a patched model, and by ``custom_generate`` of one that is not."""
    model, own = pair(family)
    case = {**PROCESSORS, **QUIET}[name]
    settings = lambda: {**BASE, **case(greedy(family))}  # noqa: E731
    pad = settings()["pad_token_id"]
    pad = greedy(family)[0][4] if pad is None else pad
    given = model.generate(BLOCK, attention_mask=MASK, **settings())
    if name in OF_ALL_ROWS:
        judged = own.generate(BLOCK, attention_mask=MASK, **settings())
        judged = getattr(judged, "sequences", judged)
    else:
        judged = joined(BLOCK, ROWS, by_row(own, ROWS, settings), pad)
    tokens = getattr(given, "sequences", given)
    assert tokens.dtype == torch.long
    assert torch.equal(tokens, judged)
    if name not in OF_PADS:
        custom = own.generate(BLOCK, attention_mask=MASK, **settings(), custom_generate=generate)
        assert torch.equal(getattr(custom, "sequences", custom), judged)
    plain = joined(BLOCK, ROWS, [one(r + new) for r, new in zip(ROWS, greedy(family), strict=True)])
    assert torch.equal(judged, plain) == (name in QUIET), "the case shows nothing"
    if family == "llama":
        ours, theirs = (listen(m.generate, one(ROWS[0]), **settings()) for m in pair())
        assert ours.error is None and theirs.error is None
        assert type(ours.result) is type(theirs.result) and ours.lines == theirs.lines


def test_arguments_by_place():
    """In the order that transformers has them."""
    more = (GenerationConfig(**BASE), [Backwards()], [Until(12)], lambda row, ids: [3, 7])
    assert torch.equal(*(model.generate(one(ROWS[0]), *more) for model in pair()))


ROW = one(ROWS[0])
BAD = {
    "trust-remote-code": {"trust_remote_code": False},
    "typo": {"max_new_token": 5},
    "temperature-0": {"temperature": 0.0, "do_sample": True},
    "max-length-below-prompt": {"max_length": 3, "max_new_tokens": None},
    "both-inputs": {"inputs": ROW},
    "embeds-2-d": {"inputs_embeds": torch.zeros(5, 64)},
    "penalty-negative": {"repetition_penalty": -1.0},
    "bad-words-empty": {"bad_words_ids": []},
    "forced-bos-outside": {"forced_bos_token_id": VOCAB + 1},
    "min-length-negative": {"min_length": -2, "eos_token_id": 3},
    "decay-without-eos": {"exponential_decay_length_penalty": (2, 1.5)},
    "pad-negative": {"pad_token_id": -1},
    "criteria-not-a-list": {"stopping_criteria": lambda ids, scores: False},
    "stop-strings": {"stop_strings": ["a"]},
    "cache-unknown": {"cache_implementation": "nonsense"},
    "beams-and-streamer": {"num_beams": 2, "streamer": object()},
}


# Where transformers stumbles over an argument, tinyspec may name it instead.
STUMBLES = [
    ("generation_config", {"generation_config": {"max_new_tokens": 3}}),
    ("logits_processor", {"logits_processor": [5]}),
    ("assistant_model", {"assistant_model": "gpt2"}),
    ("logits_processor", {"logits_processor": hf.LogitsProcessor()}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 0}),
    ("shape", {"logits_processor": [lambda ids, scores: scores[0]]}),
    ("prompt token id", {"input_ids": torch.tensor([[3, VOCAB + 5]])}),
    ("prompt token id", {"input_ids": torch.tensor([[3, -5]])}),
    ("prompt", {"input_ids": torch.tensor([[3.0, 5.0]])}),
    ("input_ids", {"input_ids": torch.zeros(1, 0, dtype=torch.long)}),
    ("input_ids", {"input_ids": torch.ones(1, 2, 3, dtype=torch.long)}),
]


def test_bad_arguments_raise_as_transformers():
    for name, bad in BAD.items():
        settings = {"input_ids": ROW, **BASE, **bad}
        ours, theirs = (listen(m.generate, **copy.deepcopy(settings)) for m in pair())
        if theirs.error is None:
            assert ours.error is None and torch.equal(ours.result, theirs.result), name
        assert ours.complaint == theirs.complaint, name
        assert ours.lines == theirs.lines, name


def test_what_transformers_stumbles_over_is_named():
    model, own = pair()
    for argument, settings in STUMBLES:
        asked = {"input_ids": ROW, **BASE, **settings}
        ours, theirs = (listen(m.generate, **asked) for m in (model, own))
        assert theirs.error is not None and ours.error is not None, settings
        named = isinstance(ours.error, ValueError) and argument in str(ours.error)
        assert named or type(ours.error) is type(theirs.error), settings
    assert torch.equal(model.generate(ROW, **BASE), own.generate(ROW, **BASE))


PER_REQUEST = [
    {"max_new_tokens": [3, 4]},
    {"seed": [1, 2, 3], "do_sample": True},
    {"pad_token_id": [0, 1, 2, 3]},
    {"seed": -1, "do_sample": True},
    {"seed": "one", "do_sample": True},
    {"deterministic": "yes"},
    {"deterministic": [True]},
]


def test_bad_values_of_what_only_tinyspec_has_are_named():
    for settings in PER_REQUEST:
        with pytest.raises(ValueError, match=next(iter(settings))):
            pair()[0].generate(ROWS, **BASE | settings)


def test_dict_outputs_equal_transformers():
    model, own = pair()
    asked = {"repetition_penalty": 1.2, "suppress_tokens": [5, 6]}
    asked |= {**BASE, **DICT, "eos_token_id": [greedy()[0][4], greedy()[3][6]]}
    given = model.generate(BLOCK, attention_mask=MASK, **asked)
    judged = by_row(own, ROWS, lambda: asked)
    assert type(given) is type(judged[0]) is hf.GenerateDecoderOnlyOutput
    assert torch.equal(given.sequences, joined(BLOCK, ROWS, judged))
    longest = given.sequences.shape[1] - BLOCK.shape[1]
    for name in ("scores", "logits"):
        steps = getattr(given, name)
        assert isinstance(steps, tuple) and len(steps) == longest
        assert all(step.shape == (len(ROWS), VOCAB) for step in steps)
        for number, output in enumerate(judged):
            theirs = getattr(output, name)
            ours = tuple(step[number : number + 1] for step in steps[: len(theirs)])
            assert judge.close(ours, theirs)
            assert not judge.close(ours, tuple(step + 1e-2 for step in theirs)), "control"
    assert given.attentions is None and given.hidden_states is None
    bare = model.generate(BLOCK, attention_mask=MASK, **BASE, return_dict_in_generate=True)
    assert bare.scores is None and bare.logits is None


LAYERS = {
    "kwargs-over-config": ({"max_new_tokens": 3}, {"max_new_tokens": 5}, {"max_new_tokens": 7}),
    "config-fills-in": ({"repetition_penalty": 9.0, "max_new_tokens": 4}, {"max_length": 30}, {}),
    "model-max-length-and-new": ({"max_length": 11}, None, {"max_new_tokens": 9}),
    "model-dict": ({"return_dict_in_generate": True, "output_logits": True}, None, {}),
    "min-both": ({"min_length": 9, "eos_token_id": 5}, None, {"min_new_tokens": 3}),
    "none-over-eos": ({"eos_token_id": greedy()[0][4]}, None, {"eos_token_id": None}),
    "none-over-lists": ({"suppress_tokens": [greedy()[0][1]]}, None, {"suppress_tokens": None}),
    "custom-entry": ({}, {"max_new_tokens": 6, "my_own_entry": 3}, {}),
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_settings_are_merged_as_transformers_merges_them(layers):
    of_model, of_config, of_call = layers
    with judge.defaults(pair(), pad_token_id=judge.PAD, **of_model):
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
