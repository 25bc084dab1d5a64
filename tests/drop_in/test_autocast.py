"""Calls of a patched model under autocast are served in its precision, which is in the fingerprint:
around the call, or in the model's forward, where accelerate's mixed precision has it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tinyspec
from tests.support import zoo
from tests.support.budget import first
from tests.support.drop_in import SMALL, patched, prepared
from tests.support.forward import quiet
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears

# And how linears are served.
FAMILIES = [("gpt2", "never"), ("qwen3_moe", "auto"), ("llama", "always")]
FAMILIES += [(kind, "auto") for kind in ("gemma3_text", "qwen3", "phi3", "gpt_oss")]
FAMILIES += [(kind, "auto") for kind in ("falcon_h1", "qwen3_5_text", "bamba", "lfm2", "zamba2")]
# Autocast rounds what their own rule multiplies; here a state is of fp32.
MORE_EXACT = ("qwen3_5_text",)
# Of one length: plain gpt2 pads otherwise than it answers alone.
PROMPTS = torch.tensor([prompt[:12] for prompt in zoo.prompts(40) if len(prompt) >= 12][:6])
TWO = PROMPTS[:2]
WRITTEN: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def first_logits(model: PreTrainedModel, ids: Tensor, **settings: Any) -> Tensor:
    """Of the first new token of every row, asked for alone."""
    settings["max_new_tokens"] = 1
    found = [answer(model, row[None], **settings).logits[0] for row in ids]
    return torch.cat(found).float()


def answer(model: PreTrainedModel, ids: Tensor, **settings: Any) -> Any:
    given = {**WRITTEN, "return_dict_in_generate": True, "output_logits": True, **settings}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)


def bits(model: PreTrainedModel, ids: Tensor, **settings: Any) -> Tensor:
    """[rows, all]: tokens and logits."""
    out = answer(model, ids, **{"deterministic": True, **settings})
    return torch.cat([out.sequences.float(), *(logits.float() for logits in out.logits)], 1)


def far(found: Tensor, other: Tensor) -> float:
    return float((found - other).square().mean().sqrt())


@pytest.mark.parametrize("case", first(3, FAMILIES, 4), ids=str)
def test_near_transformers_under_the_same_autocast(case):
    """Nearer to it than to fp32, deterministic and plain; its logits have bf16's bits, alone and in
    a crowd. Without autocast they are fp32's as ever."""
    kind, linear = case
    model = zoo.tiny(kind)
    in_fp32 = first_logits(model, PROMPTS)
    with bf16():
        own, tokens = first_logits(model, PROMPTS), answer(model, PROMPTS).sequences
    with patched(model, replace(SMALL, linear=linear)):
        for settings in ({}, {"deterministic": True}):
            with bf16():
                found = first_logits(model, PROMPTS, **settings)
                same = answer(model, PROMPTS, **settings).sequences == tokens
            if kind in MORE_EXACT:
                assert 0 < far(found, in_fp32) < 1.5 * far(own, in_fp32)
            else:
                assert far(found, own) < min(far(in_fp32, own), far(found, in_fp32))
            assert torch.equal(found, found.bfloat16().float())
            assert same.float().mean() > 0.9
            assert far(first_logits(model, PROMPTS, **settings), in_fp32) < far(in_fp32, own) / 1000
        with bf16():
            alone = torch.cat([bits(model, row[None]) for row in PROMPTS])
            assert torch.equal(bits(model, PROMPTS.flip(0)).flip(0), alone)
            assert not model.generate._engine.contract.results.unsound


def test_control_plain_rows_differ_in_a_crowd():
    """Where linears depend on the number of rows; deterministic ones do not there either."""
    model = replace_linears(zoo.tiny("llama"), ShapeSensitiveLinear)
    with patched(model, SMALL), bf16():
        for deterministic in (True, False):
            given = {"deterministic": deterministic}
            alone = torch.cat([bits(model, row[None], **given) for row in PROMPTS])
            assert torch.equal(bits(model, PROMPTS, **given), alone) is deterministic


def test_the_fingerprint_has_the_dtype():
    """As the engines of both precisions follow the weights, and are closed together."""
    model, other = zoo.tiny("qwen3"), zoo.tiny("qwen3")
    with patched(model), patched(other):
        without = model.generate.fingerprint
        with bf16():
            in_bf16, before = model.generate.fingerprint, bits(model, TWO)
            assert in_bf16 == other.generate.fingerprint != without
            parts = model.generate._engine.contract.current_fingerprint().parts
        assert parts["autocast"] == "bfloat16"
        with torch.autocast("cpu", torch.float16):
            assert model.generate.fingerprint not in (without, in_bf16)
        assert model.generate.fingerprint == without
        assert "autocast" not in model.generate._engine.contract.current_fingerprint().parts
        engines = list(model.generate._engines.values())
        assert [engine.autocast for engine in engines] == [None, torch.bfloat16, torch.float16]
        for each in (model, other):
            with torch.no_grad():
                each.lm_head.weight.mul_(1.25)
        found = bits(model, TWO)
        with bf16():
            assert torch.equal(bits(model, TWO), bits(other, TWO))
            assert not torch.equal(bits(model, TWO), before)
        assert torch.equal(bits(other, TWO), found)
        model.generate.release()
        assert not any(engine.runner.holds_memory for engine in engines)
    assert [engine.closed for engine in engines] == ["closed"] * 3


def off_within_on(model: Any) -> None:
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward)


def of_another_device(model: Any) -> None:
    """Which does nothing on a CPU."""
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)


def adapted() -> Any:
    """A wrapper, whose forward is not the model's own."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(zoo.tiny("llama"), lora).eval()


# A model, what is put around its forward, and whether its calls are then in bf16, without autocast
# around them and with it.
WRAPPED = {
    "prepared": (lambda: zoo.tiny("gpt2"), prepared, (True, True)),
    "an adapter's wrapper prepared": (adapted, prepared, (True, True)),
    "off within on": (lambda: zoo.tiny("llama"), off_within_on, (False, False)),
    "of another device": (lambda: zoo.tiny("llama"), of_another_device, (False, True)),
}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("make, wrap, in_bf16", WRAPPED.values(), ids=WRAPPED)
def test_autocast_in_the_forward_of_a_patched_model(make, wrap, in_bf16):
    """With the bits of autocast around the call; the innermost of the model's device counts."""
    model = make()
    with patched(model):
        expected = {False: bits(model, TWO)}
        with bf16():
            expected[True] = bits(model, TWO)
        assert not torch.equal(*expected.values())
        wrap(model)
        assert torch.equal(bits(model, TWO), expected[in_bf16[0]])
        with bf16():
            assert torch.equal(bits(model, TWO), expected[in_bf16[1]])
        del model.forward
        assert torch.equal(bits(model, TWO), expected[False])


def backward(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    out = model(PROMPTS, labels=PROMPTS)
    out.loss.backward()
    return out.logits, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", first(1, ["qwen3", "llama", "gpt2", "qwen3_moe"], 5))
def test_the_forward_has_generations_logits(kind):
    """In the precision of the call, and gradients as near to fp32's as the model's own are; the
    same where layers are computed again, with the backward under autocast and without, and, in
    fp32, where accelerate has prepared the model."""
    model = quiet(zoo.tiny(kind)).train()
    _, exact = backward(model)
    with bf16():
        own_logits, own = backward(model)
    with patched(model, SMALL, deterministic=True, forward=True):
        for precision in (bf16(), nullcontext()):
            with precision:
                written = answer(model, PROMPTS, eos_token_id=None)
                found = model(written.sequences).logits[:, PROMPTS.shape[1] - 1 : -1]
                assert torch.equal(found.float(), torch.stack(written.logits, 1).float())
        with bf16():
            logits, gradients = backward(model)
            model.gradient_checkpointing_enable()
            again, recomputed = backward(model)
            model.zero_grad()
            loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        outside = {name: p.grad.clone() for name, p in model.named_parameters()}
        wrapped, of_wrapped = backward(prepared(model))
    assert torch.equal(again, logits) and torch.equal(wrapped, logits.float())
    assert logits.dtype == own_logits.dtype == torch.bfloat16 and wrapped.dtype == torch.float32
    assert logits.requires_grad and gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == exact[name].dtype and gradient.any()
        assert far(gradient, exact[name]) <= 2 * far(own[name], exact[name]) + 1e-9, name
        for other in (recomputed, outside, of_wrapped):
            assert torch.equal(other[name], gradient), name
    with bf16():  # the model's own again
        assert torch.equal(model(PROMPTS).logits, own_logits.float())


def test_a_block_keeps_the_precision_in_which_it_begins():
    model = zoo.tiny("llama")
    with patched(model, SMALL), bf16():
        expected = first_logits(model, TWO, deterministic=True)
    with bf16(), tinyspec.canonical(model, SMALL):
        assert torch.equal(model(TWO).logits[:, -1].float(), expected)
        with (
            torch.autocast("cpu", enabled=False),
            pytest.raises(ValueError, match=r"autocast=None is not allowed: torch\.bfloat16"),
        ):
            model(TWO)
    with (
        tinyspec.canonical(model, SMALL),
        bf16(),
        pytest.raises(ValueError, match=r"autocast=torch\.bfloat16 is not allowed: None"),
    ):
        model(TWO)
    with tinyspec.canonical(prepared(model), SMALL):
        assert torch.equal(model(TWO).logits[:, -1], expected)


def test_what_is_not_served_is_transformers_own_affair(caplog):
    """Said once; together with what only tinyspec has it raises."""
    quantization = pytest.importorskip("torchao.quantization")
    model = zoo.tiny("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with patched(model, SMALL), caplog.at_level(logging.WARNING), bf16():
        for _ in range(2):
            assert answer(model, PROMPTS[:1]).sequences.shape == (1, 17)
        assert caplog.text.count("quantized, and it is called under autocast") == 1
        with pytest.raises(NotImplementedError, match="quantized"):
            bits(model, PROMPTS[:1])
    with patched(model, SMALL):  # in its own precision
        assert bits(model, PROMPTS[:1]).isfinite().all()
