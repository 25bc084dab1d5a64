"""One record a pass: what was scheduled, found and committed is told by one ``Step``."""

import random

import numpy as np
import pytest

from tests.support.cases import greedy, text
from tests.support.mixes import Liar, crowd
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
from tinyspec.scheduler.passes import DRAFT

REQUESTS = [
    *crowd(random.Random(5), 7),
    (text(19), greedy(6, temperature=0.9, seed=4, num_return_sequences=3)),
    (text(21, seed=2), greedy(5, prompt_logprobs=True)),
]


def steps_of(engine):
    """Of each pass the step, and of each of its works the sequence and its tokens before and after
    the commit."""
    found, finish = [], engine.core.finish

    def noted(step, sound):
        sequences = step.sequences
        before = [one.tokens for one in sequences]
        finish(step, sound)
        after = [one.tokens for one in sequences]
        found.append((step, list(zip(sequences, before, after, strict=True))))

    engine.core.finish = noted
    engine.generate([p for p, _ in REQUESTS], [s for _, s in REQUESTS])
    return found


@pytest.mark.parametrize("drafter", [None, Liar(0)], ids=["fast path", "liar"])
def test_a_step_tells_what_became_of_a_pass(drafter):
    """Works, rows and tokens by the same places. Control: tokens of the next work are others."""
    config = EngineConfig(verify="always", reference_rows=16, drafter=drafter)
    with Engine(tiny(), config=config) as engine:
        found = steps_of(engine)
        records, stats = engine.records, engine.stats()
    assert [step.record for step, _ in found] == records
    counts = {"committed": 0, "shifted": 0, "unscored": 0, "drafts": 0}
    for step, works in found:
        assert step.num_rows == step.cu_rows[-1] == (step.ends - step.starts).sum() <= step.bucket
        assert len(step.tokens) == step.num_tokens
        assert step.num_logits == step.num_tokens + len(step.unscored)
        assert sum(step.record.rows.values()) + step.record.padding == step.bucket
        for n, (_, before, after) in enumerate(works):
            first, own = step.firsts[n], after[len(before) :]
            yielded = step.tokens[first : first + step.yields[n]].tolist()
            assert after[: len(before)] == before and len(yielded) == step.yields[n]
            if step.kinds[n] == DRAFT:
                assert own == []
                counts["drafts"] += 1
                continue
            assert own == yielded[: len(own)] and bool(own) == bool(yielded)
            counts["committed"] += len(own)
            shifted = np.roll(step.tokens, -1)[first : first + len(own)].tolist()
            counts["shifted"] += own != shifted
        counts["unscored"] += len(step.unscored)
    assert counts["committed"] == stats.committed and all(counts.values())
