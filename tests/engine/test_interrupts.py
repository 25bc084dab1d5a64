"""What a step sets while it runs, once for many steps: the ambient state and Ctrl-C."""

from contextlib import suppress
from threading import Event, Thread

import pytest
import torch

from tests.support import signals
from tests.support.patience import PATIENCE
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, SamplingParams
from tinyspec.engine.interrupts import between_steps, deferred_interrupt
from tinyspec.model.torch_state import TorchState

pytestmark = pytest.mark.usefixtures("sigint")
MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture
def medium():
    """A precision of the user's that changes bits."""
    before, MATMUL.fp32_precision = MATMUL.fp32_precision, "bf16"
    yield
    MATMUL.fp32_precision = before


def test_one_ambient_state_within_another(medium):
    torch_state = TorchState(torch.device("cpu"))
    with torch_state():
        for _ in range(3):
            with torch_state():
                assert torch.is_inference_mode_enabled()
                assert MATMUL.fp32_precision == "ieee"
            # What a processor or a criterion may do in the middle of a call.
            MATMUL.fp32_precision = "bf16"
    assert not torch.is_inference_mode_enabled()
    assert MATMUL.fp32_precision == "bf16"


def test_a_call_sets_its_state_again_where_the_users_code_has_run(medium):
    """Before each pass of a request with a processor."""
    model, seen = tiny(), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(MATMUL.fp32_precision))

    def processor(ids, scores):
        MATMUL.fp32_precision = "bf16"
        return scores

    with Engine(model) as engine:
        seen.clear()
        asked = SamplingParams(max_new_tokens=8, ignore_eos=True, logits_processors=[processor])
        engine.generate([prompts(1)[0]], asked)
    assert len(seen) >= 8 and set(seen) == {"ieee"}


def test_a_call_that_ends_leaves_the_settings_of_others_alone(medium):
    """Settings of the process, and calls in two threads: the last one gives them back."""
    entered, ended = Event(), Event()

    def other():
        with TorchState(torch.device("cpu"))():
            entered.set()
            ended.wait(PATIENCE)

    thread = Thread(target=other)
    with TorchState(torch.device("cpu"))():
        thread.start()
        assert entered.wait(PATIENCE) and MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "ieee", "the other's still"
    ended.set()
    thread.join()
    assert MATMUL.fp32_precision == "bf16"


def test_interrupts_come_between_steps():
    order = []
    with pytest.raises(KeyboardInterrupt), between_steps():
        for step in range(3):
            with deferred_interrupt():
                order.append(("begun", step))
                if step == 1:
                    signals.interrupt()
                order.append(("ended", step))
    assert order == [("begun", 0), ("ended", 0), ("begun", 1), ("ended", 1)]
    assert signals.handler() is signals.RAISE


def test_what_comes_before_the_first_step_leaves_nothing_behind(monkeypatch):
    """The handler of before may raise while ours takes its place."""
    signals.interrupt_when_set(monkeypatch)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        raise AssertionError("not entered")
    test_interrupts_come_between_steps()


def test_a_step_within_a_step_lets_the_outer_one_end():
    ended = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        with deferred_interrupt():
            signals.interrupt()
        ended.append("inner")
        with between_steps(), deferred_interrupt():
            pass
        ended.append("outer")
    assert ended == ["inner", "outer"]
    assert signals.handler() is signals.RAISE


def test_a_handler_that_returns_is_called_every_time():
    calls = []
    with signals.handled_by(lambda number, frame: calls.append(number)), between_steps():
        for _ in range(3):
            with deferred_interrupt():
                signals.interrupt()
        signals.interrupt()
        with suppress(ValueError), deferred_interrupt():
            raise ValueError
    assert calls == [signals.SIGINT] * 4


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_stopped_between_two_of_its_steps(streamed):
    """By a criterion that stands for the user, in the middle of a step."""

    def interrupt(ids, scores):
        if ids.shape[1] == 8:
            signals.interrupt()
        return False

    params = SamplingParams(max_new_tokens=10, stopping_criteria=[interrupt])
    with Engine(tiny()) as engine:
        expected = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=10))[0]
        with pytest.raises(KeyboardInterrupt):
            if streamed:
                list(engine.stream([[1, 2, 3]], params))
            else:
                engine.generate([[1, 2, 3]], params)
        assert sum(engine.stats().passes.values()) == 15, "ten, and as many as there were tokens"
        assert not engine.has_unfinished() and not torch.is_inference_mode_enabled()
        again = engine.generate([[1, 2, 3], *prompts(1)], SamplingParams(max_new_tokens=10))[0]
        assert again.completions[0].token_ids == expected.completions[0].token_ids
