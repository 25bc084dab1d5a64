"""Biases, OpenAI's penalties and bad words: what they are by definition, with the bits of the
request alone wherever it runs."""

import json
import random
from collections import Counter

import pytest
import torch
from transformers.generation import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.support.budget import first
from tests.support.cases import KINDS, engine_of, greedy, model_of, one_by_one, run, steady, text
from tests.support.mixes import Liar, bits, crowd
from tests.support.tiny import VOCAB, tiny
from tinyspec import RequestOutput, SamplingParams, audit

BIAS = {5: 2.5, 40: -100, 77: 1}
WORDS = [[3], [90, 12], [7, 7, 7], *([a, b] for a in range(40) for b in range(60, 100, 7))]
END, FEW = (21, 60), range(8, 90, 3)
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
STYLES = {
    "bias": {"logit_bias": BIAS},
    "frequency": {"frequency_penalty": 1.7},
    "presence": {"presence_penalty": 2.2, "temperature": 0.8, "seed": 3, "top_k": 30},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -1.3},
    "bad words": {"bad_words_ids": WORDS, "temperature": 0.9, "seed": 4},
    "allowed": {"allowed_token_ids": FEW, "temperature": 1.3, "seed": 6},
    "all": {
        **{"allowed_token_ids": [*FEW, *END], "logit_bias": BIAS, "bad_words_ids": [*WORDS, [21]]},
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.6, "presence_penalty": 0.9},
        **{"eos_token_id": END, "min_new_tokens": 5, "num_return_sequences": 2},
        **{"temperature": 1.1, "seed": 5},
    },
}


def styled(tokens=20):
    """A request of every style."""
    return [
        (text(4 + 13 * n, seed=n), greedy(tokens, **style))
        for n, style in enumerate(STYLES.values())
    ]


def by_definition(prompt, params):
    """The same as processors, transformers' where it has one, in its order."""
    table = {(token,): float(value) for token, value in (params.logit_bias or {5: 0}).items()}
    repeats = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    given = [list(word) for word in params.bad_words_ids or [[1] * 99]]
    words = NoBadWordsLogitsProcessor(given, list(params.stop_ids) or None)

    def penalties(ids, scores):
        scores = scores.clone()
        for token, count in Counter(ids[0, len(prompt) :].tolist()).items():
            amount = count * params.frequency_penalty + params.presence_penalty
            scores[0, token] -= torch.tensor(amount, dtype=torch.float32)
        return scores

    def allowed(ids, scores):
        others = [n for n in range(VOCAB) if n not in params.allowed_token_ids]
        return scores.index_fill(1, torch.tensor(others), -torch.inf)

    own = [SequenceBiasLogitsProcessor(table), repeats, penalties, words]
    return own + [allowed] * bool(params.allowed_token_ids)


def test_definition():
    fields = ("logit_bias", "bad_words_ids", "allowed_token_ids", *PENALTIES)
    unset = {field: getattr(SamplingParams(), field) for field in fields}
    with engine_of(tiny()) as engine:
        for prompt, params in styled():
            same = params.resolve(logits_processors=by_definition(prompt, params), **unset)
            outputs = engine.generate([prompt] * 3, [params, same, params.resolve(**unset)])
            found, expected, control = map(bits, outputs)
            assert found == expected != control


@pytest.mark.parametrize("kind", first(1, reversed(KINDS), 2))
def test_alone_and_in_a_crowd(kind):
    model = model_of(kind)
    with engine_of(model, prefix_cache=False) as engine:
        alone = one_by_one(engine, styled())
    settings = {"verify": "always", "draft_window": 5, "page_size": 8, "drafter": Liar(2)}
    with engine_of(model, **settings) as engine:
        rng = random.Random(1)
        outputs = run(engine, [*crowd(rng, 3), *styled(), *crowd(rng, 3)])[3:-3]
        assert [bits(output) for output in outputs] == alone
        assert audit(engine, outputs)
        first = [output.completions[0] for output in outputs[:-1]]
        prompts, params = zip(*styled()[:-1], strict=True)
        scores = engine.score(prompts, [c.token_ids for c in first], list(params))
        assert scores == [c.logprobs for c in first]
        assert sum(c.stats.rollbacks for c in first) > 0
        # Control: without the fields they have other scores.
        bare = [greedy(20)] * len(first)
        assert engine.score(prompts, [c.token_ids for c in first], bare) != scores


def test_drafts_are_made_with_them():
    """Those of the fast path are what the verifier finds, as a draft sees the drafts before it."""
    with steady(tiny(), verify="always", draft_window=8) as engine:
        outputs = run(engine, styled(40))
    stats = [c.stats for output in outputs for c in output.completions]
    assert all(s.drafted == s.accepted >= 5 for s in stats)


def test_plain_data_and_back():
    params = styled()[-1][1]
    again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert again == params and hash(again) == hash(params)
    assert SamplingParams(logit_bias={"5": 2.5, torch.tensor(40): -100, 77: 1}).logit_bias == BIAS


class Counts(LogitsProcessor):
    """Keeps state: bans what it saw last, and raises unless it sees one sequence grow."""

    seen = None

    def __call__(self, ids, scores):
        if self.seen is not None and ids[0, :-1].tolist() != self.seen:
            raise AssertionError
        self.seen = ids[0].tolist()
        scores[0, self.seen[-1]] = -torch.inf
        return scores


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_processors_made_for_each_completion(deterministic):
    sampled = {"temperature": 1.2, "seed": 2, "num_return_sequences": 3}
    style = {"max_new_tokens": 12, "deterministic": deterministic, **sampled}
    own = SamplingParams(logits_processors=lambda: [Counts()], **style)
    prompts = [text(5, seed=n) for n in range(3)]
    with engine_of(tiny()) as engine:
        outputs = engine.generate(prompts, own)
        found = [c.token_ids for output in outputs for c in output.completions]
        assert {c.finish_reason for output in outputs for c in output.completions} == {"length"}
        alone = [c.token_ids for p in prompts for c in engine.generate([p], own)[0].completions]
        assert found == alone
        assert not deterministic or audit(engine, outputs)
        assert not audit(engine, [RequestOutput.from_json(outputs[0].to_json())])
        # Control: one object for all of them is called for all. Its reason has no text of its own.
        shared = engine.generate(prompts, SamplingParams(logits_processors=[Counts()], **style))
    (error,) = {c.error for output in shared for c in output.completions if c.error}
    assert error.startswith("logits processor Counts raised AssertionError; if it keeps state, ")


def test_a_function_that_makes_no_processors():
    with engine_of(tiny()) as engine:
        for make, said in ((lambda: {}[5], "KeyError"), (int, "TypeErr"), (lambda: [5], "it made")):
            with pytest.raises(ValueError, match=f"logits_processors=.*list of functions.*{said}"):
                engine.generate([[1], [2]], SamplingParams(logits_processors=make))
            assert not engine.has_unfinished()
