"""One request of a call, and neighbours whose every parameter varies: its bits stay.

With ``deterministic=True`` on a model whose linears are sensitive to the row count, and without it
on one whose rows do not depend on shapes. Control: without it on the sensitive one bits do change.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import tinyspec
from tests.support.at_random import check_at_random
from tests.support.drop_in import PAD, SMALL, AfterEven, AtMultiples, patched, random_ids
from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny
from tests.support.tolerances import FORMULA, close
from tinyspec import Engine, SamplingParams
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model.cpu.fast_mode import FastMode

KINDS = {"shape-sensitive": ShapeSensitiveLinear, "row by row": RowByRowLinear}
NOTHING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 11,
    "max_new_tokens": 9,
    "num_return_sequences": 1,
    "eos_token_id": [127],
    "logits_processor": [],
    "stopping_criteria": [],
}
# The request in the hay: each a prompt's length and what it asks.
NEEDLES: tuple[tuple[int, dict[str, Any]], ...] = (
    (9, {"do_sample": False, "seed": None}),
    (25, {"temperature": 0.8, "top_k": 20}),
    (16, {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01, "num_return_sequences": 2}),
    (3, {"repetition_penalty": 1.3, "logits_processor": [AfterEven()], "seed": 2**40}),
    (40, {"do_sample": False, "repetition_penalty": 1.2, "eos_token_id": list(range(1, 128, 9))}),
    (1, {"temperature": 1.1, "stopping_criteria": [AtMultiples()], "num_return_sequences": 3}),
)


@cache
def model_of(kind: str):
    """A model that stays patched: pages are left by whatever came before."""
    model = replace_linears(tiny(), KINDS[kind])
    tinyspec.patch(model, SMALL)
    return model


def needle_of(number: int, deterministic: bool) -> tuple[list[int], dict[str, Any]]:
    length, asked = NEEDLES[number]
    return random_ids(length), {**NOTHING, **asked, "deterministic": deterministic}


def run(model: Any, requests: list[tuple[list[int], dict[str, Any]]]) -> Any:
    """One call, every parameter a list of one for each request."""
    names = requests[0][1]
    lists = {name: [asked[name] for _, asked in requests] for name in names}
    return model.generate(
        [prompt for prompt, _ in requests],
        **lists,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )


def bits_at(found: Any, requests: list[Any], place: int) -> list[tuple[Any, ...]]:
    """tokens, scores and logits of every completion of the request at ``place``."""
    prompt, asked = requests[place]
    longest = max(len(prompt) for prompt, _ in requests)
    first = sum(asked["num_return_sequences"] for _, asked in requests[:place])
    bits = []
    for row in range(first, first + asked["num_return_sequences"]):
        new = found.sequences[row, longest:].tolist()
        count = _length(new, asked)
        assert new[count:] == [PAD] * len(new[count:])
        assert found.sequences[row, longest - len(prompt) : longest].tolist() == prompt
        scores = torch.stack([step[row] for step in found.scores[:count]])
        logits = torch.stack([step[row] for step in found.logits[:count]])
        bits.append((new[:count], scores, logits))
    return bits


def _length(tokens: list[int], asked: dict[str, Any]) -> int:
    most = tokens[: asked["max_new_tokens"]]
    for n, token in enumerate(most):
        if token in asked["eos_token_id"] or (asked["stopping_criteria"] and token % 7 == 0):
            return n + 1
    return len(most)


def same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> bool:
    return len(found) == len(expected) and all(
        mine[0] == its[0] and torch.equal(mine[1], its[1]) and torch.equal(mine[2], its[2])
        for mine, its in zip(found, expected, strict=True)
    )


@cache
def truth(kind: str, number: int, deterministic: bool) -> list[tuple[Any, ...]]:
    """The bits of a needle alone, each parameter given as it is, in a model that runs nothing
    else."""
    prompt, asked = needle_of(number, deterministic)
    model = copy.deepcopy(model_of(kind))
    with patched(model):
        found = model.generate(
            torch.tensor([prompt]),
            **asked,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
    return bits_at(found, [(prompt, asked)], 0)


@st.composite
def neighbour(draw) -> tuple[list[int], dict[str, Any]]:
    """Anything a request may ask; some share the needles' prompts, and so their pages."""
    prompt = random_ids(draw(st.integers(1, 40)), draw(st.sampled_from((0, 0, 1, 2))))
    return prompt, {
        "do_sample": draw(st.booleans()),
        "temperature": draw(st.sampled_from((0.3, 1.0, 1.8))),
        "top_k": draw(st.sampled_from((0, 1, 5, 50))),
        "top_p": draw(st.sampled_from((0.3, 0.9, 1.0))),
        "min_p": draw(st.sampled_from((0.0, 0.1))),
        "repetition_penalty": draw(st.sampled_from((0.8, 1.0, 1.5))),
        "seed": draw(st.sampled_from((None, 0, 11, 2**63 - 1))),
        "deterministic": draw(st.booleans()),
        "max_new_tokens": draw(st.integers(1, 20)),
        "num_return_sequences": 1,
        "eos_token_id": draw(st.sampled_from(([127], [3, 50, 90], list(range(1, 128, 6))))),
        "logits_processor": draw(st.sampled_from(([], [AfterEven()]))),
        "stopping_criteria": draw(st.sampled_from(([], [AtMultiples()]))),
    }


@st.composite
def crowds(draw, most: int = 6) -> tuple[list[Any], int]:
    """Neighbours, and the needle's place among them."""
    others = draw(st.lists(neighbour(), min_size=1, max_size=most))
    for _, asked in others:
        if asked["do_sample"]:
            asked["num_return_sequences"] = draw(st.sampled_from((1, 1, 2, 3)))
    return others, draw(st.integers(0, len(others)))


def deterministic_where_shapes_matter(crowd, number):
    others, place = crowd
    requests = [*others[:place], needle_of(number, True), *others[place:]]
    found = run(model_of("shape-sensitive"), requests)
    assert same(bits_at(found, requests, place), truth("shape-sensitive", number, True))


@contextmanager
def one_reduction():
    """Plain requests by the ways of deterministic ones, whatever is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in ((AttentionMetadata, "exact", True), (FastMode, "on", False)):
            always = property(lambda _, value=value: value, lambda *_: None)
            patch.setattr(owner, name, always, raising=False)
        yield


def plain_where_shapes_do_not_matter(crowd, number):
    """With linears row by row, and attention that has one reduction for all."""
    others, place = crowd
    requests = [*others[:place], needle_of(number, False), *others[place:]]
    with one_reduction():
        found = run(model_of("row by row"), requests)
        assert same(bits_at(found, requests, place), truth("row by row", number, False))


def test_control_plain_where_shapes_matter():
    """The checks above can fail: without the flag the crowd's size shows in the needle's bits."""
    others = [needle_of(n, False) for n in range(1, 5)]
    requests = [needle_of(0, False), *others]
    found = run(model_of("shape-sensitive"), requests)
    assert not same(bits_at(found, requests, 0), truth("shape-sensitive", 0, False))


@pytest.mark.parametrize("name, value", [("seed", 12), ("temperature", 0.9), ("top_k", 19)])
def test_control_its_own_parameters_matter(name, value):
    prompt, asked = needle_of(1, True)
    requests = [(prompt, asked | {name: value})]
    found = run(model_of("shape-sensitive"), requests)
    assert not same(bits_at(found, requests, 0), truth("shape-sensitive", 1, True))


def params_of(asked: dict[str, Any]) -> SamplingParams:
    """The same request as an Engine takes it."""
    warped = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    return SamplingParams(
        max_new_tokens=asked["max_new_tokens"],
        repetition_penalty=asked["repetition_penalty"],
        deterministic=asked["deterministic"],
        num_return_sequences=asked["num_return_sequences"],
        eos_token_id=asked["eos_token_id"],
        logits_processors=asked["logits_processor"],
        stopping_criteria=asked["stopping_criteria"],
        logprobs=True,
        **(warped if asked["do_sample"] else {}),
    )


@cache
def engine() -> Engine:
    return Engine(replace_linears(tiny(), ShapeSensitiveLinear), config=SMALL)


def the_bits_of_engine_generate(crowd, number):
    """Every deterministic request of a call has the tokens that an Engine gives it alone."""
    requests = [needle_of(number, True), *crowd[0]]
    found = run(model_of("shape-sensitive"), requests)
    for place, (prompt, asked) in enumerate(requests):
        if not asked["deterministic"] or (asked["do_sample"] and asked["seed"] is None):
            continue
        expected = engine().generate([prompt], params_of(asked))[0].completions
        for (tokens, scores, _), completion in zip(
            bits_at(found, requests, place), expected, strict=True
        ):
            assert tokens == completion.token_ids
            chosen = scores.log_softmax(-1)[range(len(tokens)), tokens]
            assert close(chosen, torch.tensor(completion.logprobs), FORMULA)
    assert model_of("shape-sensitive").generate.fingerprint == engine().fingerprint


NUMBERS = st.integers(0, len(NEEDLES) - 1)
# What is checked, and draws of its crowds.
CHECKS = {
    deterministic_where_shapes_matter: crowds(),
    plain_where_shapes_do_not_matter: crowds(3),
    the_bits_of_engine_generate: crowds(),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_few_crowds(check):
    check_at_random(check, 0, 2, crowd=CHECKS[check], number=NUMBERS)


@pytest.mark.slow("random use", 8, cases=12)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_many_crowds(check, case_seed):
    check_at_random(check, case_seed, 30, crowd=CHECKS[check], number=NUMBERS)


def test_control_an_engine_of_other_weights():
    requests = [needle_of(1, True)]
    other = replace_linears(tiny(seed=1), ShapeSensitiveLinear)
    with patched(other):
        found = bits_at(run(other, requests), requests, 0)
        assert other.generate.fingerprint != engine().fingerprint
    expected = engine().generate([requests[0][0]], params_of(requests[0][1]))[0].completions
    assert found[0][0] != expected[0].token_ids


def new_tokens(model, prompts, **arguments):
    return model.generate(prompts, max_new_tokens=6, pad_token_id=PAD, **arguments)[:, -6:].tolist()


def test_processors_that_hold_a_prompt_are_not_shared():
    prompts = [random_ids(12, n) for n in range(3)]
    with patched(tiny()) as model:
        together = new_tokens(model, prompts, encoder_repetition_penalty=[1.0, 30.0, 30.0])
        alone = new_tokens(model, prompts[2:], encoder_repetition_penalty=30.0)
        assert together[2] == alone[0] != new_tokens(model, prompts[2:])[0]


def test_plain_calls_repeat_once_buckets_are_known():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.08}
    config = LlamaConfig(vocab_size=128, **sizes, **heads)  # wide enough for row counts to show
    prompts = [random_ids(n, n) for n in (129, 130, 131, 133, 140)]
    asked = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 4}
    with patched(LlamaForCausalLM(config).eval(), None) as model:

        def calls():
            outputs = [model.generate([p], pad_token_id=PAD, **asked) for p in prompts]
            return [torch.cat(output.logits) for output in outputs]

        first = calls()
        model.generate([[1, 2]], deterministic=True, max_new_tokens=6)
        for _ in range(2):
            assert all(map(torch.equal, calls(), first))
