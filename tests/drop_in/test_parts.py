"""What stand-ins share with the modules in whose place they are, or take from them: what changes
there between calls is honoured, or refused by name, never passed over in silence.

The oracle is an unpatched model with the same change, which has to matter.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.drop_in import greedy, patched, random_ids
from tests.support.tiny import tiny
from tinyspec import UnsupportedModelError

PROMPT = random_ids(30)


class Third(nn.Module):
    def forward(self, x):
        return x * 0.3


def layer(model):
    return model.model.layers[0]


def another_norm(model):
    layer(model).self_attn.q_norm = Third()


def epsilon_of_norms(model):
    for one in model.model.layers:
        one.self_attn.q_norm.variance_epsilon = one.self_attn.k_norm.variance_epsilon = 5.0


def hook_on_a_norm(model):
    layer(model).self_attn.q_norm.register_forward_hook(lambda module, args, out: out * 0.1)


def forward_of_a_norm(model):
    layer(model).self_attn.q_norm.forward = lambda x: x * 0.3


def forward_of_attention(model):
    attention = layer(model).self_attn
    inner = attention.forward

    def forward(*args, **kwargs):
        out, *rest = inner(*args, **kwargs)
        return (out * -0.5, *rest)

    attention.forward = forward


def scaling_of_attention(model):
    for one in model.model.layers:
        one.self_attn.scaling = 0.01


def hook_on_rope(model):
    model.model.rotary_emb.register_forward_hook(lambda m, a, out: (out[0] * 0.5, out[1]))


def frequencies_of_rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def hook_before_a_linear(model):
    layer(model).self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.1,))


def bias_of_a_linear(model):
    model.lm_head.bias = nn.Parameter(torch.linspace(-20, 20, 128))


def class_of_a_linear(model):
    class Tenth(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.1

    layer(model).mlp.up_proj.__class__ = Tenth


CHANGES = (
    another_norm,
    epsilon_of_norms,
    hook_on_a_norm,
    forward_of_a_norm,
    forward_of_attention,
    scaling_of_attention,
    hook_on_rope,
    frequencies_of_rope,
    hook_before_a_linear,
    bias_of_a_linear,
    class_of_a_linear,
)


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_honoured_or_refused(change, when):
    model, twin = tiny("qwen3"), tiny("qwen3")
    first = greedy(twin, PROMPT)
    change(twin)
    expected = greedy(twin, PROMPT)
    assert expected != first
    if when == "before":
        change(model)
    try:
        with patched(model):
            if when == "between":
                assert greedy(model, PROMPT) == first
                change(model)
            assert greedy(model, PROMPT) == expected
    except UnsupportedModelError:
        pass
    assert greedy(model, PROMPT) == expected  # by transformers


def test_a_bias_that_comes_and_goes():
    model, twin = tiny("qwen2"), tiny("qwen2")
    with patched(model):
        first = greedy(model, PROMPT)
        for one in (model, twin):
            one.lm_head.bias = nn.Parameter(torch.linspace(-20, 20, 128))
            layer(one).self_attn.q_proj.bias = None
        assert greedy(model, PROMPT) == greedy(twin, PROMPT) != first


def test_packed_weights():
    """As torchao puts them in the place of parameters, in modules that stay what they are."""
    quantization = pytest.importorskip("torchao.quantization")
    model, twin = tiny(), tiny()
    with patched(model):
        greedy(model, PROMPT)
        for one in (model, twin):
            quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
        assert greedy(model, PROMPT) == greedy(twin, PROMPT)
