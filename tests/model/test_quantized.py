"""Quantized models: served as transformers would, deterministic only where a probe can prove it.

torchao and bitsandbytes on a CPU; quantized at loading, as transformers does it.
"""

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import loading
from tests.support.budget import first
from tests.support.loading import CONFIG, DETERMINISTIC, PLAIN, PROMPTS, greedy, load, tokens
from tests.support.tiny import tiny
from tinyspec import DeterminismError, Engine, SamplingParams, doctor
from tinyspec.model import quantized
from tinyspec.model.linears import KernelLinear

NAME = "model.layers.0.self_attn.q_proj"
LOGPROBS = SamplingParams(max_new_tokens=8, logprobs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return loading.saved(tmp_path_factory.mktemp("model"))


def torchao(kind, **settings):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    if "granularity" in settings:
        name, *sizes = settings["granularity"]
        settings["granularity"] = getattr(quantization, name)(*sizes)
    return TorchAoConfig(getattr(quantization, kind)(**settings))


def bitsandbytes(**settings):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(**settings)


def int8(threshold=0.0):
    return bitsandbytes(load_in_8bit=True, llm_int8_threshold=threshold)


def int4(kind="nf4", twice=False):
    return bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=twice
    )


def int8_weights(**settings):
    return torchao("Int8WeightOnlyConfig", **settings)


# Those by default first.
PROVEN = {
    "torchao int8 weights": int8_weights,
    "bitsandbytes int8 without outliers": int8,
    "bitsandbytes nf4": int4,
    "torchao int8 weights and rows": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao float8 weights": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao int8 weights in groups": lambda: int8_weights(granularity=("PerGroup", 32)),
    "torchao int8 intx rows": lambda: torchao("Int8DynamicActivationIntxWeightConfig"),
    "bitsandbytes nf4, twice": lambda: int4(twice=True),
    "bitsandbytes fp4": lambda: int4("fp4"),
}
# They round activations: the last bits of another attention may become another token.
ROUNDS = ("torchao int8 weights and rows", "torchao int8 intx rows")


def settled(model):
    """After a first call, in which bitsandbytes repacks; what it leaves on the model is its own."""
    greedy(model)
    return model


@pytest.mark.crossed(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", first(5, PROVEN, 2))
def test_served_and_proven(folder, name, dtype):
    """And never replaced, whatever other linears are."""
    model = settled(load(folder, dtype=dtype, quantization_config=PROVEN[name]()))
    exact = dtype == torch.float32 and name not in ROUNDS
    loading.serve(model, greedy(model) if exact else None)
    linears = {n: m for n, m in model.named_modules() if n.endswith("proj")}
    with Engine(model, config=replace(CONFIG, linear="always")) as engine:
        served = engine.runner.model
        assert all(type(served.get_submodule(n)) is type(m) for n, m in linears.items())
        assert isinstance(served.lm_head, KernelLinear), "which is not packed"
        assert len(tokens(engine.generate(PROMPTS, PLAIN))) == len(PROMPTS)


# What no probe can prove


def one_scale(folder):
    how = torchao("Int8DynamicActivationInt8WeightConfig", granularity=("PerTensor",))
    return load(folder, quantization_config=how)


def outliers(folder):
    return load(folder, quantization_config=int8(threshold=6.0))


def of_torch(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(load(folder), {nn.Linear})


def hidden(folder):
    """Somebody's linear with scales where no digest finds them."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.meta["scale"]

    model = load(folder)
    model.get_submodule(NAME).__class__ = Scaled
    model.get_submodule(NAME).meta = {"scale": torch.ones(64)}
    return model


UNPROVABLE = {
    one_scale: f"{NAME} .Linear. quantizes activations by a scale for several rows",
    outliers: f"{NAME} .Linear8bitLt. chooses outlier columns .threshold 6.0.",
    of_torch: f"{NAME} .Linear. quantizes activations by one scale for all rows",
    hidden: f"{NAME} .Scaled. keeps tensors outside of parameters and buffers .meta.",
}


def test_a_refusal_comes_without_warnings_of_trials(folder, caplog):
    model = outliers(folder)
    caplog.set_level(logging.WARNING, logger="bitsandbytes")
    with Engine(model, config=CONFIG) as engine:
        with pytest.raises(DeterminismError):
            engine.generate(PROMPTS, DETERMINISTIC)
        assert "inputs will be cast" not in caplog.text
        engine.generate(PROMPTS, PLAIN)
    assert "inputs will be cast" in caplog.text, "control: of passes, as in transformers"


@pytest.mark.parametrize("make", UNPROVABLE, ids=lambda f: f.__name__)
def test_what_no_probe_can_prove_is_refused(folder, make):
    model = settled(make(folder))
    before = loading.everything(model)
    with Engine(model, config=CONFIG) as engine:
        with pytest.raises(DeterminismError, match=UNPROVABLE[make]):
            engine.generate(PROMPTS, DETERMINISTIC)
        assert len(tokens(engine.generate([PROMPTS[0]], PLAIN))[0]) == 8
        report = doctor(engine)
        assert not report and NAME in report.problems[0]
        if make in (one_scale, outliers):  # control
            assert not loading.alone_as_in_a_crowd(engine, LOGPROBS)
    assert loading.unlike(before, loading.everything(model)) == []


# Fingerprints


def fingerprint(model):
    """Without a proof."""
    with Engine(model, config=replace(CONFIG, linear="never")) as engine:
        return engine.fingerprint


def double_a_scale(model):
    """Where nothing but the linear itself sees it."""
    linear = model.get_submodule(NAME)
    linear_state = vars(linear).get("state")
    holders = getattr(linear.weight, "quant_state", None), linear.weight, linear_state
    found = [getattr(h, name, None) for h in holders for name in ("absmax", "scale", "SCB")]
    with torch.no_grad():
        next(x for x in found if isinstance(x, torch.Tensor)).view(-1)[:4].mul_(2)


def test_fingerprints_of_packed_weights(folder):
    prints = []
    for how in (int8_weights, int8, int4):
        first, second, other = (load(folder, quantization_config=how()) for _ in range(3))
        seen = fingerprint(first)
        assert fingerprint(first) == seen
        assert fingerprint(settled(second)) == seen, "whether there was a call is not part of it"
        weight = other.get_submodule(NAME).weight
        raw = weight.qdata if hasattr(weight, "qdata") else weight.data
        with torch.no_grad():
            raw.view(-1)[:8] ^= 1
        double_a_scale(second)
        prints += [seen, fingerprint(other), fingerprint(second)]
    prints.append(fingerprint(load(folder, quantization_config=int4("fp4"))))
    assert len(set(prints)) == len(prints)


def test_packed_weights_that_change_are_noticed(folder):
    model = load(folder, quantization_config=int8_weights())
    twin = load(folder, quantization_config=int8_weights())
    with Engine(model, config=CONFIG) as engine:
        first = engine.generate(PROMPTS, DETERMINISTIC)
        contract = engine.contract
        assert not contract.changed()
        for linear in (model.get_submodule(NAME), twin.get_submodule(NAME)):
            with torch.no_grad():
                linear.weight.qdata.neg_()
        assert contract.changed()
        second = engine.generate(PROMPTS, DETERMINISTIC)
        assert second[0].fingerprint != first[0].fingerprint and not contract.changed()
        twin.model.layers[1].mlp.up_proj.weight = twin.model.layers[0].mlp.up_proj.weight
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        third = tokens(engine.generate(PROMPTS, PLAIN))
    assert tokens(second) != tokens(first) and third == greedy(twin)


@pytest.mark.parametrize("how", [int4, int8], ids=lambda f: f.__name__)
def test_a_first_deterministic_request(folder, how):
    """Weights are repacked before anything is noted of them, and do not become inference tensors.

    Repacked nf4 gives no gradients, with or without an engine: bitsandbytes does it in eval mode.
    """
    peft = pytest.importorskip("peft")
    model = load(folder, quantization_config=how())
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapter).train()
    with Engine(model, config=CONFIG) as engine:
        outputs = engine.generate(PROMPTS, DETERMINISTIC)
        assert {o.completions[0].finish_reason for o in outputs} == {"length"}
        assert {o.fingerprint for o in outputs} == {engine.fingerprint}
        engine.weights_changed()
        assert engine.fingerprint == outputs[0].fingerprint, "computed anew"
        assert loading.alone_as_in_a_crowd(engine)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    if how is int8:
        ids = torch.tensor([PROMPTS[1]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad.isfinite().all() for n, p in model.named_parameters() if "lora_" in n)


class Packed(nn.Module):
    """As GPTQ's and AWQ's linears keep their weights."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("qweight", (linear.weight.detach() * 100).to(torch.int32))

    def forward(self, x):
        return x @ self.qweight.T.to(x.dtype) / 100


def test_packed_weights_of_an_unknown_format_are_refused(folder, monkeypatch):
    """Of torchao's, and integers of anybody's."""
    known = [name for name in quantized.FILLED if name != "Int8Tensor"]
    monkeypatch.setattr(quantized, "FILLED", known)
    model, other = load(folder, quantization_config=int8_weights()), tiny()
    other.model.layers[0].self_attn.q_proj = Packed(other.get_submodule(NAME))
    for each, reason in (
        (model, ".Linear. has packed weights .* cannot make .weight."),
        (other, ".Packed. has packed.*qweight"),
    ):
        with Engine(each, config=CONFIG) as engine:
            with pytest.raises(DeterminismError, match=f"{NAME} {reason}"):
                engine.generate(PROMPTS, DETERMINISTIC)
            assert len(tokens(engine.generate([PROMPTS[0]], PLAIN))[0]) == 8
