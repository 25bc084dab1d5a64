"""Calls of ``generate`` that cross: from several threads, within one another, and cut off."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import tinyspec
from tests.support import signals
from tests.support.drop_in import PAD, SMALL, greedy, own, patched, portrait, random_ids
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tests.support.tolerances import LOGITS, close


def threads_run(*jobs) -> list[object]:
    """Results of jobs in threads of their own, errors included."""
    results: list[object] = [None] * len(jobs)

    def run(place, job):
        try:
            results[place] = job()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_two_threads():
    prompts = [random_ids(9 + n, n) for n in range(4)]
    expected = [[greedy(own(), prompt, 20)] * 5 for prompt in prompts]
    with patched(tiny()) as model:

        def several(prompt):
            return [greedy(model, prompt, 20) for _ in range(5)]

        found = threads_run(*(lambda p=prompt: several(p) for prompt in prompts))
    assert found == expected


def test_a_forked_process_is_told():
    """At once, also where another thread holds the model at that moment."""
    with patched(tiny()) as model:
        held, done = threading.Event(), threading.Event()

        def hold():
            with model.generate._changed:
                held.set()
                done.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(PATIENCE)
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: greedy(model, random_ids(4), 2), lambda: tinyspec.unpatch(model)):
                try:
                    call()
                except ValueError as error:
                    told += "forked process" in str(error)
            os._exit(told)
        done.set()
        thread.join(PATIENCE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_thread_whose_call_transformers_serves():
    """Beams run on the model's own attention: not while another thread's call has ours in."""
    prompt = random_ids(9)
    beams = greedy(own(), prompt, 8, num_beams=2)
    with patched(tiny()) as model:
        found = threads_run(
            lambda: [greedy(model, prompt, 8, num_beams=2) for _ in range(10)],
            lambda: [greedy(model, prompt, 40) for _ in range(10)],
        )
    assert found == [[beams] * 10, [greedy(own(), prompt, 40)] * 10]


@pytest.mark.parametrize("hook", ["logits_processor", "stopping_criteria"])
def test_generate_from_within_a_step_says_so(hook):
    """What transformers serves runs there on the model's own modules."""
    prompt, beams = [1, 2, 3], greedy(own(), [1, 2], num_beams=2)

    def called(ids, scores, **_):
        assert greedy(model, [1, 2], num_beams=2) == beams
        return greedy(model, [1, 2])

    with patched(tiny()) as model:
        with pytest.raises(RuntimeError, match="generate was called from within a step"):
            greedy(model, prompt, **{hook: [called]})
        assert greedy(model, prompt) == greedy(own(), prompt)


def test_generate_from_a_streamer():
    """It is called between steps, so another call may run there."""
    found = []

    class Asks:
        def put(self, tokens):
            found.append(greedy(model, [1, 2]))

        def end(self):
            pass

    with patched(tiny()) as model:
        assert greedy(model, [1, 2, 3], streamer=Asks()) == greedy(own(), [1, 2, 3])
    assert len(found) > 3 and all(tokens == greedy(own(), [1, 2]) for tokens in found)


def test_threads_share_passes():
    """A later call's tokens come before the last of a long one, which began first."""
    begun, order = threading.Event(), []

    def tells(ids, scores):
        begun.set()
        return scores

    with patched(tiny()) as model:

        def later():
            begun.wait(PATIENCE)
            order.append(greedy(model, random_ids(9), 8))
            order.append("later")

        thread = threading.Thread(target=later)
        thread.start()
        long = greedy(model, random_ids(5, 1), 150, logits_processor=[tells])
        order.append("first")
        thread.join(PATIENCE)
        most = max(record.running for record in model.generate._engine.records)
    assert order == [greedy(own(), random_ids(9), 8), "later", "first"] and most == 2
    assert long == greedy(own(), random_ids(5, 1), 150)


def test_another_patched_model_within_a_call():
    other = tiny(seed=1)
    prompt = random_ids(9)
    seen = []

    def asks(ids, scores):
        seen.append(greedy(other, ids[0].tolist(), 2))
        return scores

    with patched(tiny()) as model, patched(other):
        assert greedy(model, prompt, logits_processor=[asks]) == greedy(own(), prompt)
    assert len(seen) == 8
    assert seen[0] == greedy(tiny(seed=1), prompt, 2)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ctrl_c_in_a_streamer(at, deterministic):
    class Interrupted:
        puts = 0

        def put(self, tokens):
            self.puts += 1
            if self.puts > at:
                raise KeyboardInterrupt

        def end(self):
            raise AssertionError("the call did not end")

    prompt = random_ids(30)
    with patched(tiny()) as model:
        ids = torch.tensor([prompt])
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model.generate(
                    ids,
                    max_new_tokens=20,
                    streamer=Interrupted(),
                    pad_token_id=PAD,
                    deterministic=deterministic,
                )
            assert model.config._attn_implementation == "sdpa"
            assert torch.equal(model(ids).logits, own()(ids).logits)
        assert greedy(model, prompt, 20) == greedy(own(), prompt, 20)
        assert model.generate._engine.pool.num_held == 0


def test_ctrl_c_in_a_pass(sigint):
    """The signal itself, at a bad moment; the handler before it is restored."""

    def interrupts(ids, scores):
        signals.interrupt()
        return scores

    before = signals.handler()
    prompt = random_ids(9)
    with patched(tiny()) as model:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                greedy(model, prompt, logits_processor=[interrupts])
            assert signals.handler() is before
            assert model.generate._engine.pool.num_held == 0
            assert model.config._attn_implementation == "sdpa"
            assert greedy(model, prompt) == greedy(own(), prompt)


def test_unpatch_from_within_a_call():
    """Refused, or the call goes on; the model is unpatched in the end."""
    model = tiny()
    prompt = random_ids(9)
    before = portrait(model)

    def unpatches(ids, scores):
        tinyspec.unpatch(model)
        return scores

    tinyspec.patch(model, SMALL)
    with pytest.raises(RuntimeError, match="within"):
        greedy(model, prompt, logits_processor=[unpatches])
    assert greedy(model, prompt) == greedy(own(), prompt)
    tinyspec.unpatch(model)
    assert portrait(model) == before
    assert greedy(model, prompt) == greedy(own(), prompt)


def test_unpatch_while_another_thread_generates():
    prompt = random_ids(9)
    expected = greedy(own(), prompt, 40)
    for _ in range(3):
        model = tiny()
        before = portrait(model)
        tinyspec.patch(model, SMALL)
        begun = threading.Event()

        def tells(ids, scores, begun=begun):
            begun.set()
            return scores

        def unpatch(model=model, begun=begun):
            begun.wait(PATIENCE)
            tinyspec.unpatch(model)

        found = threads_run(
            lambda m=model, p=tells: greedy(m, prompt, 40, logits_processor=[p]), unpatch
        )
        assert found == [expected, None]
        assert portrait(model) == before
        assert greedy(model, prompt, 40) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_forward_in_another_thread(family):
    """In the middle of a pass: it says that the model is taken, or has its right logits; the call's
    tokens are right in any case."""
    model = tiny(family)
    prompt, other = random_ids(9), torch.tensor([random_ids(1, 7)])
    found = []

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            found.extend(threads_run(forward))

    def forward():
        with torch.inference_mode():
            return model(other, use_cache=False).logits

    middle = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    with patched(model):
        handle = middle.register_forward_hook(meanwhile)
        tokens = greedy(model, prompt)
        handle.remove()
    assert tokens == greedy(own(family), prompt)
    expected = own(family)(other).logits
    assert len(found) >= 8
    for result in found:
        if isinstance(result, Exception):
            assert isinstance(result, RuntimeError) and "tinyspec" in str(result)
        else:
            assert close(result, expected, LOGITS)


def test_an_interrupt_that_leaves_requests_over(monkeypatch):
    """The error comes out, and the next call works."""

    def interrupted(*_):
        raise KeyboardInterrupt

    prompt = [5, 17, 3]
    with patched(tiny()) as model:
        monkeypatch.setattr("tinyspec.engine.engine.RequestTracker.run_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            greedy(model, prompt)
        monkeypatch.undo()
        assert model.config._attn_implementation != "tinyspec"
        assert greedy(model, prompt) == greedy(own(), prompt)
