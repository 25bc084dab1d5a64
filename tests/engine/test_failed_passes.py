"""A pass that raises: the request that causes it fails alone and says why.

Controls: a failure is seen in the bits of plain requests, whose passes have other sizes then, and
without the cause nobody fails.
"""

import gc
import random
import weakref
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.support.cases import bits_of, drain, greedy, model_of, run, steady, text, whole
from tests.support.mixes import bits, crowd, plain
from tests.support.pages import check_residents
from tests.support.tiny import VOCAB
from tinyspec import SamplingParams

ARMED = "out of order"


class Fault:
    """A hook in front of a module, which raises ``error`` at the calls that ``wrong`` picks.

    wrong: given the number of calls since it was armed and the input; ``raised``: how often. Kept
    apart from the hook: numbers of a hook's own are settings, and changed ones another model.
    """

    def __init__(self, module):
        self.arm(None)
        module.register_forward_pre_hook(lambda _, args: self.check(args[0]))

    def arm(self, wrong, error=None):
        self.wrong, self.calls, self.raised = wrong, 0, 0
        self.error = error or RuntimeError(ARMED)

    def arm_for(self, token):
        """In front of an embedding: every pass that holds the token."""
        self.arm(lambda calls, ids: (ids == token).any(), ValueError(f"saw {token}"))

    def check(self, given):
        self.calls += 1
        if self.wrong is not None and self.wrong(self.calls, given):
            self.raised += 1
            raise self.error


def faulty_model(kind="shape-sensitive"):
    model = model_of(kind)
    return model, Fault(model.get_input_embeddings())


def unused():
    """A token that none of ``asked`` holds."""
    held = {t for p, _ in asked() for t in p} | {t for r in alone() for c in r for t in c[0]}
    return next(t for t in range(1, VOCAB) if t not in held)


def asked():
    """Six deterministic requests of different styles; none of their tokens is 0."""
    styles = ({}, {"temperature": 0.8, "seed": 1}, {"num_return_sequences": 2})
    return [
        ([t or 1 for t in text(7 + 5 * n, seed=n)], greedy(14, **styles[n % 3])) for n in range(6)
    ]


@cache
def alone(kind="shape-sensitive"):
    """The bits of each of ``asked`` in a model that nothing disturbs."""
    with steady(model_of(kind), prefix_cache=False) as engine:
        return [bits(engine.generate([p], params)[0]) for p, params in asked()]


@pytest.mark.crossed(0.7)
@pytest.mark.parametrize("at", [2, 13])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_pass_that_fails_once_loses_nothing(at, page_size):
    """Whether it was prompts, drafts or a verify; nothing raises, nobody fails."""
    model, faulty = faulty_model()
    with steady(model, page_size=page_size, draft_window=4) as engine:
        engine.generate([[1]], greedy(1))
        others = crowd(random.Random(at), 3)
        faulty.arm(lambda call, ids: call == at)
        outputs = run(engine, [*asked(), *others])
        assert faulty.raised == 1
        assert bits_of(outputs[:6]) == alone()
        assert {c.finish_reason for o in outputs for c in o.completions} == {"length"}
        assert whole(engine)
        check_residents(engine)


def test_control_a_failed_pass_shows_in_plain_requests():
    model, faulty = faulty_model()
    requests = [(prompt, plain(wanted)) for prompt, wanted in asked()]
    found = []
    for at in (0, 5):
        with steady(model) as engine:
            faulty.arm(lambda call, ids, at=at: call == at)
            found.append(bits_of(run(engine, requests)))
    assert faulty.raised == 1
    assert found[0] != found[1]


def test_a_pass_of_one_request_that_fails_says_why():
    model, faulty = faulty_model()
    prompt, params = asked()[0]
    with steady(model) as engine:
        good = engine.generate([prompt], params)[0].completions[0]
        faulty.arm(lambda call, ids: call >= 3)
        completion = engine.generate([prompt], params)[0].completions[0]
        assert completion.finish_reason == "abort"
        assert completion.error == f"the pass raised RuntimeError: {ARMED}"
        kept = len(completion.token_ids)
        assert 0 < kept < 14
        assert completion.token_ids == good.token_ids[:kept]
        assert completion.logprobs == good.logprobs[:kept]
        assert whole(engine)
        faulty.arm(None)
        again = engine.generate([prompt], params)[0].completions[0]
        assert (again.token_ids, again.logprobs) == (good.token_ids, good.logprobs)


@pytest.mark.parametrize("deterministic, copies", [(True, 3), (False, 1)])
def test_only_the_request_with_a_bad_token_fails(deterministic, copies):
    (model, faulty), bad = faulty_model(), unused()
    wanted = SamplingParams(
        max_new_tokens=9, deterministic=deterministic, num_return_sequences=2, temperature=1.0
    )
    guilty = [([3, 4, bad, 5], wanted)] * copies
    with steady(model, page_size=4, num_pages=80) as engine:
        engine.generate([[1]], greedy(1))
        faulty.arm_for(bad)
        outputs = run(engine, [*asked()[:3], *guilty, *asked()[3:]])
        assert bits_of([*outputs[:3], *outputs[-3:]]) == alone()
        for output in outputs[3:-3]:
            for completion in output.completions:
                assert completion.finish_reason == "abort"
                assert completion.error == f"the pass raised ValueError: saw {bad}"
                assert completion.token_ids == []
        assert whole(engine)
        check_residents(engine)
        # Control: it is the token, not the prompt.
        faulty.arm(None)
        output = run(engine, guilty[:1])[0]
        assert [c.finish_reason for c in output.completions] == ["length", "length"]


class Proposes(NamedTuple):
    """Always drafts the same tokens."""

    tokens: list[int]

    def propose(self, sequences, n):
        return [self.tokens[:n] for _ in sequences]


def test_drafts_that_make_a_pass_raise_cost_no_request():
    (model, faulty), bad = faulty_model(), unused()
    with steady(model, drafter=Proposes([bad])) as engine:
        engine.generate([[1]], greedy(1))
        faulty.arm_for(bad)
        outputs = run(engine, asked())
        assert faulty.raised > 3
        assert bits_of(outputs) == alone()
        assert whole(engine)


def test_passes_that_are_too_large():
    """A request that fits alone is served, slowly; a long prompt takes many passes."""
    error = torch.OutOfMemoryError("no room")
    model, faulty = faulty_model("as is")  # has large canonical buckets
    long = (text(60, seed=1), greedy(5))
    requests = [*asked()[:3], long, *asked()[3:]]
    with steady(model, max_rows=64, page_size=8) as engine:
        engine.generate([[1]], greedy(1))
        faulty.arm(lambda call, ids: ids.numel() > 40, error)
        outputs = run(engine, requests)
        assert faulty.raised > 1
        cut = outputs.pop(3)
        assert bits_of(outputs) == alone("as is")
        assert whole(engine)
        faulty.arm(None)
        assert bits_of([cut]) == bits_of(run(engine, [long]))
        # Control: what fails with a single row as well does end, by name.
        faulty.arm(lambda call, ids: True, error)
        failed = run(engine, [long])[0].completions[0]
        assert failed.error == f"the pass raised {type(error).__name__}: no room"
        assert whole(engine)


def test_a_failure_behind_the_forward_costs_nobody():
    """Those of the pass are tried again; a stream has each token once."""
    failed = []
    prompt, params = asked()[3][0], SamplingParams(max_new_tokens=20)
    with steady(model_of("shape-sensitive"), verify="always", page_size=4) as engine:
        engine.generate([[1]], greedy(1))
        stream = engine.stream([prompt], params)
        tokens = list(next(stream).token_ids)
        ids = [engine.add_request(*request) for request in asked()]
        kernels = engine.core.sampler.kernels

        def fails_once(*args, **kwargs):
            if not failed:
                failed.append(ARMED)
                raise RuntimeError(ARMED)
            return kernels.sample(*args, **kwargs)

        engine.core.sampler.kernels = replace(kernels, sample=fails_once)
        for event in stream:
            tokens += event.token_ids
        check_residents(engine)
        assert tokens == stream.requests[0].sequences[0].tokens[len(prompt) :]
        assert len(tokens) == 20 and failed
        done = drain(engine)
        assert [bits(done[request_id]) for request_id in ids] == alone()
        assert whole(engine)


def test_what_a_failed_pass_holds_is_freed_before_the_next():
    """Its activations, without Python's collector of cycles."""
    alive, seen = [], []

    def forward(*args):
        seen.append(sum(ref() is not None for ref in alive))
        activation = torch.empty(8)
        if len(alive) < 2:
            alive.append(weakref.ref(activation))
            raise torch.OutOfMemoryError(ARMED)
        return inner(*args)

    with steady(model_of("as is")) as engine:
        ids = [engine.add_request(text(6, seed=n), greedy(8)) for n in range(3)]
        engine.step()
        inner, engine.runner.forward = engine.runner.forward, forward
        gc.collect()
        gc.disable()
        try:
            done = drain(engine)
        finally:
            gc.enable()
        assert len(alive) == 2 and len(seen) > 3 and set(seen) == {0}
        assert {done[i].completions[0].finish_reason for i in ids} == {"length"}
