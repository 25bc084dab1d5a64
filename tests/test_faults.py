"""Nothing is lost: aborts, Ctrl-C, failed passes and values that are not finite."""

import os
import random
import signal
import threading

import pytest
import torch

from tests.support.mixes import bits, crowd
from tests.support.tiny import VOCAB, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


def whole(engine):
    """No page is held, and the pool's free list is complete."""
    pool = engine._pool
    return pool.num_held == 0 and sorted([*pool._free, *pool._idle]) == list(range(pool.num_pages))


def test_no_page_is_lost_over_a_thousand_requests():
    rng = random.Random(0)
    model = tiny()
    done = aborted = 0
    with Engine(model, config=EngineConfig(page_size=16, num_pages=60, max_sequences=24)) as engine:
        for prompt, params in crowd(rng, 1000):
            short = SamplingParams(
                max_new_tokens=rng.randint(1, 6),
                deterministic=params.deterministic,
                num_return_sequences=params.num_return_sequences,
            )
            engine.add_request(prompt[:40], short)
            if rng.random() < 0.2:
                output = engine.abort(rng.choice(sorted(engine._desk.requests)))
                assert "abort" in {c.finish_reason for c in output.completions}
                aborted += 1
            if len(engine._desk.requests) > 30:
                done += len(engine.step())
        while engine.has_unfinished():
            done += len(engine.step())
        assert done + aborted == 1000
        assert aborted > 100
        assert whole(engine)


def test_control_a_lost_page_is_seen():
    with Engine(tiny()) as engine:
        engine._pool.grow([], 1)
        assert not whole(engine)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_leaves_a_usable_engine(sigint):
    """Ctrl-C from outside, at any moment of a long generate."""
    with Engine(tiny()) as engine:
        expected = bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0])
        for delay in (0.05, 0.11, 0.2, 0.31):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                for _ in range(1000):
                    engine.generate(prompts(20), SamplingParams(max_new_tokens=200))
            timer.join()
            assert not engine.has_unfinished()
            assert whole(engine)
            assert bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0]) == expected


def test_closing_a_stream_aborts_its_requests():
    with Engine(tiny()) as engine:
        stream = engine.stream(prompts(4), SamplingParams(max_new_tokens=50))
        next(stream)
        assert engine.has_unfinished()
        stream.close()
        assert not engine.has_unfinished()
        assert whole(engine)


class Failing(torch.nn.Module):
    """Wraps an MLP; raises at one call."""

    def __init__(self, inner, at):
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of order")
        return self.inner(x)


def test_a_failed_pass_leaves_a_usable_engine():
    model = tiny()
    with Engine(model) as engine:
        expected = bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0])
        kept = engine.add_request(prompts(4)[3], DETERMINISTIC)
        model.model.layers[1].mlp = Failing(model.model.layers[1].mlp, at=5)
        with pytest.raises(RuntimeError, match="out of order"):
            engine.generate(prompts(4), SamplingParams(max_new_tokens=30))
        done = {}
        while engine.has_unfinished():
            done |= {output.request_id: output for output in engine.step()}
        assert bits(done[kept]) == expected
        assert whole(engine)


class Poison(torch.nn.Module):
    """Wraps an embedding; one token's row is NaN."""

    def __init__(self, inner, token):
        super().__init__()
        self.inner, self.token = inner, token
        self.weight = inner.weight
        self.num_embeddings = inner.num_embeddings

    def forward(self, ids):
        bad = torch.where(ids == self.token, torch.nan, 0.0)
        return self.inner(ids) + bad[..., None]


class Proposes:
    """Always drafts the same tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, sequences, n):
        return [self.tokens[:n] for _ in sequences]


def poisoned(token):
    model = tiny()
    model.model.embed_tokens = Poison(model.model.embed_tokens, token)
    return model


def unused_token():
    """A token that neither the needle nor its continuation holds."""
    with Engine(tiny()) as engine:
        output = engine.generate([[5, 9, 11]], DETERMINISTIC)[0]
    held = {5, 9, 11, *output.completions[0].token_ids}
    return next(t for t in range(VOCAB) if t not in held), bits(output)


def test_a_request_that_is_not_finite_fails_alone():
    token, expected = unused_token()
    with Engine(poisoned(token)) as engine:
        mixed = [[5, 9, 11], [7, token, 3], [5, 9, 11]]
        params = [DETERMINISTIC, SamplingParams(max_new_tokens=5), DETERMINISTIC]
        outputs = engine.generate(mixed, params)
        assert outputs[1].completions[0].finish_reason == "abort"
        assert "finite" in outputs[1].completions[0].error
        assert bits(outputs[0]) == bits(outputs[2]) == expected
        assert whole(engine)
        # The pages that held NaN are clean again.
        assert bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0]) == expected


def test_a_poisonous_draft_is_survived():
    """A draft whose values are NaN spoils its tile; the verify runs again without drafts."""
    token, expected = unused_token()
    config = EngineConfig(drafter=Proposes([token] * 5))
    with Engine(poisoned(token), config=config) as engine:
        output = engine.generate([[5, 9, 11]], DETERMINISTIC)[0]
    assert output.completions[0].error is None
    assert bits(output) == expected


def test_release_and_weights():
    """The pool can be given back between calls; weights that change give a new fingerprint."""
    model = tiny()
    with Engine(model) as engine:
        first = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
        engine.release()
        assert engine._runner._cache is None
        again = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
        assert bits(again) == bits(first)
        assert again.fingerprint == first.fingerprint
        with torch.no_grad():
            model.lm_head.weight[7, 0] += 1
        changed = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
        assert changed.fingerprint != first.fingerprint
        model.lm_head.weight.data[7, 0] -= 1
        engine.weights_changed()
        assert engine.generate([[1, 2, 3]], DETERMINISTIC)[0].fingerprint == first.fingerprint


@pytest.mark.parametrize("page_size", [8, 128])
def test_pages_held_are_what_sequences_need(page_size):
    """Never more than every sequence's own tokens and drafts need, plus one page each."""
    rng = random.Random(4)
    with Engine(tiny(), config=EngineConfig(page_size=page_size)) as engine:
        for prompt, params in crowd(rng, 30):
            engine.add_request(prompt, params)
        most = 0
        while engine.has_unfinished():
            engine.step()
            running = engine._scheduler.running
            need = sum(engine._pool.pages_for(len(s.tokens) + len(s.drafts)) for s in running)
            assert engine._pool.num_held <= need + len(running)
            most = max(most, engine._pool.num_held)
        assert most > 20
