"""Overlap: the next pass is launched before the results of the last are in, on a late device.

Every test compares with engines that do not overlap. Controls: they have no second pass under way,
and reading results too early raises.
"""

import random

import pytest
import torch

from tests.engine.test_state_machine import EVENTS, OneEngine
from tests.support.at_random import use_at_random
from tests.support.cases import bits_of, drain, greedy, model_of, run, steady, text, whole
from tests.support.late_device import TooEarly, queue_of
from tests.support.mixes import bits, crowd
from tests.support.pages import check_residents
from tinyspec import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("late_device")
# Twice the same tokens, then siblings, prompt log-probabilities, processed logits.
REQUESTS = [
    *([(text(20), greedy(24))] * 2),
    ([*text(20)[:17], 5], greedy(12, temperature=0.9, seed=4, num_return_sequences=3)),
    (text(33, seed=2), greedy(16, prompt_logprobs=True)),
    (text(5, seed=3), greedy(9, repetition_penalty=1.3)),
    (text(40, seed=4), greedy(20, temperature=1.1, seed=8, top_k=12)),
]


def truth(requests, **settings):
    """Their bits without overlap."""
    with steady(model_of("shape-sensitive"), overlap=False, **settings) as engine:
        outputs = run(engine, requests)
        assert not engine.config.overlap and queue_of(engine).most == 1
    return bits_of(outputs), [output.prompt_logprobs for output in outputs]


def under_way(engine):
    return engine.core._under_way


def step_until(engine, condition):
    for _ in range(500):
        engine.step()
        if condition():
            return
    raise AssertionError("never")


@pytest.mark.crossed(0.8)
@pytest.mark.parametrize("verify", ["auto", "padded", "always"])
@pytest.mark.parametrize("pages", [{}, {"page_size": 8, "num_pages": 14}], ids=["ample", "tight"])
def test_same_bits(verify, pages):
    requests = [*REQUESTS, *crowd(random.Random(3), 4)]
    expected, scores = truth(requests, verify=verify, **pages)
    with steady(model_of("shape-sensitive"), verify=verify, **pages) as engine:
        outputs = run(engine, requests)
        queue = queue_of(engine)
        assert queue.most == 2 and queue.fetches <= queue.launches <= queue.fetches + 1
        asked = [n for n, (_, params) in enumerate(requests) if params.deterministic]
        assert len(asked) > 5
        for n in asked:
            assert (bits(outputs[n]), outputs[n].prompt_logprobs) == (expected[n], scores[n])
        assert bool(engine.stats().preemptions) == bool(pages)
        assert whole(engine)
        check_residents(engine)


def test_who_is_left_out_of_a_pass_comes_next():
    """A plain request that is never in a pass under way, beside deterministic ones that fill the
    canonical passes: a plan that is not launched leaves no mark."""

    def steps(overlap):
        settings = {"reference_rows": 4, "max_rows": 64, "verify": "padded", "linear": "never"}
        with steady(model_of("shape-sensitive"), overlap=overlap, **settings) as engine:
            asked = SamplingParams(max_new_tokens=6, logits_processors=[lambda ids, scores: scores])
            left = engine.add_request(text(5, seed=9), asked)
            for n in range(4):
                engine.add_request(text(6, seed=n), greedy(30))
            return next(n for n in range(80) if left in [o.request_id for o in engine.step()])

    assert steps(True) == steps(False) < 20


def test_control_reading_too_early_raises(monkeypatch):
    with steady(model_of("as is")) as engine:
        queue = queue_of(engine)
        launch = queue.launch
        monkeypatch.setattr(queue, "launch", lambda work: launch(work).results)
        with pytest.raises(TooEarly):
            engine.generate([text(6)], greedy(4))


def test_surplus_rows_touch_nobodys_pages():
    """Sequences that stop by a token have a row in the pass under way. Pages that are written to,
    though others read them: the state machine's."""
    stops = {"stop_token_ids": tuple(range(0, 128, 5))}
    requests = [(text(9 + n % 5, seed=n % 4), greedy(30, seed=n, **stops)) for n in range(12)]
    requests += [(p, SamplingParams(max_new_tokens=30, **stops)) for p, _ in requests[:6]]
    expected, _ = truth(requests, page_size=4, num_pages=60, max_sequences=5)
    with steady(model_of("shape-sensitive"), page_size=4, num_pages=60, max_sequences=5) as engine:
        outputs = run(engine, requests)
        assert bits_of(outputs[:12]) == expected[:12]
        assert queue_of(engine).most == 2 and engine.stats().cached_prompt_tokens > 0
        assert {c.finish_reason for o in outputs for c in o.completions} >= {"stop"}
        engine.core.drain()
        assert whole(engine)


def test_logits_that_are_not_finite():
    """The row after a token without finite logits is surplus; the others lose nothing."""
    requests = [REQUESTS[0], (text(7, seed=9), greedy(24)), REQUESTS[5]]
    expected, _ = truth(requests)
    others = {t for n in (0, 2) for t in [*requests[n][0], *expected[n][0][0]]}
    tokens = expected[1][0][0]
    place = next(n for n, t in enumerate(tokens) if n > 3 and t not in others)
    found = []
    for overlap in (False, True):
        model = model_of("shape-sensitive")
        with torch.no_grad():
            model.model.embed_tokens.weight[tokens[place]] = torch.nan
        with steady(model, overlap=overlap) as engine:
            found.append(bits_of(run(engine, requests)))
            assert whole(engine) and engine.stats().preemptions == 0
    assert found[0] == found[1] and found[1][0] == expected[0] and found[1][2] == expected[2]
    assert found[1][1][0][0] == tokens[: place + 1] and found[1][1][0][2] == "abort"


def test_a_pass_of_older_weights_is_dropped():
    """A deterministic request with tokens ends; a plain one goes on with the new weights."""
    model = model_of("as is")
    plain = SamplingParams(max_new_tokens=12)
    with steady(model, overlap=True) as engine:
        ids = [engine.add_request(text(9), greedy(30)), engine.add_request(text(8), plain)]
        step_until(engine, lambda: under_way(engine) is not None and engine.admission.running)
        before = engine.admission.running[1].tokens
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(-3.0)
        done = drain(engine)
        assert done[ids[0]].completions[0].finish_reason == "abort"
        tokens = text(8) + done[ids[1]].completions[0].token_ids
        # Control: the token of the pass that was under way would have been another.
        assert tokens[: len(before)] == before
        after = SamplingParams(max_new_tokens=12 - len(before) + 8)
        follows = engine.generate([before], after)[0].completions[0].token_ids
        assert tokens[len(before) :] == follows
        again = run(engine, REQUESTS[:3])
    with steady(model, overlap=False) as engine:
        assert bits_of(run(engine, REQUESTS[:3])) == bits_of(again)


@pytest.mark.parametrize("leave", ["release", "close"])
def test_nothing_is_under_way_after(leave):
    """A stop token leaves a pass under way that is nobody's; whoever frees memory waits for it."""
    model = model_of("as is")
    with Engine(model, config=EngineConfig(reference_rows=16, verify="padded")) as engine:
        first = engine.generate([text(9)], greedy(20))[0].completions[0].token_ids
        until = greedy(20, stop_token_ids=(first[6],), temperature=0.0)
        stopped = engine.generate([text(9)], until)[0].completions[0]
        assert stopped.finish_reason == "stop" and under_way(engine) is not None
        getattr(engine, leave)()
        assert under_way(engine) is None and not queue_of(engine).waiting
        if leave != "close":
            assert engine.generate([text(9)], greedy(20))[0].completions[0].token_ids == first


def test_random_use():
    """The machine of the state tests, against an oracle that does not overlap."""
    use_at_random(OneEngine, 5, cases=1, steps=20)


@pytest.mark.slow("random use", 15, cases=30)
def test_much_random_use(case_seed):
    OneEngine.reached.clear()
    use_at_random(OneEngine, case_seed, cases=4, steps=60)
    assert set(OneEngine.reached) == set(EVENTS)
