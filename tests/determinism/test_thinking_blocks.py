"""Blocks that are replaced, hooked or set otherwise beside an open engine: noticed, as weights."""

import copy

import pytest
import torch
from torch import nn

from tests.determinism.test_thinking import Mixing
from tests.support.thinking import all_bits, engine_of, exact, prompt_of, thinking_model

PROMPT = prompt_of(67, 67)


def norm(model):
    model.thinking.norm.variance_epsilon = 0.5


def scaling(model):
    model.compression.block.layer.self_attn.scaling = 0.9


def block(model):
    other = copy.deepcopy(model.compression)
    with torch.no_grad():
        other.block.layer.mlp.up_proj.weight.mul_(-1)
    model.compression = other


def part(model):
    model.compression.block.layer.mlp.act_fn = nn.ReLU()


def hook(model):
    model.compression.block.layer.mlp.register_forward_hook(lambda module, given, found: 2 * found)


def forward(model):
    own = model.compression.forward
    model.compression.forward = lambda thought: 2 * own(thought)


def bits(engine):
    output = engine.generate([PROMPT], exact())[0]
    assert output.completions[0].error is None
    return all_bits(output), output.fingerprint


@pytest.mark.parametrize("change", [norm, scaling, block, part, hook, forward])
def test_noticed(change):
    model = thinking_model()
    with engine_of(model) as engine:
        before = bits(engine)
        assert bits(engine) == before
        change(model)
        after = bits(engine)
    assert all(one != other for one, other in zip(after, before, strict=True))
    with engine_of(model) as engine:
        assert bits(engine) == after


def test_blocks_that_mix_chunks_from_now_on():
    """They are proven again: each chunk runs alone, to the bits of a cold engine."""
    model = thinking_model()
    with engine_of(model, prefix_cache=False) as engine:
        bits(engine)
        assert engine.core.committer.thinker.batches.reference > 1
        mlp = model.compression.block.layer.mlp
        mlp.up_proj = Mixing(mlp.up_proj)
        alone = bits(engine)
        assert engine.core.committer.thinker.batches.reference == 1
        many = engine.generate([PROMPT, PROMPT[3:], PROMPT[5:]], exact())
        assert all_bits(many[0]) == alone[0]
        mlp.up_proj = mlp.up_proj.linear
        bits(engine)
        assert engine.core.committer.thinker.batches.reference > 1
