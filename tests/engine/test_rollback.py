"""Verify, commit, rollback: what is kept is what a sequence that never drafted has."""

import torch

from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

PROMPT = prompts(6)[5]


def test_fast_path_acceptance_on_the_bundled_model():
    """As drafter the fast path is wrong less than once in 100 times. One wrong draft undoes all
    that are behind it, which were not judged."""
    from benchmarks.storyteller.questions import sample_prompts

    texts = sample_prompts(24, seed=1)
    params = [
        SamplingParams(max_new_tokens=64, deterministic=True, temperature=n % 2 * 0.8, seed=n)
        for n in range(len(texts))
    ]
    # Of itself it would hardly draft at all, nor with more sequences than a pass has room for.
    config = EngineConfig(verify="always", max_sequences=4)
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
