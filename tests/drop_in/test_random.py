"""``model.generate`` of a patched model, under random combinations of what it serves, against
transformers' own for each row alone and without pads; and deterministic rows among others whose
every parameter varies: their bits stay.

Control: the same checks against another parameter fail; without ``deterministic``:
tests/drop_in/test_continuous.py."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers.generation.logits_process import ExponentialDecayLengthPenalty

import tinyspec
from tests.support import drop_in
from tests.support.at_random import check_at_random
from tests.support.drop_in import PAD, SMALL, alone, own, patched, random_ids
from tests.support.judge import padded
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny
from tests.support.tolerances import LOGITS, close

DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LARGEST = torch.finfo(torch.float32).max
STOPS = [3, 9, 27, 41, 60, 77, 101]


class Alone:
    """Code of the user's that says that it needs no other row."""

    stateless = True

    def __init__(self, inner):
        self._inner = inner

    def __call__(self, ids, scores):
        return self._inner(ids, scores)


# What every row may ask of both modes. Each may be given once, or as a list of one for each row.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (1, 5),
    "min_length": (12,),
    "repetition_penalty": (0.8, 1.0, 1.4),
    "no_repeat_ngram_size": (1, 2, 3),
    "encoder_repetition_penalty": (0.7, 1.5),
    "encoder_no_repeat_ngram_size": (1, 2),
    "bad_words_ids": ([[5], [60, 61], [1, 2, 3]], [[n] for n in range(20, 90)]),
    "suppress_tokens": (list(range(1, 128, 3)),),
    "begin_suppress_tokens": (list(range(2, 128, 3)),),
    "sequence_bias": ([[[17], 30.0], [[18, 19], -4.0]], {(40,): 20.0, (41,): 18.5}),
    "forced_eos_token_id": (9, [3]),
    "forced_bos_token_id": (33,),
    "exponential_decay_length_penalty": ((2, 1.6),),
    "eos_token_id": (9, STOPS, list(range(1, 128, 5))),
    "remove_invalid_values": (True, False),
    "logits_processor": ([Alone(drop_in.AfterEven())],),
    "stopping_criteria": ([Alone(drop_in.AtMultiples())],),
}
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.4, 1.0, 1.7),
    "top_k": (0, 1, 6, 50, 500),
    "top_p": (0.2, 0.85, 1.0),
    "min_p": (0.02, 0.3),
    "typical_p": (0.3, 0.9),
    "epsilon_cutoff": (0.002, 0.02),
    "eta_cutoff": (0.002, 0.02),
    "top_h": (0.3, 0.8),
    "renormalize_logits": (True,),
}


# In transformers 5.17 a stop token that is excluded gets NaN.
_decayed = ExponentialDecayLengthPenalty((0, 1.6), [0], 0)(
    torch.zeros(1, 3, dtype=torch.long), torch.full((1, 2), -torch.inf)
)


if _decayed.isnan().any():
    del SETTINGS["exponential_decay_length_penalty"]


# These make sense only beside a stop token.
WITH_STOPS = ("exponential_decay_length_penalty", "min_length", "min_new_tokens")


@cache
def ours(family: str):
    """A model that stays patched: pages and all else are left by whatever came before."""
    model = tiny(family)
    tinyspec.patch(model, SMALL)
    return model


@st.composite
def calls(draw, more: dict[str, tuple[Any, ...]] | None = None):
    """(arguments of the call, prompts, settings of every row)."""
    count = draw(st.integers(1, 4))
    prompts = [
        random_ids(draw(st.sampled_from((1, 2, 7, 8, 17, 30))), draw(st.integers(0, 3)))
        for _ in range(count)
    ]
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=5, unique=True))
    if more:
        names += draw(st.lists(st.sampled_from(sorted(more)), max_size=4, unique=True))
    if set(names) & set(WITH_STOPS) and "eos_token_id" not in names:
        names.append("eos_token_id")
    length = draw(st.sampled_from(("max_new_tokens", "max_length")))
    values = {**SETTINGS, **(more or {}), "max_new_tokens": (1, 4, 11), "max_length": (31, 34)}
    given_: dict[str, Any] = {}
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in [*names, length]:
        if draw(st.booleans()):
            given_[name] = [draw(st.sampled_from(values[name])) for _ in range(count)]
            each = given_[name]
        else:
            given_[name] = draw(st.sampled_from(values[name]))
            each = [given_[name]] * count
        # Lists of one depth hold either all for everyone or one for each.
        if isinstance(given_[name], list) and each is given_[name]:
            given_[name] = each = _levelled(name, each)
        for row, value in zip(rows, each, strict=True):
            row[name] = value
    given_["pad_token_id"] = PAD
    ids, mask = padded(prompts)
    as_block = {"input_ids": ids, "attention_mask": mask}
    layout = as_block if draw(st.booleans()) else {"input_ids": prompts}
    return {**given_, **layout}, prompts, rows


def _levelled(name: str, each: list[Any]) -> list[Any]:
    """Per-row values of a field that also takes lists: all of them lists."""
    if name in ("eos_token_id", "forced_eos_token_id"):
        return [value if isinstance(value, list) else [value] for value in each]
    return each


def generated(out: torch.Tensor, length: int, place: int, count: int) -> list[int]:
    """The first ``count`` new tokens of a row; behind them there must be nothing but pads."""
    row = out[place, length:].tolist()
    assert row[count:] == [PAD] * len(row[count:])
    return row[:count]


def greedy_equals_transformers(family, call):
    arguments, prompts, rows = call
    out = ours(family).generate(**arguments, do_sample=False)
    longest = max(map(len, prompts))
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        expected = alone(own(family), prompt, do_sample=False, **row)
        assert generated(out, longest, place, len(expected)) == expected
    assert out.shape[0] == len(prompts)


def prompt_lookup_changes_no_token(call, tokens):
    arguments, _, _ = call
    plain = ours("llama").generate(**arguments, do_sample=False)
    looked = ours("llama").generate(**arguments, do_sample=False, prompt_lookup_num_tokens=tokens)
    assert torch.equal(plain, looked)


def steps_of(found: Any, place: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores and logits of a completion's first ``count`` tokens, [count, V] each."""
    scores = torch.stack([step[place] for step in found.scores[:count]])
    logits = torch.stack([step[place] for step in found.logits[:count]])
    return scores, logits


def length_of(tokens: list[int], row: dict[str, Any]) -> int:
    """How many tokens a completion has before what fills it up."""
    stops = row.get("eos_token_id", [])
    stops = stops if isinstance(stops, list) else [stops]
    for n, token in enumerate(tokens):
        if token in stops or ("stopping_criteria" in row and token % 7 == 0):
            return n + 1
    return len(tokens)


def filtered_otherwise(
    family: str, prompt: list[int], tokens: list[int], row: dict[str, Any], found: Any, place: int
) -> list[int]:
    """Steps at which other tokens are left than transformers' processors leave, or their scores
    are others."""
    processors = drop_in.processors_of(own(family), prompt, do_sample=True, **row)
    scores, logits = steps_of(found, place, len(tokens))
    wrong = []
    for n, token in enumerate(tokens):
        before = torch.tensor([prompt + tokens[:n]])
        # The engine makes an infinite score, of which transformers cannot sample, the largest.
        expected = processors(before, logits[n : n + 1].clone())[0].clamp(max=LARGEST)
        left, kept = expected > -torch.inf, scores[n] > -torch.inf
        # Of tokens that tie for the last places, transformers keeps all and the engine the first.
        tied = left & (expected == expected[left].min())
        places = max(1, int((kept & tied).sum()))
        same = torch.equal(kept, (left & ~tied) | (tied & (tied.cumsum(0) <= places)))
        if not (same and kept[token] and close(scores[n][kept], expected[kept], LOGITS)):
            wrong.append(n)
    return wrong


def sampled_are_filtered_as_transformers_does(family, call, copies, seed, deterministic):
    arguments, prompts, rows = call
    extra = {"seed": seed, "deterministic": deterministic, "num_return_sequences": copies}
    found = ours(family).generate(**arguments, **extra, do_sample=True, **DICT)
    longest = max(map(len, prompts))
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        budget = row.get("max_new_tokens", row.get("max_length", 0) - len(prompt))
        for place in range(number * copies, (number + 1) * copies):
            most = found.sequences[place, longest:][:budget].tolist()
            tokens = generated(found.sequences, longest, place, length_of(most, row))
            assert filtered_otherwise(family, prompt, tokens, row, found, place) == []
            with torch.no_grad():
                whole = own(family)(torch.tensor([prompt + tokens])).logits[0]
            logits = steps_of(found, place, len(tokens))[1]
            assert close(logits, whole[len(prompt) - 1 : -1], LOGITS)


@cache
def sensitive():
    """A model whose linears are sensitive to the row count. It stays patched: pages are left by
    whatever came before."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    tinyspec.patch(model, SMALL)
    return model


def bits_are_those_of_rows_alone(call, seed, others, copies):
    """Whatever the other rows ask: tokens, scores and logits of every deterministic row, in a model
    that runs nothing else. others: whether they are deterministic, too."""
    arguments, prompts, rows = call
    promised = [n == 0 or others for n in range(len(rows))]
    seeds = list(range(seed, seed + len(rows)))
    extra = {"do_sample": True, "num_return_sequences": copies, **DICT}
    found = sensitive().generate(**arguments, **extra, seed=seeds, deterministic=promised)
    longest = max(map(len, prompts))
    with patched(copy.deepcopy(sensitive())) as model:
        for n in range(len(rows)) if others else (0,):
            given = {**rows[n], **extra, "seed": seeds[n], "deterministic": True}
            own = model.generate([prompts[n]], pad_token_id=PAD, **given)
            for copied in range(copies):
                tokens = own.sequences[copied, len(prompts[n]) :].tolist()
                tokens = tokens[: length_of(tokens, rows[n])]
                place = n * copies + copied
                assert generated(found.sequences, longest, place, len(tokens)) == tokens
                pairs = zip(
                    steps_of(found, place, len(tokens)),
                    steps_of(own, copied, len(tokens)),
                    strict=True,
                )
                assert all(torch.equal(*pair) for pair in pairs)


FAMILIES = st.sampled_from(("llama", "gpt2"))


# What is checked, and draws of its arguments.
CHECKS = {
    greedy_equals_transformers: {"family": FAMILIES, "call": calls()},
    prompt_lookup_changes_no_token: {"call": calls(), "tokens": st.sampled_from((1, 3, 10))},
    sampled_are_filtered_as_transformers_does: {
        "family": FAMILIES,
        "call": calls(SAMPLING),
        "copies": st.sampled_from((1, 1, 3)),
        "seed": st.sampled_from((None, 5)),
        "deterministic": st.booleans(),
    },
    bits_are_those_of_rows_alone: {
        "call": calls(SAMPLING),
        "seed": st.sampled_from((0, 2**40)),
        "others": st.booleans(),
        "copies": st.sampled_from((1, 1, 2)),
    },
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_few_calls(check):
    check_at_random(check, 0, 8, **CHECKS[check])


@pytest.mark.slow("random use", 5, cases=12)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_many_calls(check, case_seed):
    check_at_random(check, case_seed, 40, **CHECKS[check])


OTHERWISE = [
    ({}, {"top_k": 7}),
    ({}, {"temperature": 0.8}),
    ({"typical_p": 0.8}, {"typical_p": 0.5}),
    ({"renormalize_logits": True}, {"renormalize_logits": False}),
]


def test_control_other_filters_are_seen():
    prompt = random_ids(12)
    for own_filters, other in OTHERWISE:
        asked = {"temperature": 0.9, "top_k": 6, "top_p": 0.95, "max_new_tokens": 6, **own_filters}
        given = {"do_sample": True, "seed": 1, "pad_token_id": PAD, **DICT, **asked}
        found = ours("llama").generate([prompt], **given)
        tokens = found.sequences[0, len(prompt) :].tolist()
        assert filtered_otherwise("llama", prompt, tokens, asked, found, 0) == []
        assert filtered_otherwise("llama", prompt, tokens, asked | other, found, 0)
