"""Plain requests: transformers' own tokens; with drafts of a drafter what they are without it, in
fewer passes."""

from itertools import takewhile

import numpy as np
import pytest
import torch

from tests.support.cases import model_of, run, steady, text, whole
from tests.support.mixes import Liar
from tests.support.tiny import FAMILIES, hf_greedy, prompts, tiny
from tests.support.tolerances import OTHER_PASS, close
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.drafts import drafter
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.passes import PassRecord

LENGTHS = (3, 9, 17, 30)


class Knows:
    """Proposes what will follow."""

    def __init__(self, texts):
        self.texts = texts

    def propose(self, sequences, n):
        known = [[t for t in self.texts if t[: len(s)] == list(s)] for s in sequences]
        return [
            found[0][len(s) : len(s) + n] if found else []
            for s, found in zip(sequences, known, strict=True)
        ]


def requests(**changes):
    settings = {"max_new_tokens": 24, "logprobs": True, **changes}
    return [(text(n, seed=n), SamplingParams(**settings)) for n in LENGTHS]


def tokens(outputs):
    return [completion.token_ids for output in outputs for completion in output.completions]


def generate(asked, **settings):
    with steady(model_of("as is"), prefix_cache=False, **settings) as engine:
        outputs = run(engine, asked)
        assert whole(engine)
        return outputs, engine.stats()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_greedy_tokens_are_transformers_own(family, page_size):
    asked = [(prompt, SamplingParams(max_new_tokens=16)) for prompt in prompts(6)]
    model, found = tiny(family), []
    for one in (model, tiny(seed=1)):
        with Engine(one, config=EngineConfig(page_size=page_size)) as engine:
            found.append(tokens(run(engine, asked)))
    assert found[0] == [hf_greedy(model, prompt, 16) for prompt in prompts(6)]
    assert found[1] != found[0], "control: another model's are others"


STYLES = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "penalised": {"repetition_penalty": 1.3},
    "three of a prompt": {"temperature": 1.1, "seed": 2, "top_k": 20, "num_return_sequences": 3},
    "stops": {"stop_token_ids": tuple(range(0, 128, 7))},
}


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("drafter", ["knows", "lies", "ngram"])
def test_plain_requests_keep_their_tokens(style, drafter):
    asked = requests(**STYLES[style])
    expected, without = generate(asked)
    texts = [o.prompt_token_ids + c.token_ids for o in expected for c in o.completions]
    drafters = {"knows": Knows(texts), "lies": Liar(1), "ngram": "ngram"}
    outputs, stats = generate(asked, drafter=drafters[drafter])
    assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.completions, other.completions, strict=True):
            assert close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), OTHER_PASS)
    if drafter == "knows":  # of three completions it takes one for another where they part
        assert stats.accepted > stats.drafted * 0.8 > 5
        assert stats.rolled_back == 0 or style == "three of a prompt"
        if style == "greedy":
            assert sum(stats.passes.values()) < sum(without.passes.values()) / 4
    if drafter == "lies":
        assert stats.rolled_back > 5


class Counts(Knows, drafter.NgramDrafter):
    """Sums up what it is told."""

    def __init__(self, texts):
        Knows.__init__(self, texts)
        drafter.NgramDrafter.__init__(self)
        self.told = [0, 0]

    def account(self, record, proposed, accepted, *given):
        self.told = [self.told[0] + proposed, self.told[1] + accepted]
        super().account(record, proposed, accepted, *given)


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_drafter_is_told_of_its_own_drafts(deterministic):
    """Of two whose requests share passes, and of one request that has none."""
    asked, params = zip(*requests(deterministic=deterministic)[:3], strict=True)
    settings = {"drafter": "ngram", "verify": "always", "prefix_cache": False}
    with steady(model_of("as is"), **settings) as engine:
        truths = [p + t for p, t in zip(asked, tokens(engine.generate(asked, params)), strict=True)]
        wrong = [[*truths[1][:-12], *truths[0][-12:]]]
        drafters = Counts(truths), Counts(wrong), None
        requested = engine.ready().requests(asked, params)
        for request, one in zip(requested, drafters, strict=True):
            request.drafter = one
        outputs = engine.outputs("test", lambda _: requested)
    assert tokens(outputs) == [t[len(p) :] for p, t in zip(asked, truths, strict=True)]
    for one, output in zip(drafters[:2], outputs, strict=False):
        stats = output.completions[0].stats
        assert one.told[1] > 0 and (deterministic or one.told == [stats.drafted, stats.accepted])
    assert drafters[0].told[0] == drafters[0].told[1] and drafters[1].told[0] > drafters[1].told[1]


def time_of(text, verified=False, asking=0.0):
    """Of passes of one sequence that becomes ``text``, proposals looked up, over those without.
    verified: in canonical passes, of which there is one size. asking: what a look takes, in
    passes of one row."""
    looks, buckets = drafter.NgramDrafter(), Buckets(32, 32)
    buckets.learn([32])
    for size in buckets.sizes:
        buckets.ran(size, False, 1 + size / 10)
    length, spent = 9, 0.0
    while length < len(text):
        took = 0.0 if looks.pauses else asking * buckets.seconds(1)
        (found,) = [[]] if looks.pauses else looks.propose([text[:length]], 16)
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(found, text[length:], strict=False))
        bucket, accepted = buckets.fit(1 + len(found)), len(list(agreed))
        bucket = 32 if verified and found else bucket
        rows = {"verify": 1 + len(found)}
        canonical = verified and len(found) > 0
        record = PassRecord(0, bucket, canonical, rows, {}, 1, 0, 0, 1)
        looks.account(record, len(found), accepted, buckets, took)
        spent += took + buckets.seconds(bucket, canonical)
        length += 1 + accepted
    return spent / (len(text) * buckets.seconds(1))


def test_what_wins_nothing_is_hardly_looked_up(monkeypatch, passes_count):
    """Where pairs of tokens come again by chance; where a text repeats itself, much is won."""
    random = np.random.default_rng(0)
    chance = random.integers(0, 12, 600).tolist()
    for verified in (False, True):
        assert time_of(chance, verified) < 1.03
        assert time_of(chance[:60] * 10, verified) < 0.6
    unlike = list(range(600))
    assert time_of(unlike, asking=0.1) < 1.03
    assert time_of(chance[:60] * 10, asking=0.1) < 0.6
    monkeypatch.setattr(drafter, "SHARE", np.inf)
    assert time_of(chance) > 1.1, "control"
    assert time_of(unlike, asking=0.1) > 1.07, "control"
