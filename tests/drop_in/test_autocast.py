"""Calls of a patched model under autocast are served in its precision, which is in the fingerprint:
around the call, or in the model's forward, where accelerate's mixed precision has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears

DIFFERENTIATED = ("qwen3", "llama", "gpt2", "qwen3_moe")
FAMILIES = ("gpt2", "qwen3_moe", "gemma3_text", "qwen3", "llama", "phi3", "gpt_oss")
# Of one length: plain gpt2 pads otherwise than it answers alone.
PROMPTS = torch.tensor([prompt[:12] for prompt in zoo.prompts(40) if len(prompt) >= 12][:6])
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


@pytest.mark.parametrize("kind", first(2, FAMILIES, 4))
def test_near_transformers_under_the_same_autocast(kind):
    """Nearer to it than to fp32, deterministic and plain; its logits have bf16's bits. Without
    autocast they are fp32's as ever."""
    model = zoo.tiny(kind)
    in_fp32 = first_logits(model, PROMPTS)
    with bf16():
        own, tokens = first_logits(model, PROMPTS), answer(model, PROMPTS).sequences
    with patched(model):
        for settings in ({}, {"deterministic": True}):
            with bf16():
                found = first_logits(model, PROMPTS, **settings)
                same = answer(model, PROMPTS, **settings).sequences == tokens
            assert far(found, own) < min(far(in_fp32, own), far(found, in_fp32))
            assert torch.equal(found, found.bfloat16().float())
            assert same.float().mean() > 0.9
            assert far(first_logits(model, PROMPTS, **settings), in_fp32) < far(in_fp32, own) / 1000


@pytest.mark.parametrize("kind", first(3, FAMILIES, 3))
def test_rows_alone_and_in_a_crowd(kind):
    model = zoo.tiny(kind)
    with patched(model, SMALL), bf16():
        alone = torch.cat([bits(model, row[None]) for row in PROMPTS])
        assert torch.equal(bits(model, PROMPTS), alone)
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


@pytest.mark.parametrize("kind, linear", [("llama", "always"), ("gpt2", "never")])
def test_linears_by_the_kernel_and_without_it(kind, linear):
    """Both in the precision of the call, whichever operators run."""
    model = zoo.tiny(kind)
    in_fp32 = first_logits(model, PROMPTS)
    with bf16():
        own = first_logits(model, PROMPTS)
        with patched(model, replace(SMALL, linear=linear)):
            found = first_logits(model, PROMPTS)
    assert far(found, own) < min(far(in_fp32, own), far(found, in_fp32))


def test_the_fingerprint_has_the_dtype():
    model, other = zoo.tiny("qwen3"), zoo.tiny("qwen3")
    with patched(model), patched(other):
        without = model.generate.fingerprint
        with bf16():
            in_bf16 = model.generate.fingerprint
            assert in_bf16 == other.generate.fingerprint != without
            parts = model.generate._engine.contract.current_fingerprint().parts
        assert parts["autocast"] == "bfloat16"
        with torch.autocast("cpu", torch.float16):
            assert model.generate.fingerprint not in (without, in_bf16)
        assert model.generate.fingerprint == without
        assert "autocast" not in model.generate._engine.contract.current_fingerprint().parts
        assert [engine.autocast for engine in model.generate._engines.values()] == [
            *(None, torch.bfloat16, torch.float16)
        ]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_accelerates_prepare_before_and_after_patch(kind):
    """With the bits and the fingerprint of autocast around the call."""
    model, before = zoo.tiny(kind), prepared(zoo.tiny(kind))
    with patched(model), patched(before):
        in_fp32 = bits(model, PROMPTS[:2])
        with bf16():
            expected, fingerprint = bits(model, PROMPTS[:2]), model.generate.fingerprint
        assert not torch.equal(expected, in_fp32)
        prepared(model)
        for each in (model, before):
            assert torch.equal(bits(each, PROMPTS[:2]), expected)
            assert each.generate.fingerprint == fingerprint
        del model.forward
        assert torch.equal(bits(model, PROMPTS[:2]), in_fp32)


def test_accelerates_prepare_of_an_adapters_wrapper():
    """Whose forward is not the model's own."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.tiny("llama"), lora).eval()
    with patched(model):
        in_fp32 = bits(model, PROMPTS[:2])
        with bf16():
            expected = bits(model, PROMPTS[:2])
        assert not torch.equal(expected, in_fp32)
        assert torch.equal(bits(prepared(model), PROMPTS[:2]), expected)


def off_within_on(model: PreTrainedModel) -> None:
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward)


def of_another_device(model: PreTrainedModel) -> None:
    """Which does nothing on a CPU."""
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("wrap", [off_within_on, of_another_device], ids=lambda w: w.__name__)
def test_the_innermost_of_the_models_device_counts(wrap: Callable[[PreTrainedModel], None]):
    model = zoo.tiny("llama")
    with patched(model):
        without = bits(model, PROMPTS[:2])
        with bf16():
            on = bits(model, PROMPTS[:2])
        wrap(model)
        assert torch.equal(bits(model, PROMPTS[:2]), without)
        with bf16():
            inside = bits(model, PROMPTS[:2])
        assert torch.equal(inside, without if wrap is off_within_on else on)


@contextmanager
def with_forward(model: Any) -> Iterator[None]:
    tinyspec.patch(model, SMALL, deterministic=True, forward=True)
    try:
        yield
    finally:
        tinyspec.unpatch(model)


def backward(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    out = model(PROMPTS, labels=PROMPTS)
    out.loss.backward()
    return out.logits, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", first(1, DIFFERENTIATED, 3))
def test_the_forward_has_generations_logits(kind):
    """In the precision of the call, and gradients as near to fp32's as the model's own are."""
    model = zoo.tiny(kind)
    _, exact = backward(model)
    with bf16():
        own_logits, own = backward(model)
    with with_forward(model):
        for precision in (bf16(), nullcontext()):
            with precision:
                written = answer(model, PROMPTS, eos_token_id=None)
                found = model(written.sequences).logits[:, PROMPTS.shape[1] - 1 : -1]
                assert torch.equal(found.float(), torch.stack(written.logits, 1).float())
        with bf16():
            logits, gradients = backward(model)
    assert logits.dtype == own_logits.dtype == torch.bfloat16
    assert logits.requires_grad and gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == exact[name].dtype and gradient.any()
        assert far(gradient, exact[name]) <= 2 * far(own[name], exact[name]) + 1e-9, name


@pytest.mark.parametrize("kind", first(1, ["llama", "qwen3_moe"], 6))
def test_layers_that_are_computed_again(kind):
    """Gradient checkpointing, with the backward under autocast and without."""
    model = zoo.tiny(kind).train()
    with with_forward(model):
        with bf16():
            logits, kept = backward(model)
            model.gradient_checkpointing_enable()
            again, gradients = backward(model)
            model.zero_grad()
            loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
    assert torch.equal(again, logits)
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], kept[name])
        assert torch.equal(parameter.grad, kept[name])


@pytest.mark.parametrize("before", [True, False], ids=["before patch", "after patch"])
def test_accelerates_prepare_and_the_forward(before):
    """Whose logits are in fp32, with the bits of autocast around the call."""
    model, other = zoo.tiny("qwen3"), zoo.tiny("qwen3")
    if before:
        prepared(model)
    with with_forward(model), with_forward(other):
        if not before:
            prepared(model)
        logits, gradients = backward(model)
        with bf16():
            expected, expected_gradients = backward(other)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected.float())
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name])
    with bf16():  # the model's own again
        assert torch.equal(model(PROMPTS).logits, other(PROMPTS).logits.float())


def test_a_block_keeps_the_precision_in_which_it_begins():
    model, ids = zoo.tiny("llama"), PROMPTS[:2]
    with patched(model, SMALL), bf16():
        expected = first_logits(model, ids, deterministic=True)
    with bf16(), tinyspec.canonical(model, SMALL):
        assert torch.equal(model(ids).logits[:, -1].float(), expected)
        with (
            torch.autocast("cpu", enabled=False),
            pytest.raises(ValueError, match=r"autocast=None is not allowed: torch\.bfloat16"),
        ):
            model(ids)
    with (
        tinyspec.canonical(model, SMALL),
        bf16(),
        pytest.raises(ValueError, match=r"autocast=torch\.bfloat16 is not allowed: None"),
    ):
        model(ids)
    with tinyspec.canonical(prepared(model), SMALL):
        assert torch.equal(model(ids).logits[:, -1], expected)


def test_both_precisions_follow_the_weights():
    model, other = zoo.tiny("llama"), zoo.tiny("llama")
    with patched(model), patched(other):
        for _ in range(2):
            for each in (model, other):
                with torch.no_grad():
                    each.lm_head.weight.mul_(1.25)
            found = [bits(model, PROMPTS[:2])]
            with bf16():
                found.append(bits(model, PROMPTS[:2]))
                assert torch.equal(bits(other, PROMPTS[:2]), found[1])
            assert torch.equal(bits(other, PROMPTS[:2]), found[0])
        model.generate.release()
        assert not any(e.runner.holds_memory for e in model.generate._engines.values())
        engines = list(model.generate._engines.values())
    assert [engine.closed for engine in engines] == ["closed"] * 2


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
