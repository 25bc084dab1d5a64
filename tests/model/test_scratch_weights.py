"""Scratch weights: like a model's own in all but their numbers, in the memory of the largest."""

import pytest
import torch
from torch import nn

from tests.support.memory import watched
from tests.support.tiny import config_of, tiny
from tinyspec.model.linears import linear_kinds
from tinyspec.model.scratch_weights import ALIGNMENT, ScratchModel, scratch_weights, weights_of


def at(place, *shape, dtype=torch.float32):
    """A random matrix ``place`` bytes behind a multiple of 64."""
    count = torch.Size(shape).numel() * dtype.itemsize
    storage = torch.empty(count + 2 * ALIGNMENT, dtype=torch.uint8).untyped_storage()
    first = (place - storage.data_ptr()) % ALIGNMENT
    found = torch.empty(0, dtype=dtype).set_(storage[first : first + count], 0, shape)
    assert found.data_ptr() % ALIGNMENT == place
    return found.copy_(torch.randn(shape))


def odd_weights():
    """Linears with weights of many forms."""
    forms = {
        "plain": torch.randn(96, 64),
        "transposed": torch.randn(64, 96).T,
        "every second": torch.randn(192, 64)[::2],
        "one row": torch.randn(1, 64).expand(96, 64),
        "shifted": at(4, 96, 64),
        "further": at(20, 96, 64),
        "astride": at(2, 96, 64),
        "bf16": at(6, 96, 64, dtype=torch.bfloat16),
    }
    with torch.inference_mode():
        forms["of inference mode"] = torch.randn(96, 64)
    model = nn.Module()
    for number, weight in enumerate(forms.values()):
        linear = nn.Linear(64, 96)
        asks = number % 2 == 0 and not weight.is_inference()
        linear.weight = nn.Parameter(weight, requires_grad=asks)
        model.add_module(f"linear{number}", linear)
    return model


def form(weight):
    lies = weight.shape, weight.stride(), weight.data_ptr() % ALIGNMENT
    return type(weight), *lies, weight.dtype, weight.requires_grad, weight.is_inference()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forms_are_those_of_the_own_weights(mode):
    model = odd_weights()
    own = dict(model.named_parameters())
    forms = {name: form(weight) for name, weight in own.items()}
    copies = {name: weight.detach().clone() for name, weight in own.items()}
    seen = {}

    with mode(), scratch_weights(model):
        for name, weight in model.named_parameters():
            assert form(weight) == forms[name], name
            assert weight is not own[name] and weight.isfinite().all() and weight.any()
            seen[name] = weight.float()
    assert seen.keys() == own.keys()
    assert all(weight is own[name] for name, weight in model.named_parameters())
    assert all(torch.equal(own[name], copies[name]) for name in own)
    matrices = [weight for name, weight in seen.items() if name.endswith("weight")]
    pairs = [(a, b) for a in matrices for b in matrices if a is not b]
    assert not any(torch.equal(a, b) for a, b in pairs), "no two weights are alike"


def test_kinds_tell_forms_apart():
    """Of one class and one size: each is probed by itself."""
    assert len(linear_kinds(odd_weights())) == 9
    twice = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 96)])
    assert len(linear_kinds(twice)) == 1
    twice[1].weight.requires_grad_(False)
    assert len(linear_kinds(twice)) == 2, "torch multiplies otherwise"
    twice[0].weight.requires_grad_(False)
    twice[1].bias = nn.Parameter(torch.zeros(192)[::2])
    assert len(linear_kinds(twice)) == 2


def test_memory_is_that_of_the_largest_weight():
    config = config_of("llama")
    config.vocab_size, config.hidden_size, config.intermediate_size = 8192, 256, 512
    model = type(tiny())(config).eval()
    largest = max(weight.nbytes for _, weight in weights_of(model))
    assert largest == 8192 * 256 * 4 and sum(w.nbytes for _, w in weights_of(model)) > 2 * largest

    def proof_memory():
        scratch = ScratchModel(model)
        with scratch.in_place():
            assert model.lm_head.weight.sum().isfinite()
        return scratch.nbytes

    watch, nbytes = watched(proof_memory)
    assert largest <= nbytes <= largest + (1 << 20)
    assert largest <= watch.most <= nbytes + (1 << 20)
