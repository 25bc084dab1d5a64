"""The stand-in for RMSNorm: transformers' bits, but for rounding in fast mode; which modules get it
is found by comparing bits."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.support.tiny import prompts, tiny
from tests.support.tolerances import SHORT_SUM, close, units
from tinyspec import Engine, SamplingParams
from tinyspec.model.cpu import norms
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
    assert other or dtype != torch.float32, "control: fast mode makes a difference"


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
    """Norms of this formula alone, with nothing attached to them."""
    hooked, own = LlamaRMSNorm(8), LlamaRMSNorm(8)
    hooked.register_forward_hook(lambda *args: None)
    own.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "llama": LlamaRMSNorm(8),
            "qwen3": Qwen3RMSNorm(8),
            "torch": nn.RMSNorm(8, eps=1e-6),
            "gemma": Gemma2RMSNorm(8),
            "layer": nn.LayerNorm(8),
            "batch": nn.BatchNorm1d(8).eval(),
            "linear": nn.Linear(8, 8),
            "hooked": hooked,
            "own": own,
            "meta": LlamaRMSNorm(8).to("meta"),
        }
    )
    found = norm_stand_ins(model, FastMode(), torch.float32)
    assert [name for _, name, _ in found] == ["llama", "qwen3", "torch"]
    assert all(quick.weight is model[name].weight for _, name, quick in found)
    assert found[-1][-1].eps == 1e-6


class Called(LlamaRMSNorm):
    def __call__(self, x):
        return super().__call__(x) + 1


class Altered(LlamaRMSNorm):
    """Llama's but for one step; by another name than these, Llama's."""

    def __init__(self, how):
        super().__init__(32)
        self.how = how

    def forward(self, x):
        how, wide = self.how, x.float()
        if how == "centred":
            wide = wide - wide.mean(-1, keepdim=True)
        power = wide.pow(2).mean(-1, keepdim=True) * (32 / 31 if how == "unbiased" else 1)
        if how == "of all rows":
            power = power.mean().expand_as(power)
        eps = 2 * self.variance_epsilon if how == "epsilon" else self.variance_epsilon
        out = wide * torch.rsqrt(power + eps)
        if how == "epsilon behind":
            out = wide / (torch.sqrt(power) + eps)
        if how == "clipped":
            out = out.clamp(-3, 3)
        weight = self.weight + 1 if how == "weight and one" else self.weight
        return weight * out.to(x.dtype)


ALTERED = ("centred", "unbiased", "of all rows", "epsilon", "epsilon behind", "clipped")


@pytest.mark.parametrize("weight", [0.0, 1.0, None], ids=["zeros", "ones", "random"])
@pytest.mark.parametrize("how", [*ALTERED, "weight and one"])
def test_altered_norms_have_none(how, weight):
    """Whatever the weights are; in both dtypes."""
    norm = Altered(how)
    nn.init.uniform_(norm.weight) if weight is None else nn.init.constant_(norm.weight, weight)
    before = norm.weight.clone()
    assert not is_rms_norm(norm, torch.float32)
    assert torch.equal(norm.weight, before)
    assert not is_rms_norm(norm.bfloat16(), torch.bfloat16)
    assert is_rms_norm(Altered("not"), torch.float32)


def test_control_the_same_written_otherwise_has_one():
    class Otherwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(32)), 1e-6

        def forward(self, x):
            power = (x.float() ** 2).mean(-1, keepdim=True) + self.eps
            return (x.float() * power.rsqrt()).to(x) * self.weight

    assert is_rms_norm(Otherwise(), torch.float32)
    assert is_rms_norm(Otherwise().bfloat16(), torch.bfloat16)


def test_rounding_behind_the_weight_is_another_norm_in_bf16():
    """As OLMo-2's: in fp32 the same, in bf16 not."""
    norm = Olmo2RMSNorm(32)
    assert is_rms_norm(norm, torch.float32)
    assert not is_rms_norm(norm.bfloat16(), torch.bfloat16)


def test_what_only_looks_like_one():
    for module in (Called(8), nn.ModuleList(), nn.RMSNorm(8), nn.Identity()):
        assert not is_rms_norm(module, torch.float32)
    assert is_rms_norm(LlamaRMSNorm(8), torch.float32)


def test_norms_of_one_kind_are_compared_once(monkeypatch):
    compared = []
    equal = norms.is_rms_norm
    monkeypatch.setattr(norms, "is_rms_norm", lambda *args: compared.append(args) or equal(*args))
    model = nn.ModuleList([LlamaRMSNorm(8), LlamaRMSNorm(8), LlamaRMSNorm(8, eps=1e-5)])
    assert len(norm_stand_ins(model, FastMode(), torch.float32)) == 3
    assert len(compared) == 2


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
