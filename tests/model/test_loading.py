"""Ways to load a model: served as transformers would, or refused by name; closed, as it was."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.support import loading
from tests.support.budget import first
from tests.support.cases import DTYPES
from tests.support.loading import CONFIG, PROMPTS, greedy, load, refused, saved, serve, tokens
from tests.support.tiny import config_of, tiny
from tinyspec import Engine, UnsupportedModelError, doctor
from tinyspec.kernels.launch import MAX_HEAD_DIM
from tinyspec.model.cpu_linears import CpuLinear


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of the tiny llama by transformers."""
    return greedy(tiny())


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path)


def hook(*_):
    return None


# Data types and tied weights


def test_heads_that_no_kernel_takes():
    """Refused where Triton serves; the twins take any size."""
    config = config_of("qwen3")
    config.head_dim = MAX_HEAD_DIM + 16
    model = type(tiny("qwen3"))(config).eval()
    refused(model, "heads of 528 numbers", replace(CONFIG, backend="triton"))
    Engine(model, config=replace(CONFIG, backend="torch")).close()


@pytest.mark.parametrize("how", first(1, ["given", "auto"], 1))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes(tmp_path, dtype, how):
    folder = saved(tmp_path, tiny(dtype=dtype if how == "auto" else torch.float32))
    model = load(folder, dtype="auto" if how == "auto" else dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    serve(model, greedy(model) if dtype == torch.float32 else None)


def test_other_dtypes_are_refused():
    refused(tiny(dtype=torch.float64), "dtype is torch.float64; served are float32, bfloat16")


def test_tied_embeddings():
    config = config_of("llama")
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config).eval()
    table = model.model.embed_tokens.weight
    first = serve(model, greedy(model))
    assert model.lm_head.weight is table is model.model.embed_tokens.weight
    with Engine(model, config=CONFIG) as engine:
        head = engine.runner.model.lm_head
        assert isinstance(head, CpuLinear) and head.weight is table
        assert engine.fingerprint == first
        with torch.no_grad():
            table.mul_(1.5)
        changed = tokens(engine.generate(PROMPTS, loading.DETERMINISTIC))
        assert engine.fingerprint != first
    assert changed == greedy(model)


# Attention functions


@pytest.mark.parametrize("name", first(2, ["sdpa", "eager", "flex_attention"], 1))
@pytest.mark.parametrize("family", first(1, ["llama", "gpt_neox"], 1))
def test_attention_implementations(tmp_path, family, name):
    model = load(saved(tmp_path, tiny(family)), attn_implementation=name)
    assert model.config._attn_implementation == name
    serve(model, greedy(tiny(family)))


def my_attention(*args, **kwargs):
    return sdpa_attention_forward(*args, **kwargs)


@pytest.mark.parametrize("name", ["mine", "sdpa"])
def test_the_users_own_attention_is_refused(monkeypatch, name):
    for function in (my_attention, functools.partial(my_attention)):
        model = tiny()
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
        model.set_attn_implementation(name)
        refused(model, f"attn_implementation '{name}' is .*my_attention, which paged attention")


def test_implementations_that_cannot_be_set_here_come_back(monkeypatch, expected):
    """Flash attention is not installed; and transformers' own by another name, as kernels of the
    hub are registered."""
    names = AttentionInterface._global_mapping
    monkeypatch.setitem(names, "hub/flash", functools.partial(flash_attention_forward))
    for name in ("flash_attention_2", "hub/flash"):
        model = tiny()
        model.config._attn_implementation = name
        serve(model, expected)
        assert model.config._attn_implementation == name


# Hooks


ATTACH = {
    lambda module: module.register_forward_hook(hook): "forward hooks",
    lambda module: module.register_forward_pre_hook(hook): "forward hooks",
    loading.own_forward: "a forward of its own",
}


@pytest.mark.parametrize("name", ["layers.1.self_attn", "layers.1.self_attn.k_norm", "rotary_emb"])
def test_hooks_that_would_not_run_are_refused(name):
    for attach, what in ATTACH.items():
        model = tiny("qwen3")
        attach(model.model.get_submodule(name))
        if attach is loading.own_forward and "self_attn" in name:  # what stands there runs
            serve(model, greedy(model))
        else:
            refused(model, f"Qwen3.* is not supported: model.{name} has {what}, which paged")


RUN = ("llama", "model.layers.1.self_attn.q_proj"), ("llama", ""), ("gpt2", "transformer.h.0.attn")


@pytest.mark.parametrize("family, name", RUN)
def test_hooks_elsewhere_run(family, name):
    model, calls = tiny(family), []
    expected = greedy(model)
    model.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    serve(model, expected)
    assert calls


# What is no model of transformers


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.DataParallel(tiny())], ids=["linear", "dp"])
def test_other_modules_are_refused(other):
    message = f"{type(other).__name__} is not supported: it is neither"
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(other)
    report = doctor(other)
    assert not report and message in report.problems[0]


def test_an_attention_that_is_not_called_is_left_alone(expected):
    model = tiny()
    layer = model.model.layers[1]
    layer.other = type(layer.self_attn)(model.config, 1)
    serve(model, expected)


def test_plain_requests_need_no_proof(expected):
    with Engine(tiny(), config=CONFIG) as engine:
        assert tokens(engine.generate(PROMPTS, loading.PLAIN)) == expected
        assert engine.contract.results is None
