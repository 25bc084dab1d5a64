"""Deferred rotation: recognised by source, and the same to the bit as transformers' own rotation.

Both ways attend over the same pages by the same kernel; what differs is who rotates. Control: a
kind that is not the module's differs.
"""

from __future__ import annotations

import ast
import copy
from functools import cache
from threading import Thread, get_ident
from types import FunctionType

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from tests.support.zoo import BUILT, VOCAB, tiny
from tinyspec import deferred as module_under_test
from tinyspec import kernels
from tinyspec.attention import (
    IMPLEMENTATION,
    AttentionContext,
    PagedAttention,
    paged_attention_function,
)
from tinyspec.deferrable import ROTATE, hands_over
from tinyspec.deferred import ROPES, STANDARD, deferred, layout
from tinyspec.kernels.segments import Segments
from tinyspec.patched import Patched
from tinyspec.unwrap import CompiledCalls

PAGE = 16
LENGTHS = (21, 1, 10)
ROWS = sum(LENGTHS)

# What the structure is expected to tell, by model type.
FUSED = (
    *("arcee", "cwm", "dots1", "gemma", "gemma2", "granite", "granitemoe", "jais2", "llama"),
    *("mellum", "ministral", "mistral", "mixtral", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "solar_open", "vaultgemma"),
)
DEFERRED = (
    *("afmoe", "apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "flex_olmo", "gemma3_text"),
    *("glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite_swa", "helium", "laguna"),
    *("minimax_m2", "modernbert-decoder", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
    *("persimmon", "phi", "phi3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
# Rotated and then used otherwise, rotated in another way, latent, or not rotated at all.
INTERFACE = (
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat", "ministral3", "llama4_text", "diffllama"),
    *("deepseek_v3", "gemma3n_text", "gemma4_text", "jamba", "gpt2", "opt", "falcon", "gptj"),
)


@cache
def model_of(kind, dtype=torch.float32):
    return tiny(kind) if dtype == torch.float32 else copy.deepcopy(model_of(kind)).to(dtype)


def attentions(model):
    """(parent, name, module) of what calls the attention interface, outermost names first."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "Attention" in type(child).__name__ and hasattr(child, "layer_idx")
    ]


class Pools(dict):
    """KV pools by layer, taken when a layer first writes; shapes are the caller's."""


class Context(AttentionContext):
    """A context that makes a layer's pool when it is first written."""

    def __init__(self):
        super().__init__()
        self.kernels = kernels.load("torch")
        self.k, self.v = {}, {}
        self.turned = 0

    def attend(self, layer, q, k, v, rope, norm, **scores):
        pages = sum(-(-n // PAGE) for n in LENGTHS)
        for pool, x in ((self.k, k), (self.v, v)):
            if layer not in pool:
                pool[layer] = x.new_zeros(pages, PAGE, *x.shape[1:])
        self.turned += self.note is not None
        return super().attend(layer, q, k, v, rope, norm, **scores)


def packed():
    """Segments, slots and positions of three sequences, each its whole prompt."""
    tables, slots, page = [], [], 0
    most = -(-max(LENGTHS) // PAGE)
    for n in LENGTHS:
        count = -(-n // PAGE)
        tables.append(list(range(page, page + count)) + [0] * (most - count))
        slots += [page * PAGE + i for i in range(n)]
        page += count
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    lengths = torch.tensor(LENGTHS).int()
    table = torch.tensor(tables).int()
    segments = Segments(table, ends, lengths, PAGE, max(LENGTHS), max(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return segments, torch.tensor(slots), positions


def through(model, way):
    """Logits of a packed pass in which ``way(module, context)`` stands in for every attention (None
    for the module itself); what was written; how many layers left the rotation to the kernel."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention_function)
    context = Context()
    own = model.config._attn_implementation
    patched = Patched(model, context, [], own, CompiledCalls(model))
    for parent, name, module in attentions(model):
        stand_in = way(module, context)
        if stand_in is None:
            patched.bound.append(module)
        else:
            patched.swap(parent, name, stand_in)
    patched.bind()
    model.set_attn_implementation(IMPLEMENTATION)
    context.segments, context.slot_mapping, positions = packed()
    context.thread = get_ident()
    ids = torch.randint(2, VOCAB, (1, ROWS), generator=torch.Generator().manual_seed(1))
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=positions[None], use_cache=False).logits
    finally:
        patched.take_out()
        model.set_attn_implementation(own)
    return logits, context


def by_interface(module, context):
    return None


def by_layout(module, context):
    if layout(module) == "fused":
        return PagedAttention(module, context)
    return deferred(module, context)


def same(a, b):
    (logits, context), (others, other) = a, b
    assert context.k.keys() == other.k.keys() and context.k
    for pool in ("k", "v"):
        mine, theirs = getattr(context, pool), getattr(other, pool)
        if not all(torch.equal(mine[n], theirs[n]) for n in mine):
            return False
    return torch.equal(logits, others)


def layouts(kind):
    return {layout(m) for _, _, m in attentions(model_of(kind))}


@pytest.mark.parametrize("kind", FUSED)
def test_fused(kind):
    assert layouts(kind) == {"fused"}


@pytest.mark.parametrize("kind", DEFERRED)
def test_deferred(kind):
    assert layouts(kind) == {"deferred"}


@pytest.mark.parametrize("kind", INTERFACE)
def test_left_to_the_interface(kind):
    assert layouts(kind) == {None}


# What transformers' forwards refuse here by themselves, whoever attends.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", BUILT)
def test_same_bits_as_the_interface(kind, dtype):
    """Every causal LM of transformers with a layer that leaves its rotation to the kernel."""
    if not layouts(kind) - {None}:
        pytest.skip("no layer of it has a stand-in")
    model = model_of(kind, dtype)
    expected = through(model, by_interface)
    deferring = through(model, deferred)
    assert same(expected, deferring)
    assert deferring[1].turned and not expected[1].turned
    assert expected[0].isfinite().all()
    if "fused" in layouts(kind):
        assert same(expected, through(model, by_layout))
