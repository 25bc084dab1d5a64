"""Biases, OpenAI's penalties and bad words: what they are by definition, with the bits of the
request alone wherever it runs."""

import json
import random
from collections import Counter

import pytest
import torch
from transformers.generation import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from tests.support.cases import KINDS, engine_of, greedy, model_of, one_by_one, run, steady, text
from tests.support.drop_in import patched
from tests.support.mixes import Liar, bits, crowd, plain
from tests.support.tiny import VOCAB, tiny
from tinyspec import RequestOutput, SamplingParams, audit

BIAS = {5: 2.5, 40: -100, 77: 1}
WORDS = [[3], [90, 12], [7, 7, 7], *([a, b] for a in range(40) for b in range(60, 100))]
END = (21, 60)
STYLES = {
    "bias": {"logit_bias": BIAS},
    "frequency": {"frequency_penalty": 1.7},
    "presence": {"presence_penalty": 2.2, "temperature": 0.8, "seed": 3, "top_k": 30},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -1.3},
    "bad words": {"bad_words_ids": WORDS, "temperature": 0.9, "seed": 4},
    "all": {
        "logit_bias": BIAS,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.9,
        "bad_words_ids": [*WORDS, [21]],
        "eos_token_id": END,
        "min_new_tokens": 5,
        "temperature": 1.1,
        "seed": 5,
        "num_return_sequences": 2,
    },
}


def styled(tokens=20):
    """A request of every style."""
    return [
        (text(4 + 13 * n, seed=n), greedy(tokens, **style))
        for n, style in enumerate(STYLES.values())
    ]


def by_definition(prompt, params):
    """The same as processors, in order; ``repetition_penalty`` alone stays a field."""

    def bias(ids, scores):
        table = {(token,): float(value) for token, value in (params.logit_bias or {}).items()}
        return SequenceBiasLogitsProcessor(table)(ids, scores) if table else scores

    def penalties(ids, scores):
        scores = scores.clone()
        for token, count in Counter(ids[0, len(prompt) :].tolist()).items():
            amount = count * params.frequency_penalty + params.presence_penalty
            scores[0, token] -= torch.tensor(amount, dtype=torch.float32)
        return scores

    def words(ids, scores):
        given = [list(word) for word in params.bad_words_ids or ()]
        if not given:
            return scores
        return NoBadWordsLogitsProcessor(given, list(params.stop_ids) or None)(ids, scores)

    return [bias, penalties, words]


@pytest.mark.parametrize("name", [name for name in STYLES if name != "all"])
def test_definition(name):
    prompt, params = dict(zip(STYLES, styled(40), strict=True))[name]
    fields = ("logit_bias", "bad_words_ids", "frequency_penalty", "presence_penalty")
    unset = {field: getattr(SamplingParams(), field) for field in fields}
    same = params.resolve(logits_processors=by_definition(prompt, params), **unset)
    with engine_of(tiny()) as engine:
        found, expected, control = (
            bits(engine.generate([prompt], wanted)[0])
            for wanted in (params, same, params.resolve(**unset))
        )
    assert found == expected != control


def test_order():
    """Bias, then the repetition penalty, which may turn what it divides; bad words last: all but an
    end token alone."""
    prompt, params = [8, 9], greedy(1, top_logprobs=VOCAB, repetition_penalty=2.0)
    asked = {"logit_bias": {8: 50, 30: 50, 31: 1e300}, "bad_words_ids": [[30], [21], [9, 31]]}
    with engine_of(tiny()) as engine:
        base, found = (
            dict(engine.generate([prompt], wanted)[0].completions[0].top_logprobs[0])
            for wanted in (params, params.resolve(eos_token_id=(21,), **asked))
        )
    banned = {token for token in found if found[token] == -torch.inf}
    assert banned == {30, 31}
    halved = found[8] - found[100] - (base[8] - base[100])
    assert 25 - 5 < halved < 25 + 5  # 50 halved, not 50


@pytest.mark.parametrize("verify", ["auto", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_in_a_crowd(kind, verify):
    model = model_of(kind)
    with engine_of(model, prefix_cache=False) as engine:
        alone = one_by_one(engine, styled())
    settings = {"verify": verify, "draft_window": 5, "page_size": 8, "drafter": Liar(2)}
    with engine_of(model, **settings) as engine:
        rng = random.Random(1)
        outputs = run(engine, [*crowd(rng, 5), *styled(), *crowd(rng, 5)])[5:-5]
        assert [bits(output) for output in outputs] == alone
        assert audit(engine, outputs)
        first = [output.completions[0] for output in outputs[:-1]]
        prompts, params = zip(*styled()[:-1], strict=True)
        scores = engine.score(prompts, [c.token_ids for c in first], list(params))
        assert scores == [c.logprobs for c in first]
        assert sum(c.stats.rollbacks for c in first) > 0
        # Control: without the fields they are other requests.
        bare = [greedy(20)] * len(first)
        others = run(engine, list(zip(prompts, bare, strict=True)))
        assert all(bits(o) != own for o, own in zip(others, alone, strict=False))
        assert engine.score(prompts, [c.token_ids for c in first], bare) != scores


def test_drafts_are_made_with_them():
    """Those of the fast path are what the verifier finds, as a draft sees the drafts before it."""
    with steady(tiny(), verify="always", draft_window=8) as engine:
        outputs = run(engine, styled(40))
    stats = [c.stats for output in outputs for c in output.completions]
    assert all(s.drafted == s.accepted >= 5 for s in stats)


def test_plain_requests():
    """The same tokens, with and without drafts of a drafter."""
    asked = [(prompt, plain(params)) for prompt, params in styled()]
    with steady(tiny(), prefix_cache=False) as engine:
        alone = [engine.generate([p], s)[0].completions[0].token_ids for p, s in asked]
        together = [o.completions[0].token_ids for o in run(engine, asked)]
    with steady(tiny(), drafter=Liar(3)) as engine:
        drafted = [o.completions[0].token_ids for o in run(engine, asked)]
    assert alone == together == drafted
    assert len(set(map(tuple, alone))) == len(STYLES)


def test_plain_data_and_back():
    params = styled()[-1][1]
    assert params.bad_words_ids[1] == (90, 12) and params.logit_bias == BIAS
    again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert again == params and hash(again) == hash(params)
    assert SamplingParams(logit_bias={"5": 2.5, torch.tensor(40): -100, 77: 1}).logit_bias == BIAS
    with engine_of(tiny()) as engine:
        (output,) = engine.generate([[1, 2]], params)
        back = RequestOutput.from_json(output.to_json())
        assert back.params == output.params and audit(engine, [back])
        bent = back.params.resolve(logit_bias={5: 2.6})
        assert not audit(engine, [RequestOutput(**{**vars(back), "params": bent})])


def test_the_drop_in_gives_the_same_tokens():
    prompt, params = styled()[4]
    with patched(tiny()) as model:
        ids = torch.tensor([prompt])
        style = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 4}
        found = model.generate(ids, max_new_tokens=20, bad_words_ids=WORDS, pad_token_id=0, **style)
    with engine_of(tiny()) as engine:
        expected = engine.generate([prompt], params)[0].completions[0].token_ids
    assert found[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize(
    "style, said",
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias=128 .*0 to 127"),
        ({"bad_words_ids": [[1, VOCAB]]}, "bad_words_ids=128 .*0 to 127"),
    ],
    ids=["bias", "word"],
)
def test_tokens_that_the_model_does_not_have(style, said):
    with engine_of(tiny()) as engine:
        with pytest.raises(ValueError, match=said):
            engine.add_request([1], SamplingParams(**style))
        assert not engine.has_unfinished()


def test_all_excluded():
    """It ends with the reason; the others go on."""
    banned = greedy(4, bad_words_ids=[[token] for token in range(VOCAB)])
    with engine_of(tiny()) as engine:
        bad, good = run(engine, [([1, 2], banned), ([1, 2], greedy(4))])
    assert "every token excluded" in bad.completions[0].error
    assert good.completions[0].finish_reason == "length"
