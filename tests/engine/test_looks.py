"""Nothing leaves an engine that a look has not found sound: what is computed while the model, or a
setting, changes is neither committed nor kept for others, whatever way out it takes."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch

from tests.support.cases import drain, engine_of, greedy, text
from tests.support.drop_in import SMALL, patched
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.settings import CHANGES, defaults
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, DeterminismError
from tinyspec.runner.model_runner import ModelRunner

CHANGED = "changed while it was running"
PROMPT = text(20, seed=3)
ONE = greedy(1)


def written(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def expected(model=None, params=ONE):
    with engine_of(model or tiny()) as engine:
        (output,) = engine.generate([PROMPT], params)
    return bits(output), output.fingerprint


def once(work):
    """Before the first call of what it wraps."""
    left = [work]

    def around(own, *given, **named):
        while left:
            left.pop()()
        return own(*given, **named)

    return around


def wrap(monkeypatch, place, name, around):
    own = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given, **named: around(own, *given, **named))


class OfTheUsers(torch.nn.Module):
    """Around a norm of the model's: passes may write to its parameters."""

    def __init__(self, inner):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * self.weight


def of_the_users():
    model = tiny()
    model.model.norm = OfTheUsers(model.model.norm)
    return model


@pytest.mark.parametrize("make", [tiny, of_the_users])
def test_weights_written_during_the_pass_that_ends_a_request(make, monkeypatch):
    """It starts again, or ends; and what is refused afterwards is refused by name."""
    model, changed = make(), make()
    written(changed)
    with engine_of(model) as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is
        wrap(monkeypatch, engine.runner, "forward", once(lambda: written(model)))
        output = engine.generate([PROMPT], ONE)[0]
    (completion,) = output.completions
    if make is tiny:
        assert (bits(output), output.fingerprint) == expected(changed)
    else:
        assert completion.finish_reason == "abort" and not completion.token_ids
        assert "is written to" in completion.error
    assert expected(make()) != expected(changed)


def test_a_canonical_forward(monkeypatch):
    model = tiny()
    ids = torch.tensor([PROMPT])
    with patched(model, SMALL, forward=True), torch.no_grad():
        before = model(ids).logits
        with monkeypatch.context() as patches:
            wrap(patches, ModelRunner, "output", once(lambda: written(model)))
            with pytest.raises(DeterminismError, match="changed during a canonical forward"):
                model(ids)
        after = model(ids).logits
        assert torch.equal(after, model(ids).logits) and not torch.equal(before, after)


def test_a_setting_that_moves_keeps_nothing_for_others(monkeypatch):
    """Pages of a canonical pass of plain requests, which deterministic ones may find."""
    _, (value, *_), put = CHANGES["mkldnn precision"]
    alone = expected(params=greedy(4))
    with engine_of(tiny(), verify="padded") as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is
        kept = []
        for canonical in (True, False):
            engine.forget_plain()
            own = engine.core.scheduler.schedule

            def schedule(own=own, canonical=canonical):
                if (found := own()) is not None:
                    found.canonical = canonical
                return found

            with monkeypatch.context() as patches:
                patches.setattr(engine.core.scheduler, "schedule", schedule)
                wrap(patches, engine.runner, "run", once(lambda: put(value)))
                engine.add_request(PROMPT, replace(greedy(4), deterministic=False))
                unsound = engine.tracker._unsound
                engine.step()
                kept.append(engine.tracker._unsound == unsound)
                defaults()
            drain(engine)
        assert kept == [False, True]
        (output,) = engine.generate([PROMPT], greedy(4))
    assert (bits(output), output.fingerprint) == alone


@pytest.mark.parametrize("ends", ["abort", "close"])
def test_tensors_that_count_no_writes_before_an_abort(ends):
    with torch.inference_mode():
        model = tiny()
    with engine_of(model, verify="padded") as engine:
        events = engine.stream([PROMPT], greedy(9))
        next(events)
        with torch.inference_mode():
            model.lm_head.weight.mul_(1.5)
        if ends == "abort":
            engine.step()
            engine.abort(events.requests[0].request_id)
        engine.close()
        (sequence,) = events.requests[0].sequences
    assert sequence.finish_reason == "abort" and CHANGED in sequence.error


class Counting:
    """Forbids the token n at its call n."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        scores[:, self.calls] = -torch.inf
        self.calls += 1
        return scores


def test_processors_that_count(monkeypatch):
    """They have run for what is dropped: their request ends."""
    model = tiny()
    with engine_of(model) as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is
        wrap(monkeypatch, engine.runner, "forward", once(lambda: written(model)))
        params = replace(greedy(4), logits_processors=lambda: [Counting()])
        (completion,) = engine.generate([PROMPT], params)[0].completions
    assert completion.finish_reason == "abort" and not completion.token_ids
    assert "changed while its logits processors ran" in completion.error


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_abort_within_the_pass_that_would_end_a_request(deterministic):
    """By a processor, a pass before its last token: caller and reader are told the same."""
    told = []

    def processor(ids, scores):
        if ids.shape[1] == len(PROMPT) + 3:
            told.append(engine.abort(events.requests[0].request_id))
        return scores

    with engine_of(tiny(), verify="padded") as engine:
        params = replace(greedy(4), deterministic=deterministic, logits_processors=(processor,))
        events = engine.stream([PROMPT], params)
        *_, last = seen = list(events)
    (completion,) = told[0].completions
    assert [token for event in seen for token in event.token_ids] == completion.token_ids
    assert (last.finish_reason, last.error) == (completion.finish_reason, completion.error)
    assert len(completion.token_ids) == 3 and completion.finish_reason == "abort"


def test_a_plain_request_whose_processor_says_each_time_that_weights_changed():
    """It gets its tokens, and deterministic ones beside it end saying so."""

    def processor(ids, scores):
        engine.weights_changed()
        return scores

    with engine_of(tiny()) as engine:
        plain = replace(greedy(4), deterministic=False, logits_processors=(processor,))
        first, second = engine.generate([PROMPT, PROMPT], [plain, greedy(4)])
    assert len(first.completions[0].token_ids) == 4
    (completion,) = second.completions
    assert completion.finish_reason == "length" or "changed" in completion.error


def test_a_signal_handler_that_would_wait_for_its_own_thread():
    """While the main thread waits for its turn: it is told, and the turn comes."""
    told, begun = [], Event()

    def handler(*_):
        try:
            engine.fingerprint  # noqa: B018
        except RuntimeError as error:
            told.append(str(error))

    def hold():
        with engine.driver.turn("test"):
            begun.set()
            while not engine.driver._line:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGUSR1)
            while not told:
                time.sleep(0.001)

    before, main = (signal.signal(signal.SIGUSR1, handler), threading.main_thread().ident)
    try:
        with engine_of(tiny()) as engine:
            thread = Thread(target=hold, daemon=True)
            thread.start()
            begun.wait(PATIENCE)
            assert engine.generate([PROMPT], ONE)[0].completions[0].token_ids
            thread.join(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told and "signal handler" in told[0]


def test_a_stream_that_another_thread_closes():
    """Its reader gets no more, at whatever moment."""
    with engine_of(tiny()) as engine, ThreadPoolExecutor(1) as pool:
        for n in range(20):
            events = engine.stream([PROMPT, PROMPT], greedy(40))
            next(events)
            reads = pool.submit(list, events)
            time.sleep(n / 4000)
            events.close()
            assert isinstance(reads.result(PATIENCE), list)
        assert not engine.has_unfinished()


def test_a_model_that_changes_in_every_pass(monkeypatch):
    """A deterministic request that cannot begin ends; plain ones beside it go on."""
    model = tiny()
    monkeypatch.setattr("tinyspec.engine.request_tracker.MOST_UNSOUND", 5)
    with engine_of(model) as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is

        def write():
            with torch.no_grad():
                model.lm_head.weight.mul_(1.0)

        wrap(monkeypatch, engine.runner, "forward", lambda own, *a, **k: (write(), own(*a, **k))[1])
        params = [replace(greedy(4), deterministic=False), greedy(4)]
        plain, exact = (o.completions[0] for o in engine.generate([PROMPT, PROMPT], params))
    assert plain.finish_reason == "length"
    assert exact.error == "the model changed in each of 5 passes" and not exact.token_ids


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_hook_that_moves_a_setting_and_raises(deterministic, monkeypatch):
    """Its request ends with what it raised, or with what it moved; the engine goes on."""
    model, bad = tiny(), []
    monkeypatch.setattr("tinyspec.engine.request_tracker.MOST_UNSOUND", 5)

    def hook(module, args):
        if bad:
            torch._C._set_mkldnn_enabled(False)
            raise ValueError("of the hook")

    model.lm_head.register_forward_pre_hook(hook)
    with engine_of(model) as engine:
        params = replace(greedy(4), deterministic=deterministic)
        before = bits(engine.generate([PROMPT], params)[0])
        bad.append(True)
        (completion,) = engine.generate([PROMPT], params)[0].completions
        bad.clear()
        assert completion.finish_reason == "abort"
        told = "torch's mkldnn changed in each of 5" if deterministic else "of the hook"
        assert told in completion.error
        assert bits(engine.generate([PROMPT], params)[0]) == before
    torch._C._set_mkldnn_enabled(True)


def test_a_post_that_cannot_be_done_is_nobodys_error():
    """Weights that nobody serves: calls say so, also an AsyncEngine's; and it goes on."""
    model = tiny()
    own = model.lm_head.weight

    async def main():
        async with AsyncEngine(engine) as served:
            model.lm_head.weight = torch.nn.Parameter(own.detach().to_sparse())
            engine.weights_changed()
            with pytest.raises(NotImplementedError, match="storage"):
                await served.generate([PROMPT], ONE)
            model.lm_head.weight = own
            (output,) = await served.generate([PROMPT], ONE)
            return bits(output), output.fingerprint

    with engine_of(model) as engine:
        found = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert found == expected()
