"""Verify, commit, rollback: what is kept is what a sequence that never drafted has."""

import pytest
import torch

from tests.support.budget import first
from tests.support.mixes import HalfLiar
from tests.support.pages import read_pages
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

PARAMS = SamplingParams(max_new_tokens=60, deterministic=True, logprobs=True)
PROMPT = prompts(6)[5]


def states(config, until=45):
    """(computed, pages held, KV up to there) of one request after every step, by length."""
    found = {}
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    with Engine(model, config=config) as engine:
        engine.add_request(PROMPT, PARAMS)
        while not engine.step():
            sequence = engine.admission.running[0]
            if sequence.drafts or sequence.num_generated > until:
                continue
            place, cache = (sequence.pages, sequence.computed), engine.runner.cache
            kv = [x.clone() for layer in range(2) for x in read_pages(cache, layer, *place)]
            found[sequence.num_generated] = (list(sequence.tokens), len(sequence.pages), kv)
        return found, engine.stats()


@pytest.mark.parametrize("page_size", first(1, [8, 16], 2))
def test_rolled_back_equals_never_drafted(page_size):
    # Without a pass under way, which may hold one page more.
    settings = {"reference_rows": 16, "page_size": page_size, "overlap": False}
    never, stats = states(EngineConfig(**settings, verify="padded"))
    assert stats.rollbacks == stats.drafted == 0
    truth = never[max(never)][0]
    compared = 0
    for seed in range(3):
        drafter = HalfLiar([truth], seed, wrong=0.3)
        drafted, stats = states(EngineConfig(**settings, drafter=drafter, draft_window=7))
        assert stats.rollbacks > 0
        for length, (tokens, pages, kv) in drafted.items():
            assert (tokens, pages) == never[length][:2]
            assert all(map(torch.equal, kv, never[length][2]))
            compared += 1
    assert compared > 20


def test_fast_path_acceptance_on_the_bundled_model():
    """As drafter the fast path is wrong less than once in 100 times. One wrong draft undoes all
    that are behind it, which were not judged."""
    from benchmarks.storyteller.questions import sample_prompts

    texts = sample_prompts(20, seed=1)
    params = [
        SamplingParams(max_new_tokens=64, deterministic=True, temperature=n % 2 * 0.8, seed=n)
        for n in range(len(texts))
    ]
    # Of itself it would hardly draft at all, nor with more sequences than a pass has room for.
    config = EngineConfig(verify="always", max_sequences=4, max_rows=64)
    with Engine.from_pretrained(BUNDLED, device="cpu", config=config) as engine:
        outputs = engine.generate(texts, params)
    stats = [output.completions[0].stats for output in outputs]
    drafted = sum(s.drafted for s in stats)
    assert drafted > 300
    assert sum(s.rollbacks for s in stats) / drafted < 0.01
    for s in stats:
        assert s.drafted == s.accepted + s.rolled_back
        assert (s.rolled_back > 0) == (s.rollbacks > 0)


class Spoils:
    """A stateless processor that fails for one token of the drafts."""

    stateless = True

    def __call__(self, ids, scores):
        return torch.full_like(scores, -torch.inf) if int(ids[0, -1]) == 77 else scores


class Proposes77:
    def propose(self, sequences, n):
        return [[77]] * len(sequences)


def test_kv_of_a_failed_plain_draft_is_not_canonical():
    """A deterministic request must not start from it."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    config = EngineConfig(reference_rows=16, page_size=8, drafter=Proposes77())
    with Engine(model, config=config) as engine:
        engine.generate([[1]], SamplingParams(max_new_tokens=1, deterministic=True))
        engine.add_request(
            PROMPT[:7], SamplingParams(max_new_tokens=40, logits_processors=[Spoils()])
        )
        seen = []
        while engine.has_unfinished():
            engine.step()
            seen += [(s.canonical, s.computed) for s in engine.admission.running]
        assert any(computed > 10 for _, computed in seen)
        # The prompt at most: the rest was computed by passes of other sizes.
        assert max(canonical for canonical, _ in seen) <= 7
