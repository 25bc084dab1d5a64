"""What a step sets while it runs, once for many steps: the ambient state and Ctrl-C, which in calls
of a patched model takes effect at once while transformers serves."""

import _signal
from threading import Event, Thread

import pytest
import torch

import tinyspec
from tests.support import signals
from tests.support.drop_in import PAD, SMALL
from tests.support.patience import PATIENCE
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, SamplingParams, interrupts
from tinyspec.model.torch_state import TorchState

pytestmark = pytest.mark.usefixtures("sigint")
MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture
def medium():
    """A precision of the user's that changes bits."""
    before, MATMUL.fp32_precision = MATMUL.fp32_precision, "bf16"
    yield
    MATMUL.fp32_precision = before


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


IDS = torch.tensor([[5, 17, 3]])


def generated(model, **asked):
    return model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=PAD, **asked)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """It could not be put back."""
    monkeypatch.setattr(_signal, "getsignal", lambda number: None)
    set_to = []
    monkeypatch.setattr(_signal, "signal", lambda *args: set_to.append(args))
    with interrupts.between_steps(), interrupts.at_once():
        pass
    assert set_to == []


def test_ctrl_c_at_once_while_transformers_runs():
    """A call that is not served takes no notice of what is held back for others."""
    model = tiny()
    expected = generated(model)
    tinyspec.patch(model, SMALL)

    def interrupts_itself(*_):
        signals.interrupt()
        raise AssertionError("went on")

    handle = model.lm_head.register_forward_pre_hook(interrupts_itself)
    with pytest.raises(KeyboardInterrupt):
        generated(model, num_beams=2)
    handle.remove()
    assert torch.equal(generated(model), expected)
