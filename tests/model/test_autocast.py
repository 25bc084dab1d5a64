"""Autocast around the making of an engine, around a model's forward, and inside of it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.cases import bits_of, engine_of
from tests.support.drop_in import prepared
from tests.support.recorded import as_on_a_gpu
from tests.support.thinking import thinking_model
from tests.support.tiny import prompts, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, UnsupportedModelError
from tinyspec.model.attention import PagedAttention
from tinyspec.model.fused_layer import FusedLayer, FusedNorm

PARAMS = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)
CONFIG = EngineConfig(reference_rows=8, max_rows=16)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def served(model) -> tuple[list, str]:
    with Engine(model, config=CONFIG) as engine:
        return bits_of(engine.generate(prompts(3), PARAMS)), engine.fingerprint


def around_the_model(model):
    model.forward = bf16()(model.forward)
    return model


def twice(model):
    return prepared(around_the_model(model))


WRAPPERS = (prepared, around_the_model, twice)


@pytest.mark.crossed(2)
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("family", first(1, ["gemma2", "gpt2", "llama"], 2))
def test_wrappers_say_the_precision(family, wrap):
    """As autocast around the making of an engine does, whose calls have it anywhere."""
    with bf16():
        engine = Engine(tiny(family), config=CONFIG)
    with engine:
        expected = bits_of(engine.generate(prompts(3), PARAMS)), engine.fingerprint
    model = wrap(tiny(family))
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert served(model) == expected
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    # Control: in fp32 bits and fingerprint are others.
    others = served(tiny(family))
    assert others[0] != expected[0] and others[1] != expected[1]


def test_what_a_gpu_runs(monkeypatch):
    """But for the kernels, for which the twins pose: without fused layers, which know one dtype."""
    as_on_a_gpu(monkeypatch)
    with bf16():
        engine = engine_of(tiny(), backend="triton", reference_rows=8, max_rows=16)
    with engine:
        alone = [bits_of(engine.generate([prompt], PARAMS))[0] for prompt in prompts(3)]
        assert bits_of(engine.generate(prompts(3), PARAMS)) == alone
        modules = list(engine.served.model.modules())
    assert any(isinstance(module, PagedAttention) for module in modules)
    assert not any(isinstance(module, (FusedLayer, FusedNorm)) for module in modules)


def around_modules(model):
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        layer.forward = bf16()(layer.forward)
    return model


def test_wrappers_of_modules_are_refused():
    """Unless they turn on what is on: what such a module computes in is no matter of the engine."""
    model = around_modules(tiny())
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 is wrapped in an autocast"):
        Engine(model, config=CONFIG)
    with bf16():
        assert served(model) == served(tiny())


def test_thinking_is_refused():
    model = thinking_model()
    with bf16(), pytest.raises(UnsupportedModelError, match="thinking is not served"):
        Engine(model)


def test_a_forward_below_accelerates_is_kept():
    """Also where it was a method, of which accelerate wraps the function."""

    def louder(self, *args, **kwargs):
        out = type(self).forward(self, *args, **kwargs)
        out.logits.mul_(2)
        return out

    models = [tiny(), tiny()]
    for model in models:
        model.forward = louder.__get__(model)
    with bf16():
        assert served(prepared(models[0])) == served(models[1]) != served(tiny())


def in_its_own_code(model, enabled=True):
    class Other(type(model.model.layers[1].mlp)):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return super().forward(x if enabled else x.float())

    model.model.layers[1].mlp.__class__ = Other


def by_hooks(model):
    mlp, entered = model.model.layers[1].mlp, []

    def enter(*_):
        entered.append(bf16())
        entered[-1].__enter__()

    mlp.register_forward_pre_hook(enter)
    mlp.register_forward_hook(lambda *_: entered.pop().__exit__(None, None, None))


@pytest.mark.parametrize("turn_on", [in_its_own_code, by_hooks, None])
def test_anything_else_is_refused(turn_on):
    """Where plain requests are served. None: it is turned off, of an engine made under it."""
    model = tiny("llama", torch.bfloat16 if turn_on else torch.float32)
    if turn_on:
        turn_on(model)
    else:
        in_its_own_code(model, enabled=False)
        assert served(model)[0]  # where there is nothing to turn off
    with nullcontext() if turn_on else bf16():
        engine = Engine(model, config=CONFIG)
    with engine:
        with pytest.raises(DeterminismError, match=r"layers\.1\.mlp.* turns autocast on"):
            engine.generate(prompts(3), PARAMS)
        plain = SamplingParams(max_new_tokens=6)
        assert len(engine.generate([[1, 2, 3]], plain)[0].completions[0].token_ids) == 6


def test_an_engine_keeps_the_precision_that_it_was_made_in():
    model = tiny("gpt2")
    with Engine(model, config=CONFIG) as engine:
        expected = bits_of(engine.generate(prompts(3), PARAMS))
        around_the_model(model)
        assert bits_of(engine.generate(prompts(3), PARAMS)) == expected
        del model.forward
        assert bits_of(engine.generate(prompts(3), PARAMS)) == expected
