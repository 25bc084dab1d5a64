"""``model.generate`` of a patched model decodes as transformers' own does, setting by setting."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from tests.support.hooks import Backwards, InPlace, Only, Sure, Until
from tests.support.judge import (
    FAMILIES,
    NEW,
    PAD,
    ROWS,
    by_row,
    greedy,
    joined,
    listen,
    one,
    padded,
    pair,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BASE = {"max_new_tokens": NEW, "pad_token_id": PAD}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def infinite(input_ids, scores):
    """Forces a token as some do, by an infinite score."""
    scores[:, 9] = torch.inf
    return scores


# Settings that change the greedy tokens; g: what follows ROWS in greedy decoding.
PROCESSORS = {
    "repetition-penalty": lambda g: {"repetition_penalty": 3.0},
    "repetition-reward": lambda g: {"repetition_penalty": 0.5},
    "no-repeat-ngram": lambda g: {"repetition_penalty": 0.3, "no_repeat_ngram_size": 2},
    "encoder-penalty": lambda g: {"encoder_repetition_penalty": 6.0},
    "encoder-ngram": lambda g: {
        "encoder_repetition_penalty": 9.0,
        "encoder_no_repeat_ngram_size": 1,
    },
    "bad-words": lambda g: {"bad_words_ids": [[g[0][0]], [g[1][2], g[1][3]], [g[2][5]]]},
    "suppress": lambda g: {"suppress_tokens": [row[2] for row in g]},
    "begin-suppress": lambda g: {"begin_suppress_tokens": [row[0] for row in g]},
    "sequence-bias": lambda g: {"sequence_bias": {(g[0][1],): -20.0, (g[1][0], 9): 30.0}},
    "sequence-bias-lists": lambda g: {"sequence_bias": [[[g[0][1]], -20.0], [[g[3][0], 9], 30.0]]},
    "forced-bos": lambda g: {"forced_bos_token_id": 11},
    "forced-eos": lambda g: {"forced_eos_token_id": 12},
    "forced-eos-list": lambda g: {"forced_eos_token_id": [12, 13], "max_new_tokens": 5},
    "eos": lambda g: {"eos_token_id": g[0][4]},
    "eos-list": lambda g: {"eos_token_id": [g[0][4], g[1][2], g[3][6]]},
    "eos-tensor": lambda g: {"eos_token_id": torch.tensor([g[0][4], g[1][2]])},
    "eos-first": lambda g: {"eos_token_id": [row[0] for row in g]},
    "eos-is-pad": lambda g: {"eos_token_id": g[0][4], "pad_token_id": g[0][4]},
    "pad-falls-back-to-eos": lambda g: {"eos_token_id": g[0][4], "pad_token_id": None},
    "min-new-tokens": lambda g: {"eos_token_id": [row[2] for row in g], "min_new_tokens": 6},
    "min-length": lambda g: {"eos_token_id": [row[2] for row in g], "min_length": 12},
    "min-above-max": lambda g: {"eos_token_id": g[0][2], "min_new_tokens": 99},
    "decay": lambda g: {"eos_token_id": 3, "exponential_decay_length_penalty": (2, 2.5)},
    "custom-function": lambda g: {"logits_processor": (lambda ids, scores: scores.flip(-1),)},
    "custom-double": lambda g: {"logits_processor": [lambda ids, scores: -scores.double()]},
    "custom-infinite": lambda g: {"logits_processor": [infinite]},
    "custom-in-place": lambda g: {"logits_processor": [InPlace()]},
    "allowed": lambda g: {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1]) // 2, 5]},
    "custom": lambda g: {"logits_processor": [Backwards()]},
    "custom-list": lambda g: {"logits_processor": LogitsProcessorList([Only(), Backwards()])},
    "custom-beside-own": lambda g: {"logits_processor": [Backwards()], "repetition_penalty": 2.0},
    "custom-of-a-made-type": lambda g: {
        "repetition_penalty": 1.1,
        "logits_processor": [RepetitionPenaltyLogitsProcessor(4.0)],
    },
    "custom-least": lambda g: {
        "eos_token_id": [row[1] for row in g],
        "min_new_tokens": 2,
        "logits_processor": [SuppressTokensLogitsProcessor([g[0][0]])],
    },
    "custom-warper-greedy": lambda g: {
        "repetition_penalty": 2.0,
        "logits_processor": [TemperatureLogitsWarper(0.1), Backwards()],
    },
    "criterion": lambda g: {"stopping_criteria": [Until(12)], "eos_token_id": 1},
    "criterion-plain-bool": lambda g: {"stopping_criteria": [Until(12, plain=True)]},
    "criterion-max-length": lambda g: {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(20)]),
        "max_new_tokens": 30,
    },
    "criterion-stops-sooner": lambda g: {
        "stopping_criteria": [Until(7), Until(30)],
        "eos_token_id": g[1][3],
    },
    "criterion-of-scores": lambda g: {**DICT, "stopping_criteria": [Sure()]},
    "criterion-max-length-passed": lambda g: {"stopping_criteria": [MaxLengthCriteria(1)]},
    "criterion-eos": lambda g: {"stopping_criteria": [EosTokenCriteria(g[0][4])]},
    "criterion-eos-instead": lambda g: {
        "eos_token_id": g[0][1],
        "stopping_criteria": [EosTokenCriteria(torch.tensor([g[0][4], g[1][2]]))],
    },
    "criterion-time": lambda g: {"stopping_criteria": [MaxTimeCriteria(9.0, 0.0)]},
    "no-time": lambda g: {"max_time": 0.0},
    "max-length": lambda g: {"max_length": 21, "max_new_tokens": None},
    "both-lengths": lambda g: {"max_length": 30, "max_new_tokens": 4},
    "default-length": lambda g: {"max_new_tokens": None},
    "one-token": lambda g: {"max_new_tokens": 1},
}
# Settings that leave the greedy tokens as they are.
QUIET = {
    "greedy": lambda g: {},
    "no-eos": lambda g: {"eos_token_id": None},
    "eos-minus-one": lambda g: {"eos_token_id": -1},
    "eos-negative-in-list": lambda g: {"eos_token_id": [-1, 500]},
    "time": lambda g: {"max_time": 500.0},
    "warpers-not-sampling": lambda g: {"temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.3},
    "typical-not-sampling": lambda g: {"typical_p": 0.5, "top_h": 0.5, "eta_cutoff": 0.1},
    "sample-top-k-1": lambda g: {"do_sample": True, "top_k": 1},
    "sample-top-p-0": lambda g: {"do_sample": True, "top_p": 1e-7, "temperature": 3.0},
    "sample-min-p-1": lambda g: {"do_sample": True, "min_p": 1.0, "top_k": 0},
    "sample-cold": lambda g: {"do_sample": True, "temperature": 1e-5, "top_k": None},
    "sample-nearly-0": lambda g: {"do_sample": True, "temperature": 1e-9},
    "numpy-numbers": lambda g: {
        "max_new_tokens": np.int64(NEW),
        "num_return_sequences": np.int64(1),
        "eos_token_id": np.int64(1),
    },
    "numpy-top-p": lambda g: {"do_sample": True, "top_k": 1, "top_p": np.float32(0.5)},
    "no-penalty": lambda g: {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    "nones": lambda g: {"top_k": None, "temperature": None, "top_p": None, "stop_strings": None},
    "no-lists": lambda g: {"logits_processor": [], "stopping_criteria": [], "streamer": None},
    "inert": lambda g: {"length_penalty": 2.0, "early_stopping": True, "num_beams": 1},
    "no-invalid-values": lambda g: {"remove_invalid_values": True},
    "no-cache": lambda g: {"use_cache": False},
    "no-compile": lambda g: {"disable_compile": True, "guidance_scale": 1.0},
    "min-of-type": lambda g: {
        "logits_processor": [MinNewTokensLengthLogitsProcessor(5, 6, 1)],
    },
}


# The table on one family, and what touches a model on the others.
# Criteria of the user's, which see all rows of a call, padded.
OF_ALL_ROWS = ("criterion", "criterion-plain-bool", "criterion-stops-sooner", "criterion-of-scores")
ELSEWHERE = ("greedy", "custom", "criterion")
CASES = [("llama", name) for name in [*PROCESSORS, *QUIET]]
CASES += [(family, name) for family in FAMILIES[1:] for name in ELSEWHERE]


@pytest.mark.parametrize("family, name", CASES)
def test_tokens_equal_transformers(family, name):
    model, own = pair(family)
    case = {**PROCESSORS, **QUIET}[name]
    settings = lambda: {**BASE, **case(greedy(family))}  # noqa: E731
    pad = settings()["pad_token_id"]
    pad = greedy(family)[0][4] if pad is None else pad
    block, mask = padded(ROWS)
    given = model.generate(block, attention_mask=mask, **settings())
    if name in OF_ALL_ROWS:
        judged = own.generate(block, attention_mask=mask, **settings())
        judged = getattr(judged, "sequences", judged)
    else:
        judged = joined(block, ROWS, by_row(own, ROWS, settings), pad)
    tokens = getattr(given, "sequences", given)
    assert tokens.dtype == torch.long
    assert torch.equal(tokens, judged)
    plain = joined(block, ROWS, [one(r + new) for r, new in zip(ROWS, greedy(family), strict=True)])
    assert torch.equal(judged, plain) == (name in QUIET), "the case shows nothing"


@pytest.mark.parametrize("name", [*PROCESSORS, *QUIET])
def test_lines_and_types_equal_transformers(name):
    case = {**PROCESSORS, **QUIET}[name]
    for row in (ROWS[0], ROWS[2]):
        ours, theirs = (listen(m.generate, one(row), **BASE | case(greedy())) for m in pair())
        assert ours.error is None and theirs.error is None
        assert type(ours.result) is type(theirs.result)
        assert ours.lines == theirs.lines


def test_arguments_by_place():
    """In the order that transformers has them."""
    model, own = pair()
    config = GenerationConfig(**BASE)
    given, judged = (
        m.generate(one(ROWS[0]), config, [Backwards()], [Until(12)], lambda row, ids: [3, 7])
        for m in (model, own)
    )
    assert torch.equal(given, judged)
