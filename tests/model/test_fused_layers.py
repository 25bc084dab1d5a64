"""Decoder layers by fused kernels, forced on a CPU, where the twins serve them."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.support import zoo
from tests.support.drop_in import random_ids
from tests.support.tiny import tiny
from tests.support.tolerances import LOGPROBS, close
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.model import install
from tinyspec.model.fused_layer import FusedLayer, FusedNorm, GatedMlp

CONFIG = EngineConfig(reference_rows=16, max_model_len=256)
# Whether weights of norms are stored less one, and the activation.
SILU = False, "silu"
FORMS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "ministral", "smollm3"), SILU),
    "gemma": (True, "gelu_tanh"),
}
# Of another structure, and of this one but not its function.
OTHERS = ("gpt2", "phi3", "gemma2", "olmo2", "qwen3_moe")
SCALED = ("granite",)
PROMPT = random_ids(23)
SLOW = pytest.mark.slow("crosses", 1)


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(install, "fuses_layers", lambda config: True)


@contextmanager
def engine_of(model, config=CONFIG, fused=True):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(install, "fuses_layers", lambda config: fused)
        with Engine(model, config=config) as engine:
            yield engine


FUSED = (FusedLayer, FusedNorm, GatedMlp)


def fused_in(model, kind=FUSED):
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def prompt_logprobs(engine, prompt=PROMPT):
    """Of a plain request, of all tokens but the first."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    found = engine.generate([prompt], params)[0].prompt_logprobs
    return torch.tensor(found[1:], dtype=torch.float64)


@pytest.mark.parametrize("family", [*FORMS, *OTHERS, *SCALED])
def test_which_layers(family, forced, caplog):
    model = zoo.tiny(family)
    with caplog.at_level(logging.INFO, "tinyspec"), Engine(model, config=CONFIG) as engine:
        served = engine.runner.model
        layers = fused_in(served, FusedLayer).values()
        assert bool(fused_in(served)) == (family in FORMS)
    told = [r.getMessage() for r in caplog.records if "keeps its own forward" in r.getMessage()]
    assert len(told) == (family in SCALED)
    assert all("DecoderLayer" in message for message in told)
    if family in FORMS:
        assert len(layers) == model.config.num_hidden_layers
        for layer in layers:
            norm, mlp = layer.post_attention_layernorm, layer.mlp
            assert isinstance(norm, FusedNorm) and isinstance(mlp, GatedMlp)
            assert (norm.tinyspec_unit_offset, mlp.tinyspec_activation) == FORMS[family]
        # Every layer computes the next one's first norm, the last one the norm behind it.
        norms = [layer.input_layernorm for layer in layers]
        following = [*norms, served.base_model.norm][1:]
        assert [layer.tinyspec_next for layer in layers] == following


@pytest.mark.crossed(0.1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_as_close(family, dtype):
    """Error against fp64 (2-norm) at most twice that of the layers' own forward."""
    model = zoo.tiny(family).to(dtype)
    found = []
    for fused in (False, True):
        with engine_of(model, fused=fused) as engine:
            found.append(prompt_logprobs(engine))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        exact = model.double()(ids).logits[0, :-1].log_softmax(-1)
    own, fused = (found_by - exact.gather(1, ids[0, 1:, None])[:, 0] for found_by in found)
    assert 0 < fused.norm() <= 2 * own.norm()


def slower(layer, hidden_states, **kwargs):
    """A layer's own forward, written again."""
    residual = hidden_states
    x, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    x = residual + x
    return x + layer.mlp(layer.post_attention_layernorm(x))


def scaled(layer, hidden_states, **kwargs):
    return hidden_states + 1.02 * (slower(layer, hidden_states, **kwargs) - hidden_states)


def without_positions(layer, hidden_states, position_ids=None, **kwargs):
    return slower(layer, hidden_states, **kwargs)


def other_epsilon(layer, hidden_states, **kwargs):
    norm = layer.post_attention_layernorm
    norm.variance_epsilon, before = 2e-6, norm.variance_epsilon
    try:
        return slower(layer, hidden_states, **kwargs)
    finally:
        norm.variance_epsilon = before


def gate_for_up(mlp, x):
    return mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def centred(norm, x):
    return LlamaRMSNorm.forward(norm, x - x.mean(-1, keepdim=True))


ALTERED = [("", forward) for forward in (slower, scaled, without_positions, other_epsilon)]
ALTERED += [("mlp", gate_for_up)]
ALTERED += [(norm, centred) for norm in ("input_layernorm", "post_attention_layernorm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_computes_another_is_left_alone(dtype, forced, caplog):
    """Only the altered one, whose neighbours add by themselves around it."""
    for part, forward in ALTERED:
        model = tiny("llama", dtype)
        alter(model.model.layers[0].get_submodule(part), forward)
        caplog.clear()
        with caplog.at_level(logging.INFO, "tinyspec"), Engine(model, config=CONFIG) as engine:
            found = list(fused_in(engine.runner.model, FusedLayer))
        kept = ["model.layers.0"] if forward is slower else []  # control: written again
        assert found == [*kept, "model.layers.1"], forward
        assert bool(kept) != ("keeps its own forward" in caplog.text)


def alter(module, forward):
    """Give a module a class with this forward."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


HOOKED = ("", "input_layernorm", "post_attention_layernorm", "mlp", "mlp.act_fn")
# Parts that are called all the same: attention and linears run their hooks.
CALLED = ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj")


@pytest.mark.crossed(0.1)
@pytest.mark.parametrize("part", [*HOOKED, *CALLED])
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_layer_with_code_of_the_user_is_left_alone(part, how, forced):
    model, calls = tiny(), []
    module = model.model.layers[1].get_submodule(part)
    if how == "hook":
        module.register_forward_hook(lambda *_: calls.append(1))
    else:
        own = module.forward
        module.forward = lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))[1]
    with Engine(model, config=CONFIG) as engine:
        assert len(fused_in(engine.runner.model, FusedLayer)) == 1 + (part in CALLED)
        del calls[:]
        prompt_logprobs(engine)
        assert calls


@pytest.mark.parametrize(
    ("family", "place"),
    [("llama", "behind"), ("llama", "before"), pytest.param("dots1", "before", marks=SLOW)],
)
def test_a_hook_of_later_may_write_to_the_hidden_states(family, place, forced):
    """The norm that a layer computes ahead would be that of other hidden states. Of dots1 the
    second layer is a mixture of experts, whose first norm is fused alone."""

    def added(x):
        return x + 1

    def hooked(add):
        model = zoo.tiny(family)
        with Engine(model, config=CONFIG) as engine:
            assert (
                fused_in(engine.runner.model, FusedLayer)["model.layers.0"].tinyspec_next
                is not None
            )
            if add and place == "behind":
                model.model.layers[0].register_forward_hook(lambda *args: add(args[-1]))
            elif add:
                later = model.model.layers[1]
                later.register_forward_pre_hook(lambda _, args: (add(args[0]), *args[1:]))
            return prompt_logprobs(engine)

    found = [hooked(add) for add in (None, added, lambda x: x.add_(1))]
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def rows_matter(kernels, name, where):
    """The kernels, one of which gives rows other bits ``where(rows)`` says."""
    whole = getattr(kernels, name)

    def kernel(x, *args, **kwargs):
        out = whole(x, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        rows = torch.arange(first.shape[-2])
        first = first * (1 + 2**-10 * where(rows)[:, None])
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return replace(kernels, **{name: kernel})


NAMES = {"add_rms_norm": "norm", "gated": "mlp, activation"}
SMALL_CONFIG = EngineConfig(reference_rows=8, max_rows=8, max_model_len=64)


@pytest.mark.parametrize("name", ["gated", pytest.param("add_rms_norm", marks=SLOW)])
def test_probes_see_fused_functions(name, forced, no_results_on_disk):
    """Where a row's place in the reference bucket shows."""
    with Engine(tiny(), config=SMALL_CONFIG) as engine:
        context = engine.served.context
        context.kernels = rows_matter(context.kernels, name, lambda rows: rows == 5)
        with pytest.raises(DeterminismError, match=NAMES[name]):
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, deterministic=True))


def test_fingerprints_tell_layers_apart(no_results_on_disk):
    found = []
    for fused in (True, False, True):
        with engine_of(tiny(), replace(SMALL_CONFIG, linear="never"), fused) as engine:
            found.append(engine.fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.slow("crosses", 6)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the model and the twins are on a CPU")
@pytest.mark.parametrize("linear", ["auto", "always"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_layers_by_interpreted_kernels(family, linear):
    """A Triton engine fuses its layers unasked, and gives the tokens of the layers' own forward."""
    model, found = zoo.tiny(family), []
    for backend in ("triton", "torch"):
        config = replace(SMALL_CONFIG, backend=backend, linear=linear)
        with Engine(model, config=config) as engine:
            assert bool(fused_in(engine.runner.model)) == (backend == "triton")
            params = SamplingParams(max_new_tokens=4, logprobs=True)
            found.append(engine.generate([PROMPT[:5]], params)[0].completions[0])
    assert found[0].token_ids == found[1].token_ids
    logprobs = (torch.tensor(one.logprobs, dtype=torch.float64) for one in found)
    assert close(*logprobs, LOGPROBS)
