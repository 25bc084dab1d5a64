"""Nothing is lost: a pass that raises, a drafter that fails, values that are not finite. Who causes
it fails alone and says why; without the cause nobody fails.
"""

import gc
import random
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.support.cases import bits_of, drain, greedy, model_of, run, steady, text, whole
from tests.support.mixes import bits, crowd, plain
from tests.support.pages import check_residents
from tests.support.tiny import VOCAB, tiny
from tinyspec import SamplingParams

ARMED = "out of order"
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


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


def test_drafts_that_make_a_pass_raise_cost_no_request():
    (model, faulty), bad = faulty_model(), unused()
    drafter = Drafts([], {})
    drafter.follow = lambda sequence, n: [bad]
    with steady(model, drafter=drafter) as engine:
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


# Drafters that fail, and values that are not finite


def poisoned(token):
    """A model in which the embedding of one token is NaN."""

    def poison(_, args, out):
        return out + torch.where(args[0] == token, torch.nan, 0.0)[..., None]

    model = tiny()
    model.get_input_embeddings().register_forward_hook(poison)
    return model


def unused_token():
    """A token that neither the needle nor its continuation holds."""
    with steady(tiny()) as engine:
        output = engine.generate([[5, 9, 11]], DETERMINISTIC)[0]
    held = {5, 9, 11, *output.completions[0].token_ids}
    return next(t for t in range(VOCAB) if t not in held), bits(output)


def test_a_request_that_is_not_finite_fails_alone():
    """It has the first page, with which shorter rows of the page table are filled up."""
    token, expected = unused_token()
    with steady(poisoned(token), page_size=16) as engine:
        mixed = [[token] * 100, [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert "finite" in outputs[0].completions[0].error
        assert bits(outputs[1]) == expected
        assert whole(engine)
        # The pages that held NaN are clean again.
        assert bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0]) == expected


class Drafts:
    """Drafts the right tokens, but ``odd[token](n)`` for sequences that begin with such a token."""

    def __init__(self, truths, odd):
        self.truths, self.odd = truths, odd

    def propose(self, sequences, n):
        return [self.follow(list(sequence), n) for sequence in sequences]

    def follow(self, sequence, n):
        if sequence[0] in self.odd:
            return self.odd[sequence[0]](n)
        found = [t[len(sequence) :][:n] for t in self.truths if t[: len(sequence)] == sequence]
        return found[0] if found else []


def raises(n):
    raise LookupError("no idea")


def test_a_drafter_that_fails_for_some_sequences():
    """These abort and say why, plain ones too; the others have their drafts, and their bits."""
    model = model_of("shape-sensitive")
    truths = [p + r[0][0] for (p, _), r in zip(asked(), alone(), strict=True)]
    drafter = Drafts(truths, {7: raises, 8: lambda n: ["a"]})
    odd = [([token, 7, 7], params) for token in (7, 8) for params in (greedy(9), SamplingParams())]
    with steady(model, drafter=drafter, page_size=8) as engine:
        outputs = run(engine, [*asked(), *odd, ([9, 2], SamplingParams())])
        assert bits_of(outputs[:6]) == alone()
        assert outputs.pop().completions[0].finish_reason == "length"
        told = ["LookupError: no idea"] * 2 + ["TypeError"] * 2
        for output, said in zip(outputs[6:], told, strict=True):
            (failed,) = output.completions
            assert failed.finish_reason == "abort"
            assert "the drafter raised" in failed.error and said in failed.error
        assert sum(o.completions[0].stats.accepted for o in outputs[:6]) > 20
        assert whole(engine)


def test_drafts_that_are_no_tokens_are_left_out():
    """And no more than the window are taken at a time."""
    model, odd = model_of("shape-sensitive"), {7: lambda n: [VOCAB] * n, 8: lambda n: [5] * 100}
    wanted = [([token] * 3, greedy(9)) for token in odd]
    with steady(model) as engine:
        expected = bits_of(run(engine, wanted))
    with steady(model, drafter=Drafts([], odd), draft_window=6) as engine:
        assert bits_of(run(engine, wanted)) == expected
        drafted = [record.drafted for record in engine.records]
    assert 0 < max(drafted) <= 6


@pytest.mark.parametrize("place", [0, 4])
def test_a_poisonous_draft_beside_good_ones(place):
    """In its own proposal and in the others': what was right before it is still accepted."""
    token, expected = unused_token()
    own = expected[0][0]
    drafter = Drafts([], {})
    drafter.follow = lambda sequence, n: (
        [*own[len(sequence) - 3 :][:place], token] if sequence[0] == 5 else [1, 2, 3]
    )
    with steady(poisoned(token), drafter=drafter) as engine:
        mixed = [[5, 9, 11], text(20, seed=1), [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert bits(outputs[0]) == bits(outputs[2]) == expected
        assert all(o.completions[0].error is None for o in outputs)
        accepted = outputs[0].completions[0].stats.accepted
        assert accepted > 0 if place else accepted == 0
        assert whole(engine)
