"""Ctrl-C in calls of a patched model: at once while transformers serves, else between steps; the
next call works.
"""

from __future__ import annotations

import _signal

import pytest
import torch
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support import signals
from tests.support.drop_in import PAD, SMALL
from tests.support.tiny import config_of
from tinyspec import interrupts

pytestmark = pytest.mark.usefixtures("sigint")
IDS = torch.tensor([[5, 17, 3]])


@pytest.fixture
def model():
    config = config_of("llama")
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


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


def test_ctrl_c_at_once_while_transformers_runs(model):
    """A call that is not served takes no notice of what is held back for others."""
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
