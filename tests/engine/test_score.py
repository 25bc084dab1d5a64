"""score: tokens given beforehand have the log-probabilities that generating them gives, every bit.

Control: the tokens of plain requests, on a model whose linears are sensitive to the row count, have
other log-probabilities than they were generated with. tests/tools/test_audit.py has audit.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.support.budget import first
from tests.support.cases import KINDS, drain, engine_of, greedy, model_of, text, whole
from tests.support.mixes import crowd, plain
from tests.support.tiny import VOCAB, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

EOS = (5, 40, 41, 42, 90)
STYLES = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 2},
    "top_k": {"temperature": 1.2, "seed": 3, "top_k": 9},
    "top_p": {"temperature": 1.0, "seed": 4, "top_p": 0.8, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.4, "temperature": 0.6, "seed": 5},
    "minimum": {"min_new_tokens": 9, "eos_token_id": EOS, "temperature": 1.5, "seed": 6},
    "raw": {"temperature": 0.8, "seed": 7, "logprobs_mode": "raw"},
    "ignored stop": {"eos_token_id": EOS, "ignore_eos": True, "temperature": 1.5, "seed": 8},
}


def styled():
    """A request of every style; their prompts share prefixes."""
    return [
        (text(11 + 9 * n, seed=3), greedy(14, **style)) for n, style in enumerate(STYLES.values())
    ]


def tokens_of(outputs):
    return [output.completions[0].token_ids for output in outputs]


def logprobs_of(outputs):
    return [output.completions[0].logprobs for output in outputs]


@pytest.mark.slow("crosses", 75)
def test_score_by_the_triton_kernels_in_16_bits():
    """Rows that filters or penalties change are sampled in fp32, the others as they are."""
    names = ("greedy", "top_p", "penalty", "raw")
    params = [greedy(2, top_logprobs=1, **STYLES[name]) for name in names]
    given = [text(9, seed=n) for n in range(len(names))]
    settings = {"page_size": 16, "max_model_len": 64, "max_rows": 16, "reference_rows": 16}
    config = EngineConfig(backend="triton", **settings)
    with Engine(tiny(dtype=torch.float16), config=config) as engine:
        outputs = engine.generate(given, params)
        tokens, expected = tokens_of(outputs), logprobs_of(outputs)
        assert engine.score(given, tokens, params) == expected
        assert engine.score(given[1:2], tokens[1:2], params[1:2]) == expected[1:2]
        best = [top[0] for top in outputs[0].completions[0].top_logprobs]
        assert best == list(zip(tokens[0], expected[0], strict=True))
        # Control: at another temperature.
        other = [replace(each, temperature=2.0, seed=1) for each in params]
        assert engine.score(given, tokens, other) != expected


@pytest.mark.parametrize("dtype", first(1, ["bf16", "fp32"], 6))
@pytest.mark.parametrize("kind", first(3, KINDS, 6))
def test_score_has_the_bits_of_generation(kind, dtype):
    """Generated one by one; scored together, alone, in a crowd, with and without the flag."""
    model = model_of(kind, dtype)
    prompts, params = zip(*styled(), strict=True)
    with engine_of(model, prefix_cache=False) as engine:
        outputs = [engine.generate([p], s)[0] for p, s in styled()]
        tokens, expected = tokens_of(outputs), logprobs_of(outputs)
    with engine_of(model, page_size=8) as engine:
        assert engine.score(prompts, tokens, [plain(s) for s in params]) == expected
        for n in (0, 3, 5):
            assert engine.score([prompts[n]], [tokens[n]], params[n]) == [expected[n]]
        for prompt, others in crowd(random.Random(3), 10):
            engine.add_request(prompt, others)
        for _ in range(3):
            engine.step()
        assert engine.score(prompts, tokens, list(params)) == expected
        drain(engine)
        assert whole(engine)


def test_control_plain_generation_has_other_bits_than_its_score():
    prompts, params = zip(*styled(), strict=True)
    with engine_of(model_of("shape-sensitive")) as engine:
        outputs = engine.generate(prompts, [plain(s) for s in params])
        scores = engine.score(prompts, tokens_of(outputs), list(params))
    assert all(mine != theirs for mine, theirs in zip(scores, logprobs_of(outputs), strict=True))


@pytest.mark.parametrize("name", ["minimum", "top_p"])
def test_score_of_given_tokens(name):
    """Tokens that nobody would have sampled, stop tokens among them: scored one place after the
    other, each is what a prompt up to there gives it, and nothing stops."""
    prompt, given = text(20, seed=1), [7, *EOS, 100, 5, 5, 3]
    style = {**STYLES[name], "stop_token_ids": (7,)}
    if name == "minimum":
        style["min_new_tokens"] = 0
    with engine_of(model_of("shape-sensitive"), page_size=8) as engine:
        scores = engine.score([prompt], [given], greedy(14, **style))[0]
        assert len(scores) == len(given)
        forced = [
            engine.score([prompt + given[:n]], [given[n:]], greedy(14, **style))[0]
            for n in range(len(given))
        ]
        chosen = engine.generate([prompt + given[:4]], greedy(1, top_logprobs=VOCAB, **style))[0]
    assert forced == [scores[n:] for n in range(len(given))]
    top = dict(chosen.completions[0].top_logprobs[0])
    assert scores[4] == top[given[4]]


def test_score_of_a_stop_before_the_minimum_is_minus_infinity():
    """As in generation, where no stop token can be sampled before ``min_new_tokens``."""
    params = SamplingParams(min_new_tokens=3, eos_token_id=5)
    with engine_of(tiny()) as engine:
        (early,) = engine.score([[1, 2]], [[9, 5, 8, 5]], params)
        (late,) = engine.score([[1, 2]], [[9, 5, 8, 5]], SamplingParams(eos_token_id=5))
    assert [math.isinf(value) for value in early] == [False, True, False, False]
    assert early[1] < 0 and not any(map(math.isinf, late))
    assert early[3] == late[3] and early[0] != late[0]


REFUSED = [
    ([[1]], [[1], [2]], None, "continuations='2 of them'"),
    ([[1]], [[]], None, "continuation="),
    ([[1]], [None], None, "continuation=None is not allowed"),
    ([[1]], [[VOCAB]], None, f"continuation token id={VOCAB}"),
    ([[1]], [[True]], None, "continuation[0]=True"),
    ([[1]], ["text"], None, "continuation='text'"),
    ([[VOCAB]], [[1]], None, "prompt token id"),
    ([], [], None, "prompts="),
    ([[1]], [[2]], [], "params="),
    ([[1]], [[2] * 512], None, "max_new_tokens=512"),
]


def test_score_refuses_by_name():
    with engine_of(tiny()) as engine:
        for *given, said in REFUSED:
            with pytest.raises(ValueError) as caught:
                engine.score(*given)
            assert said in str(caught.value)
            assert not engine.has_unfinished()
