"""The ``hidden_states`` of returned dicts: transformers' own, up to rounding."""

import pytest
import torch

from tests.drop_in.test_returned_cache import NEW, ROWS, STOPS, WIDTH, ended, generate, padded
from tests.support import zoo
from tests.support.budget import first
from tests.support.drop_in import patched
from tinyspec import EngineConfig
from tinyspec.model.supported import SERVED
from tinyspec.runner.model_runner import ModelRunner

FIRST = ("llama", "gemma3_text", "gpt2", "mixtral")
ORDER = sorted(SERVED, key=lambda kind: (kind not in FIRST, kind))
# Four streams in every layer.
OF_ANOTHER_FORM = ("gemma3n_text",)
MASK = padded()["attention_mask"] != 0


def differences(found, expected, mask=MASK):
    """The largest of each step and layer, relative to the layer's values, pads left out."""
    assert type(found) is tuple and len(found) == len(expected)
    worst = []
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert type(mine) is tuple and len(mine) == len(theirs)
        for of_layer, own in zip(mine, theirs, strict=True):
            assert of_layer.shape == own.shape and of_layer.dtype == own.dtype
            real = mask[..., None] if step == 0 else torch.ones(1, dtype=torch.bool)
            difference = (of_layer - own).masked_fill(~real, 0).abs().max()
            worst.append(float(difference / own.abs().max()))
    return max(worst)


def asked(model, given=None, **settings):
    return generate(model, given or padded(), output_hidden_states=True, **settings)


@pytest.mark.parametrize("kind", first(len(FIRST), ORDER, 1.5))
def test_hidden_states_of_every_family(kind):
    model = zoo.tiny(kind)
    given, mask = (padded(), MASK) if kind in FIRST else (padded(ROWS[1:2]), MASK[1:2])
    own = asked(model, given)
    with patched(model):
        served = asked(model, given)
        assert (model.generate.stats().committed > 0) == (kind not in OF_ANOTHER_FORM)
    assert torch.equal(own.sequences, served.sequences)
    assert differences(served.hidden_states, own.hidden_states, mask) < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(page_size=8, max_rows=32, reference_rows=8, verify="always", drafter="ngram"),
        EngineConfig(page_size=8, num_pages=15, max_rows=16, reference_rows=8),
        EngineConfig(page_size=8, overlap=True),
    ],
    ids=["verified", "preempted", "overlap"],
)
def test_whatever_passes_a_token_ran_in(config):
    """Chunks of prompts, drafts that were rejected, preemption: what counts is the last pass."""
    model = zoo.tiny("llama")
    own = asked(model, max_new_tokens=24)
    with patched(model, config):
        for settings in ({}, {"deterministic": True}):
            served = asked(model, max_new_tokens=24, **settings)
            assert torch.equal(own.sequences, served.sequences)
            assert differences(served.hidden_states, own.hidden_states) < 1e-4
            if config.num_pages:
                assert model.generate.stats().preemptions > 0
            if config.verify == "always" and settings:
                assert model.generate.stats().rolled_back > 0


def test_rows_end_and_have_several_completions():
    """Pads and what follows a row's end are zeros; a prompt in the prefix cache is run again."""
    model = zoo.tiny("llama")
    with patched(model):
        generate(model, padded())
        out = asked(model, num_return_sequences=2, do_sample=True, seed=3, eos_token_id=STOPS)
        states = out.hidden_states
        assert len(states) == out.sequences.shape[1] - WIDTH
        prompt = (states[0][1].abs().sum(-1) > 0).tolist()
        assert prompt == MASK.repeat_interleave(2, 0).tolist()
        for n, row in enumerate(out.sequences[:, WIDTH:].tolist()):
            later = [bool(step[1][n].abs().sum() > 0) for step in states[1:]]
            assert later == [step < ended(row) for step in range(1, len(states))]
        alone = asked(model, {"input_ids": torch.tensor(ROWS[:1])})
        crowd = states[0][2][1, -len(ROWS[0]) :]
        assert torch.allclose(alone.hidden_states[0][2][0], crowd, rtol=0, atol=1e-4)


def bits(out, start):
    """Of the first row's tokens."""
    first = [layer[0, start:] for layer in out.hidden_states[0]]
    return [*first, *(layer[0] for step in out.hidden_states[1:] for layer in step)]


def test_deterministic_rows_have_the_same_bits_alone_and_in_a_batch():
    model = zoo.tiny("llama")
    with patched(model):
        crowd = asked(model, deterministic=True)
        alone = asked(model, {"input_ids": torch.tensor(ROWS[:1])}, deterministic=True)
        plain = asked(model)
    start = WIDTH - len(ROWS[0])
    assert all(map(torch.equal, bits(crowd, start), bits(alone, 0)))
    # The control: bits of other passes differ somewhere.
    assert not all(map(torch.equal, bits(plain, start), bits(alone, 0)))


def test_only_rows_that_ask_keep_them(monkeypatch):
    passes = []
    ask = ModelRunner.ask_for_hidden
    monkeypatch.setattr(ModelRunner, "ask_for_hidden", lambda self: passes.append(1) or ask(self))
    model = zoo.tiny("llama")
    with patched(model):
        generate(model, padded())
        assert not passes
        assert len(asked(model).hidden_states) == NEW and len(passes) >= NEW
        count = len(passes)
        generate(model, padded())
        assert len(passes) == count


def test_a_model_that_shows_other_states_is_its_own_affair(caplog):
    """Its last one doubled, as another layer's would be: transformers' own ``generate`` answers."""
    model = zoo.tiny("llama")
    own = asked(model)
    with patched(model):
        inner = ModelRunner.forward

        def other(self, *args):
            logits = inner(self, *args)
            self.hidden = self.hidden * 2
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "forward", other)
            for _ in range(2):
                assert differences(asked(model).hidden_states, own.hidden_states) == 0
        with pytest.raises(NotImplementedError, match="output_hidden_states"):
            asked(model, deterministic=True)
    assert "output_hidden_states of this model" in caplog.text
