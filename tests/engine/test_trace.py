"""The trace: what passes did row by row, at hardly any cost and without changing a bit."""

import random

import pytest

from tests.support.budget import first
from tests.support.cases import text
from tests.support.mixes import Liar, bits, crowd
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.engine.trace import rows_of

REQUESTS = crowd(random.Random(3), 9)
TIGHT = {"page_size": 8, "num_pages": 30, "max_rows": 32}


def run(config, requests=REQUESTS):
    """The outputs, the engine's sums, fingerprint and trace (None without one)."""
    with Engine(tiny(), config=config) as engine:
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        trace = engine.trace if config.trace else None
        return outputs, engine.stats(), engine.fingerprint, trace


def sums(passes):
    """(drafted, accepted, rolled back, rollbacks, verify passes, tokens) of each completion."""
    found = {}
    for one in passes:
        for work in one.works:
            key = work.request_id, work.index
            counts, tokens = found.setdefault(key, ([0] * 5, []))
            counts[0] += work.proposed + (len(work.drafts) if work.kind == "draft" else 0)
            counts[1] += work.accepted
            counts[2] += work.rejected
            counts[3] += work.rejected > 0
            counts[4] += work.kind == "verify"
            tokens += work.tokens
    return found


CASES = {
    "fast path": {"verify": "always"},
    "liar": {"drafter": Liar(0)},
    "tight": {"verify": "always", "draft_window": 3, **TIGHT},
    "ngram": {"drafter": "ngram", "overlap": False},
    "overlap": {"verify": "always", "draft_window": 5, "overlap": True},
}


@pytest.mark.parametrize("settings", first(3, CASES.values(), 2), ids=CASES)
def test_it_agrees_with_what_outputs_say(settings):
    outputs, stats, _, trace = run(EngineConfig(trace=True, reference_rows=16, **settings))
    passes = trace.passes()
    found = sums(passes)
    for output in outputs:
        for index, completion in enumerate(output.completions):
            s = completion.stats
            expected = [s.drafted, s.accepted, s.rolled_back, s.rollbacks, s.verify_passes]
            assert found[output.request_id, index] == (expected, completion.token_ids)
    assert stats.committed == sum(len(tokens) for _, tokens in found.values())
    for name in ("committed", "accepted", "rolled_back", "drafted"):
        assert sum(getattr(one, name) for one in passes) == getattr(stats, name)
    assert stats.rolled_back > 0 or "drafter" not in settings
    for one in passes:
        rows = rows_of(one)
        assert sum(rows.values()) == one.bucket and rows["verify"] == one.rows["verify"]
        for work in one.works:
            if work.kind == "verify":
                assert work.drafts[: work.accepted] == work.targets[: work.accepted]
                assert -1 not in work.drafts and work.kv_drafts == 0
                if work.rejected:
                    assert work.drafts[work.accepted] != work.targets[work.accepted]


def test_nothing_changes():
    """Bits, fingerprint, passes and drafts are those of an engine that keeps no trace. Control:
    sums of other passes differ."""
    found = []
    for trace, verify in ((False, "always"), (True, "always"), (True, "padded")):
        config = EngineConfig(trace=trace, verify=verify, reference_rows=16, draft_window=4)
        outputs, stats, fingerprint, _ = run(config)
        found.append((list(map(bits, outputs)), fingerprint, {**vars(stats), "seconds": 0}))
    assert found[0] == found[1] and found[1][2] != found[2][2]


def test_the_ring_is_bounded():
    """The newest passes are kept; drafts of before are unknown, and whose rows are is not. It has
    to be asked for."""
    config = EngineConfig(trace=7, verify="always", reference_rows=16, draft_window=4)
    outputs, _, _, trace = run(config)
    passes = trace.passes()
    assert len(trace) == len(passes) == 7
    numbers = [one.number for one in passes]
    assert numbers == list(range(numbers[0], numbers[0] + 7)) and numbers[0] > 0
    names = {(work.request_id, work.index) for one in passes for work in one.works}
    known = {(o.request_id, n) for o in outputs for n in range(len(o.completions))}
    assert names and names <= known
    with Engine(tiny()) as engine, pytest.raises(ValueError, match=r"trace=False .*trace=True"):
        _ = engine.trace


def test_every_end_is_there(monkeypatch):
    """Also of completions that start from the prompt of another one, or end before it."""
    several = SamplingParams(max_new_tokens=1, num_return_sequences=3, temperature=1.0, seed=1)

    def raises(*_):
        raise RuntimeError("always")

    with Engine(tiny(), config=EngineConfig(trace=True)) as engine:
        outputs = engine.generate([text(5), text(6)], several)
        monkeypatch.setattr(engine.runner, "run", raises)
        outputs += engine.generate([text(7)], several)
        works = [work for one in engine.trace.passes() for work in one.works]
    found = [(w.request_id, w.index, w.end) for w in works if w.end is not None]
    reasons = [c.finish_reason for output in outputs for c in output.completions]
    places = [(output.request_id, n) for output in outputs for n in range(3)]
    assert sorted(found) == sorted((*p, end) for p, end in zip(places, reasons, strict=True))
    assert reasons == ["length"] * 6 + ["abort"] * 3
