"""The stand-in for RMSNorm: transformers' bits out of haste, the same but for rounding in haste."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.support.tiny import prompts, tiny
from tests.support.tolerances import SHORT_SUM, close, units
from tinyspec import Engine, SamplingParams
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.cpu.norms import CpuRMSNorm, is_rms_norm, norm_stand_ins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1, 512), (1, 7, 512), (1, 64, 96), (1, 5, 3, 32), (9, 17))


def norm_of(width, dtype, weight=None, eps=1e-5):
    norm = LlamaRMSNorm(width, eps).to(weight or dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("weight", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_and_rounding(dtype, weight):
    other = False
    for shape in SHAPES:
        norm = norm_of(shape[-1], dtype, weight)
        fast_mode = FastMode()
        quick = CpuRMSNorm(norm, fast_mode)
        for scale in (1e-4, 1.0, 100.0):
            x = (torch.randn(shape) * scale).to(dtype)
            with torch.inference_mode():
                expected = norm(x)
                fast_mode.on = False
                assert torch.equal(quick(x), expected) and quick(x).dtype == expected.dtype
                fast_mode.on = True
                found = quick(x)
            assert found.dtype == expected.dtype
            assert close(found, expected, units(4, dtype, norm.weight.dtype))
            other |= not torch.equal(found, expected)
    assert other or dtype != torch.float32, "control: haste makes a difference"


def test_reads_what_it_stands_for_now():
    norm = norm_of(32, torch.float32)
    quick = CpuRMSNorm(norm, FastMode(on=True))
    x = torch.randn(1, 3, 32) * 1e-2
    with torch.no_grad():
        before = quick(x)
        norm.weight.mul_(2)
        assert torch.equal(quick(x), before * 2)
        quick.variance_epsilon = norm.variance_epsilon = 0.1
        assert close(quick(x), norm(x), SHORT_SUM)


def test_who_has_one():
    """Norms of this formula alone, that nobody else has a hand in."""
    hooked, own = LlamaRMSNorm(8), LlamaRMSNorm(8)
    hooked.register_forward_hook(lambda *args: None)
    own.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "llama": LlamaRMSNorm(8),
            "qwen3": Qwen3RMSNorm(8),
            "gemma": Gemma2RMSNorm(8),
            "layer": nn.LayerNorm(8),
            "hooked": hooked,
            "own": own,
            "meta": LlamaRMSNorm(8).to("meta"),
        }
    )
    found = norm_stand_ins(model, FastMode())
    assert [name for _, name, _ in found] == ["llama", "qwen3"]
    assert all(quick.weight is model[name].weight for _, name, quick in found)


class Called(LlamaRMSNorm):
    def __call__(self, x):
        return super().__call__(x) + 1


def ping(x, left=3):
    return pong(x, left - 1) if left else x


def pong(x, left):
    return ping(x, left)


class Mutual(nn.Module):
    def forward(self, x):
        return ping(x)


def test_what_only_looks_like_one():
    assert is_rms_norm(LlamaRMSNorm(8)) and not is_rms_norm(Called(8))
    assert not is_rms_norm(Mutual()) and not is_rms_norm(nn.ModuleList())


def test_an_engine_swaps_them_and_gives_them_back():
    model = tiny()
    before = [type(m) for m in model.modules()]
    with Engine(model) as engine:
        kinds = {type(m) for m in model.modules()}
        assert CpuRMSNorm in kinds and LlamaRMSNorm not in kinds
        params = SamplingParams(max_new_tokens=4, deterministic=True)
        first = engine.generate(prompts(1), params)[0].fingerprint
        model.model.norm.variance_epsilon *= 3
        assert engine.generate(prompts(1), params)[0].fingerprint != first
    assert [type(m) for m in model.modules()] == before
