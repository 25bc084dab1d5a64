"""Patching leaves the model as it is and unpatching leaves no trace; calls of ``generate`` cross:
from several threads, within one another, and cut off."""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import tinyspec
from tests.support.drop_in import PAD, SMALL, greedy, own, patched, portrait, random_ids
from tests.support.patience import PATIENCE
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine

PROMPT = random_ids(11)
IDS = torch.tensor([PROMPT])


def busy(family: str = "llama"):
    """A model with something of everything that could get lost."""
    model = tiny(family).train()
    model.get_input_embeddings().eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    norm = [m for m in model.modules() if "Norm" in type(m).__name__][-1]
    norm.register_forward_hook(lambda *_: None)
    norm.register_forward_pre_hook(lambda *_: None)
    norm.register_full_backward_hook(lambda *_: None)
    model.generation_config.max_new_tokens = 5
    model.generation_config.pad_token_id = PAD
    model.note = {"a": 1}
    return model


ADDED = {".generate", ".generate_batch"}


def outside(model):
    """The portrait of a model, but for what is on it while it is patched."""
    return {k: v for k, v in portrait(model).items() if k not in ADDED}


def raises(ids, scores, **_):
    raise KeyError("raised")


# Calls that end in errors at all places where a call can.
FAILING = (
    {"temperature": -1.0, "do_sample": True},
    {"no_such": 1},
    {"seed": 1, "num_beams": 2},
    {"logits_processor": [raises]},
    {"stopping_criteria": [raises]},
    {"deterministic": True, "max_time": 1.0},
    {"max_new_tokens": 10_000, "seed": 1, "do_sample": True},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_its_own_self(family):
    """After calls that are served, handed back, fail, and after ``release``."""
    model = busy(family)
    before = portrait(model)
    tinyspec.patch(model, SMALL)
    assert outside(model) == before
    model.generate(IDS)
    model.generate(IDS, do_sample=True, seed=1, deterministic=True)
    model.generate(IDS, num_beams=2)
    assert outside(model) == before
    for wrong in FAILING:
        with pytest.raises((ValueError, NotImplementedError, KeyError)):
            model.generate(IDS, **wrong)
        assert outside(model) == before
    model.generate.release()
    assert outside(model) == before
    for _ in range(2):
        tinyspec.unpatch(model)
        assert portrait(model) == before
    with Engine(model):
        assert portrait(model) == before
    model.lm_head.register_forward_hook(lambda *_: None)
    assert portrait(model) != before, "control"


def test_a_patched_model_is_not_patched_again():
    with patched(tiny()) as model:
        before, generate = portrait(model), model.generate
        with pytest.raises(ValueError, match=r"patched.*unpatch"):
            tinyspec.patch(model)
        assert model.generate is generate and portrait(model) == before
        with Engine(model) as engine:  # which has a copy of its own
            assert engine.generate([PROMPT])[0].completions[0].finish_reason == "length"
            assert greedy(model, PROMPT) == greedy(own(), PROMPT)


def test_a_generate_of_the_models_own_comes_back():
    """What tinyspec does not serve goes to it."""
    asked = []

    def own_generate(self, *args, **kwargs):
        asked.append(kwargs.get("num_beams"))
        return type(self).generate(self, *args, **kwargs)

    model = tiny()
    model.generate = types.MethodType(own_generate, model)
    before, mine = portrait(model), model.generate
    with patched(model):
        assert model.generate is not mine
        assert greedy(model, PROMPT, num_beams=2) == greedy(own(), PROMPT, num_beams=2)
        assert asked[-1] == 2
        assert greedy(model, PROMPT) == greedy(own(), PROMPT)
    assert model.generate is mine and portrait(model) == before


def test_what_is_kept_of_a_generate_says_that_it_is_over():
    """Also where the model is patched again."""
    model = tiny()
    before = portrait(model)
    with patched(model):
        kept = model.generate
        greedy(model, PROMPT)
    for again in (nullcontext(), patched(model)):
        with (
            again,
            pytest.raises(RuntimeError, match=r"unpatched; call tinyspec\.patch\(model\) again"),
        ):
            kept(IDS, max_new_tokens=2, pad_token_id=PAD)
    assert portrait(model) == before


def test_generate_from_within_a_call():
    """Within a step it says so; what transformers serves runs there on the model's own modules, and
    between steps, where streamers are called, anything runs."""
    beams, short, found = greedy(own(), [1, 2], num_beams=2), greedy(own(), [1, 2]), []

    def called(ids, scores, **_):
        assert greedy(model, [1, 2], num_beams=2) == beams
        return greedy(model, [1, 2])

    class Asks:
        def put(self, tokens):
            found.append(greedy(model, [1, 2]))

        def end(self):
            pass

    with patched(tiny()) as model:
        for hook in ("logits_processor", "stopping_criteria"):
            with pytest.raises(RuntimeError, match="generate was called from within a step"):
                greedy(model, [1, 2, 3], **{hook: [called]})
        assert greedy(model, [1, 2, 3], streamer=Asks()) == greedy(own(), [1, 2, 3])
    assert len(found) > 3 and all(tokens == short for tokens in found)


@pytest.mark.parametrize("other_thread", [False, True])
def test_unpatch_while_a_call_runs(other_thread):
    """From within it or from another thread: it goes on, by the engine, which is closed behind
    it."""
    model, begun = tiny(), threading.Event()
    before, expected = portrait(model), greedy(own(), PROMPT, 40)
    tinyspec.patch(model, SMALL)
    engine = model.generate._engine

    def called(ids, scores):
        begun.set()
        if not other_thread:
            tinyspec.unpatch(model)
        return scores

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(greedy, model, PROMPT, 40, logits_processor=[called])
        begun.wait(PATIENCE)
        if other_thread:
            tinyspec.unpatch(model)
        assert call.result(PATIENCE) == expected
    assert portrait(model) == before and engine.closed is not None
    assert greedy(model, PROMPT, 40) == expected
