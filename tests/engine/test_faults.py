"""Nothing is lost: aborts, Ctrl-C, functions that raise and values that are not finite.

tests/engine/test_failed_passes.py has the passes that raise.
"""

import pytest
import torch

from tests.support import signals
from tests.support.cases import (
    bits_of,
    engine_of,
    greedy,
    model_of,
    one_by_one,
    run,
    steady,
    text,
    whole,
)
from tests.support.mixes import bits
from tests.support.tiny import VOCAB, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


def test_interrupt_leaves_a_usable_engine(sigint):
    """Ctrl-C at any moment of a long generate: in its preparation, its prompts, its decoding."""
    with engine_of(tiny()) as engine:
        expected = bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0])
        for call in (1, 700, 3000, 11_000):
            with pytest.raises(KeyboardInterrupt), signals.interrupt_at_call(call):
                engine.generate(prompts(20), SamplingParams(max_new_tokens=200))
            assert not engine.has_unfinished()
            assert whole(engine)
            assert bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0]) == expected


def given_up(engine, request_id):
    engine.abort(request_id)


def on_new_weights(engine, request_id):
    with torch.no_grad():
        engine.model.lm_head.weight[7, 0] += 1


@pytest.mark.parametrize("end", [given_up, on_new_weights])
def test_a_stream_says_that_it_was_cut_short(end):
    """Its last event carries finish_reason, whatever ended the request."""
    with engine_of(tiny()) as engine:
        stream = engine.stream(prompts(4)[3:], DETERMINISTIC)
        events = [next(stream)]
        end(engine, events[0].request_id)
        events += stream
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == "abort"
        assert all(len(event.logprobs) == len(event.token_ids) for event in events)
        assert not engine.has_unfinished() and whole(engine)


def poisoned(token):
    """A model in which the embedding of one token is NaN."""

    def poison(_, args, out):
        return out + torch.where(args[0] == token, torch.nan, 0.0)[..., None]

    model = tiny()
    model.get_input_embeddings().register_forward_hook(poison)
    return model


def unused_token():
    """A token that neither the needle nor its continuation holds."""
    with engine_of(tiny()) as engine:
        output = engine.generate([[5, 9, 11]], DETERMINISTIC)[0]
    held = {5, 9, 11, *output.completions[0].token_ids}
    return next(t for t in range(VOCAB) if t not in held), bits(output)


def test_a_request_that_is_not_finite_fails_alone():
    """It has the first page, with which shorter rows of the page table are filled up."""
    token, _ = unused_token()
    config = EngineConfig(page_size=16, reference_rows=16)
    with Engine(tiny(), config=config) as engine:
        expected = bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0])
    with Engine(poisoned(token), config=config) as engine:
        mixed = [[token] * 100, [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert "finite" in outputs[0].completions[0].error
        assert bits(outputs[1]) == expected
        assert whole(engine)
        # The pages that held NaN are clean again.
        assert bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0]) == expected


def four():
    """Deterministic requests that share the passes of requests that fail."""
    styles = ({}, {"temperature": 0.8, "seed": 1}, {"num_return_sequences": 2}, {})
    return [(text(9 + 6 * n, seed=n), greedy(12, **style)) for n, style in enumerate(styles)]


def alone(model):
    with steady(model, prefix_cache=False) as engine:
        return one_by_one(engine, four())


class Drafts:
    """Drafts the right tokens, but ``odd`` for sequences that begin with token 7."""

    def __init__(self, truths, odd):
        self.truths, self.odd, self.asked = truths, odd, 0

    def propose(self, sequences, n):
        self.asked += 1
        return [self.follow(list(sequence), n) for sequence in sequences]

    def follow(self, sequence, n):
        if sequence[0] == 7:
            return self.odd(n)
        found = [t[len(sequence) :][:n] for t in self.truths if t[: len(sequence)] == sequence]
        return found[0] if found else []


def raises(n):
    raise LookupError("no idea")


ODD = {
    "raises": (raises, "LookupError: no idea"),
    "no tokens": (lambda n: ["a"], "TypeError"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_drafter_that_fails_for_one_sequence(name):
    """That one aborts and says why; the others have their drafts, and their bits."""
    odd, said = ODD[name]
    model = model_of("shape-sensitive")
    expected = alone(model)
    truths = [p + r[0][0] for (p, _), r in zip(four(), expected, strict=True)]
    drafter = Drafts(truths, odd)
    with steady(model, drafter=drafter, page_size=8) as engine:
        plain = [(first, SamplingParams()) for first in ([8, 2], [7, 2])]
        outputs = run(engine, [*four(), ([7, 7, 7], greedy(9)), *plain])
        assert bits_of(outputs[:4]) == expected
        failed = outputs[4].completions[0]
        assert failed.finish_reason == "abort"
        assert "the drafter raised" in failed.error and said in failed.error
        reasons = [output.completions[0].finish_reason for output in outputs[5:]]
        assert reasons == ["length", "abort"]  # plain ones are drafted for as well
        assert sum(o.completions[0].stats.accepted for o in outputs[:4]) > 20
        assert whole(engine)
    # Control: without it, nobody fails.
    with steady(model, drafter=Drafts(truths, lambda n: []), page_size=8) as engine:
        outputs = run(engine, [*four(), ([7, 7, 7], greedy(9))])
        assert bits_of(outputs[:4]) == expected
        assert outputs[4].completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    "odd",
    [lambda n: [VOCAB] * n, lambda n: [5] * 100],
    ids=["over", "many"],
)
def test_drafts_that_are_no_tokens_are_left_out(odd):
    model = model_of("shape-sensitive")
    with steady(model) as engine:
        expected = bits(engine.generate([[7, 7, 7]], greedy(9))[0])
    with steady(model, drafter=Drafts([], odd), draft_window=6) as engine:
        output = engine.generate([[7, 7, 7]], greedy(9))[0]
        assert bits(output) == expected
        # No more than the window at a time, and nothing that is no token.
        drafted = [record.drafted for record in engine.records]
    assert 0 < max(drafted) <= 6


@pytest.mark.parametrize("place", [0, 4])
def test_a_poisonous_draft_beside_good_ones(place):
    """In its own proposal and in the others': what was right before it is still accepted."""
    token, expected = unused_token()
    own = expected[0][0]
    truths = [[5, 9, 11, *own]]
    drafter = Drafts(truths, None)
    drafter.follow = lambda sequence, n: (
        [*own[len(sequence) - 3 :][:place], token] if sequence[0] == 5 else [1, 2, 3]
    )
    with engine_of(poisoned(token), drafter=drafter) as engine:
        mixed = [[5, 9, 11], text(20, seed=1), [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert bits(outputs[0]) == bits(outputs[2]) == expected
        assert all(o.completions[0].error is None for o in outputs)
        accepted = outputs[0].completions[0].stats.accepted
        assert accepted > 0 if place else accepted == 0
        assert whole(engine)


def test_a_pool_for_one_at_a_time():
    """The largest request takes all pages; the others wait or give way, and all are served."""
    model = model_of("shape-sensitive")
    expected = alone(model)
    with steady(model, page_size=8, num_pages=5) as engine:
        outputs = run(engine, four() * 3)
        assert bits_of(outputs) == expected * 3
        assert engine.stats().preemptions > 0
        assert whole(engine)
        too_long = greedy(14, num_return_sequences=3)
        with pytest.raises(ValueError, match="need 6 pages of 8 tokens, and there are 5"):
            run(engine, [*four(), (text(27, seed=1), too_long)])
        assert not engine.has_unfinished()
        # Control: one token less fits.
        outputs = run(engine, [*four(), (text(27, seed=1), greedy(13))])
        assert {o.completions[0].finish_reason for o in outputs} == {"length"}
