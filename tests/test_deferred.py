"""Deferred rotation: recognised by source, and the same to the bit as transformers' own rotation.

Both ways attend over the same pages by the same kernel; what differs is who rotates. Control: a
kind that is not the module's differs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from importlib import import_module
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.zoo import BUILT, VOCAB, tiny
from tinyspec import deferred as deferring
from tinyspec import kernels
from tinyspec.attention import AttentionContext, PagedAttention
from tinyspec.deferrable import hands_over, source_of
from tinyspec.deferred import ROPES, deferred, layout
from tinyspec.errors import UnsupportedModelError
from tinyspec.kernels.segments import Segments
from tinyspec.kv_cache import KVCache
from tinyspec.survey import accepted

# ``tinyspec.patch`` is the function of this name.
patch = import_module("tinyspec.patch")
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
    """What calls the attention interface."""
    return [m for m in model.modules() if patch.calls_interface(m) and hasattr(m, "layer_idx")]


def layouts(kind):
    return {layout(m) for m in attentions(model_of(kind))}


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


def only(monkeypatch, way):
    """Have ``install`` put in stand-ins of one way alone."""
    monkeypatch.setattr(patch, "FUSED", ())
    if way == "interface":
        monkeypatch.setattr(patch, "deferred", lambda module, context: None)
    elif way == "fused":
        monkeypatch.setattr(patch, "deferred", fused_or_deferred)


def fused_or_deferred(module, context):
    kind = layout(module)
    return PagedAttention(module, context) if kind == "fused" else deferred(module, context)


def through(model, monkeypatch, way):
    """Logits of a pass of three prompts whose attention goes one way, and the keys and values that
    it wrote; how often the kernel was told to rotate."""
    told = []
    with monkeypatch.context() as patches:
        only(patches, way)
        patched = patch.install(model, 512)
    context = patched.context
    twins = kernels.load("torch")

    def write(q, k, v, cos, *args, **kwargs):
        told.append(cos is not None)
        return twins.fused_kv_write(q, k, v, cos, *args, **kwargs)

    context.kernels = replace(twins, fused_kv_write=write)
    segments, slots, positions = packed()
    pages = sum(-(-n // PAGE) for n in LENGTHS)
    cache = KVCache(patched.layers, pages, PAGE, model.dtype, model.device)
    cache.zero(list(range(pages)))
    context.k, context.v = cache.k, cache.v
    ids = torch.randint(2, VOCAB, (1, ROWS), generator=torch.Generator().manual_seed(1))
    more = accepted(model, position_ids=positions[None], use_cache=False)
    try:
        context.begin(segments, slots, positions)
        with torch.no_grad():
            logits = model(input_ids=ids, **more).logits
    finally:
        context.end()
        patch.uninstall(model)
    return [logits, *cache.k, *cache.v], sum(told)


def same(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("kind", FUSED)
def test_fused(kind):
    assert layouts(kind) == {"fused"}


@pytest.mark.parametrize("kind", DEFERRED)
def test_deferred(kind):
    assert layouts(kind) == {"deferred"}


@pytest.mark.parametrize("kind", INTERFACE)
def test_left_to_the_interface(kind):
    assert layouts(kind) <= {None}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", BUILT)
def test_same_bits_as_the_interface(kind, dtype, monkeypatch):
    """Every causal LM of transformers with a layer that leaves its rotation to the kernel."""
    if not layouts(kind) - {None}:
        pytest.skip("no layer of it has a stand-in")
    model = model_of(kind, dtype)
    try:
        expected, none = through(model, monkeypatch, "interface")
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    assert none == 0 and expected[0].isfinite().all()
    found, told = through(model, monkeypatch, "deferred")
    assert same(found, expected)
    assert told > 0 or kind == "granitemoehybrid"  # has no RoPE by default
    if "fused" in layouts(kind):
        found, told = through(model, monkeypatch, "fused")
        assert same(found, expected) and told > 0
