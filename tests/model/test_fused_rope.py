"""Which stand-in an attention module gets, found by comparing bits; and the bits of each way.

All ways attend over the same pages by the same kernel; what differs is who norms and rotates.
Modules altered in ways that matter get no stand-in that would not show it, whatever their weights.
"""

from __future__ import annotations

import ast
import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from inspect import unwrap
from pathlib import Path
from threading import Thread
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import tinyspec
from tests.support.walk import places
from tests.support.zoo import BUILT, VOCAB, tiny
from tinyspec import Engine, EngineConfig
from tinyspec.kernels import backend as kernels
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model import attention_trial, install
from tinyspec.model import fused_rope as ropes
from tinyspec.model.attention import AttentionContext, PagedAttention
from tinyspec.model.attention_trial import Trial, fused, rope_left_out
from tinyspec.model.fused_rope import Rope, deferred, rotate_of
from tinyspec.model.introspection import accepted
from tinyspec.runner.kv_cache import KVCache

PAGE = 16
LENGTHS = (21, 1, 10)
ROWS = sum(LENGTHS)
CONFIG = EngineConfig(max_model_len=512, max_rows=64)
WAYS = {"interface": (), "deferred": (rope_left_out,), "fused": (fused,)}

# What is expected to be found, by model type.
FUSED = (
    *("apertus", "arcee", "cohere_compass_text", "cwm", "dots1", "gemma", "gemma2", "glm4_moe"),
    *("granite", "granitemoe", "hy_v3", "jais2", "llama", "mellum", "ministral", "ministral3"),
    *("mistral", "mixtral", "nemotron", "olmo", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "seed_oss", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
)
DEFERRED = (
    *("cohere", "ernie4_5", "flex_olmo", "gemma3_text", "glm", "glm4", "gpt_neox", "gpt_oss"),
    *("granite_swa", "helium", "jetmoe", "laguna", "minimax_m2", "modernbert-decoder", "olmo2"),
    *("olmo3", "olmoe", "persimmon", "phi", "phi3"),
)
# Some of their layers do not rotate.
MIXED = {
    "smollm3": {"fused", "interface"},
    "exaone4": {"fused", "interface"},
    "afmoe": {"deferred", "interface"},
    "cohere2": {"deferred", "interface"},
    "beam": {"deferred", "interface"},
}


def of_this_version(kinds):
    """Those that this transformers has."""
    return [kind for kind in kinds if kind in BUILT]


# Rotated and then used otherwise, rotated in another way, latent, or not rotated at all.
INTERFACE = (
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat", "llama4_text", "diffllama"),
    *("deepseek_v3", "gemma3n_text", "gemma4_text", "gpt2", "opt"),
)


@cache
def model_of(kind, dtype=torch.float32):
    return tiny(kind) if dtype == torch.float32 else copy.deepcopy(model_of(kind)).to(dtype)


def ways(model):
    """How each module that calls attention is served, in the order of the model."""
    patched = install.install(model, CONFIG)
    swapped = {id(own): stand_in for _, _, own, stand_in in patched.swapped}
    kinds = {PagedAttention: "fused", type(None): "interface"}
    found = [kinds.get(type(swapped.get(id(module))), "deferred") for module in patched.bound]
    return found


def packed():
    """Attention metadata, slots and positions of three sequences, each its whole prompt."""
    tables, slots, page = [], [], 0
    for n in LENGTHS:
        count = -(-n // PAGE)
        tables.append(range(page, page + count))
        slots += [page * PAGE + i for i in range(n)]
        page += count
    metadata = AttentionMetadata.of([(0, n) for n in LENGTHS], tables, PAGE)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return metadata, torch.tensor(slots), positions


def through(model, monkeypatch, way):
    """Logits of a pass of three prompts whose attention goes one way, and the keys and values that
    it wrote; how often the kernel was to rotate."""
    rotated = []
    with monkeypatch.context() as patches:
        patches.setattr(install, "_is_rotary", lambda module: False)
        patches.setattr(install, "WAYS", WAYS[way])
        patched = install.install(model, CONFIG)
    context = patched.context
    twins = kernels.load("torch")

    def write(q, k, v, cos, *args, **kwargs):
        rotated.append(cos is not None)
        return twins.fused_kv_write(q, k, v, cos, *args, **kwargs)

    context.kernels = replace(twins, fused_kv_write=write)
    metadata, slots, positions = packed()
    pages = sum(-(-n // PAGE) for n in LENGTHS)
    cache = KVCache(patched.layers, pages, PAGE, model.dtype, model.device)
    cache.zero(list(range(pages)))
    context.k, context.v = cache.k, cache.v
    ids = torch.randint(2, VOCAB, (1, ROWS), generator=torch.Generator().manual_seed(1))
    more = accepted(model, position_ids=positions[None], use_cache=False)
    try:
        context.begin(metadata, slots, positions)
        with torch.no_grad():
            logits = patched.model(input_ids=ids, **more).logits
        context.check()
    finally:
        context.end()
    return [logits, *cache.k, *cache.v], sum(rotated)


def same(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("kind", of_this_version(FUSED))
def test_fused(kind):
    assert set(ways(model_of(kind))) == {"fused"}


@pytest.mark.parametrize("kind", DEFERRED)
def test_deferred(kind):
    assert set(ways(model_of(kind))) == {"deferred"}


@pytest.mark.parametrize("kind", INTERFACE)
def test_left_to_the_interface(kind):
    assert set(ways(model_of(kind))) == {"interface"}


@pytest.mark.parametrize("kind", of_this_version(MIXED))
def test_layers_that_do_not_rotate_are_left_to_the_interface(kind):
    assert set(ways(model_of(kind))) == MIXED[kind]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# One of each rotation, and of each thing that may stand before it; all others in the slow tests.
QUICK = (
    *("llama", "qwen3", "glm4", "cohere", "cohere2", "ernie4_5", "gpt_oss", "phi", "phi3", "olmo2"),
    *("stablelm", "gemma3_text", "smollm3", "modernbert-decoder", "mllama", "ministral3"),
)
WITH_STAND_INS = [
    kind for kind, cells in places().items() if cells[0] == "fused module" and kind in BUILT
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(
            pytest.param(k, marks=pytest.mark.slow("model types", 0.3))
            for k in WITH_STAND_INS
            if k not in QUICK
        ),
    ],
)
def test_same_bits_as_the_interface(kind, dtype, monkeypatch):
    """Every causal LM that the README has with a layer that leaves its rotation to the kernel."""
    model = model_of(kind, dtype)
    expected, none = through(model, monkeypatch, "interface")
    assert none == 0 and expected[0].isfinite().all()
    rotated = 0
    for way in ("deferred", "fused"):
        found, count = through(model, monkeypatch, way)
        assert same(found, expected)
        rotated += count
    assert rotated > 0


@pytest.mark.parametrize("kind", ["glm", "cohere", "llama", "olmo2"])
def test_another_rotation_differs(kind, monkeypatch):
    """Control: what is compared depends on the rotation. Nor would the trial take it."""
    model = model_of(kind, torch.bfloat16)
    expected, _ = through(model, monkeypatch, "interface")

    makes = rope_left_out

    def others(trial):
        for make in makes(trial):
            rope = make.keywords["rope"]
            if rope.interleaved != (kind in ("glm", "cohere")):
                yield make

    monkeypatch.setitem(WAYS, "deferred", (others,))
    found, rotated = through(model, monkeypatch, "deferred")
    assert same(found, expected) and rotated == 0
    monkeypatch.setattr(attention_trial, "_same", lambda a, b: a is not None)
    found, rotated = through(model, monkeypatch, "deferred")
    assert rotated and not same(found[:1], expected[:1])


# Modules altered in what they do


STANDARD = """
def forward(self, hidden_states, position_embeddings=None, past_key_values=None, **kwargs):
    rows = hidden_states.shape[1]
    heads = (1, rows, -1, self.head_dim)
    q = self.q_proj(hidden_states).view(heads).transpose(1, 2)
    k = self.k_proj(hidden_states).view(heads).transpose(1, 2)
    v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    cos, sin = position_embeddings
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    out, weights = attend(self, q, k, v, kwargs.get("attention_mask"), scaling=self.scaling)
    out = out.reshape(1, rows, -1)
    return self.o_proj(out), weights
"""
TURN = "    q, k = apply_rotary_pos_emb(q, k, cos, sin)\n"
OUT = "    out = out.reshape(1, rows, -1)\n"


def changed(old, new, source=STANDARD):
    assert old in source
    return source.replace(old, new)


def behind(text):
    """The standard forward with something behind its rotation."""
    return changed(TURN, TURN + f"    {text}\n")


def partly(cut, rest, joined="torch.cat(({0}_rot, {0}_pass), dim=-1)", between=""):
    """The standard forward that rotates ``cut`` of q and k."""
    text = "".join(f"    {x}_rot, {x}_pass = {x}{cut}, {x}{rest}\n" for x in "qk")
    text += "    q_rot, k_rot = apply_rotary_pos_emb(q_rot, k_rot, cos, sin)\n" + between
    text += "".join(f"    {x} = {joined.format(x)}\n" for x in "qk")
    text = text.replace("cos, sin)", "cos[..., :8], sin[..., :8])")
    return changed(TURN, text)


# Source, and how it may be served.
EQUAL = {
    "as it is": (STANDARD, "fused"),
    "part of a head": (partly("[..., :8]", "[..., 8:]"), "deferred"),
    "v scaled": (changed(TURN, TURN + "    v = v * 0.3\n"), "deferred"),
    "q scaled before": (changed(TURN, "    q = q * 0.3\n" + TURN), "deferred"),
    "q clipped before": (changed(TURN, "    q = q.clamp(-4, 4)\n" + TURN), "deferred"),
    "a gate behind": (changed(OUT, OUT + "    out = out * hidden_states.sigmoid()\n"), "deferred"),
    "a bias behind": (changed("self.o_proj(out)", "self.o_proj(out) + 0.5"), "deferred"),
    "a softcap": (changed("self.scaling)", "self.scaling, softcap=30.0)"), "fused"),
    "sinks": (changed("self.scaling)", "self.scaling, s_aux=self.ones[:4])"), "deferred"),
    "another scale": (changed("self.scaling)", "self.scaling * 3)"), "fused"),
}
UNEQUAL = {
    "norm behind": behind("q = torch.nn.functional.rms_norm(q, q.shape[-1:])"),
    "norm of k behind": behind("k = torch.nn.functional.rms_norm(k, k.shape[-1:])"),
    "scaled behind": behind("q = q * 0.3"),
    "k scaled behind": behind("k = k * 0.3"),
    "scaled behind in place": behind("q *= 0.3"),
    "scaled by position": behind("q = q * (1 + (cos[0, :, -1:] * 100).floor())"),
    "scaled from some position on": behind("q = torch.where(sin[..., 7:8] > 0.1, q * 0.3, q)"),
    "a buffer behind": behind("q = q * self.ones"),
    "k as v": behind("v = k"),
    "kept": behind("self.last = k"),
    "returned": changed("self.o_proj(out), weights", "self.o_proj(out), k"),
    "used for the output": changed("self.o_proj(out)", "self.o_proj(out) + k.mean() * 100"),
    "not rotated": changed(TURN, "    k = k * 2\n"),
    "rotated twice": changed(TURN, TURN + TURN),
    "q alone": changed(TURN, "    q, _ = apply_rotary_pos_emb(q, k, cos, sin)\n"),
    "the other way round": changed("attend(self, q, k", "attend(self, q.flip(2), k"),
    "attends twice": changed(OUT, "    attend(self, q, k, v, None)\n" + OUT),
    "last part of a head": partly(
        "[..., 8:]", "[..., :8]", "torch.cat(({0}_pass, {0}_rot), dim=-1)"
    ),
    "part of a head scaled": partly("[..., :8]", "[..., 8:]", between="    q_rot = q_rot * 0.3\n"),
}


WEIGHTS: dict[str, Callable] = {
    "random": lambda weight: weight,
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
}


def with_forward(source, weights="random", rotate=apply_rotary_pos_emb, **more):
    """A tiny model whose attention modules run ``source``."""
    scope = {"apply_rotary_pos_emb": rotate, "torch": torch, **more}
    scope["ALL_ATTENTION_FUNCTIONS"] = ALL_ATTENTION_FUNCTIONS
    exec(source, scope)
    model = tiny("llama")
    for layer in model.model.layers:
        module = layer.self_attn
        module.__class__ = type("OwnAttention", (LlamaAttention,), {"forward": scope["forward"]})
        module.register_buffer("ones", torch.ones(module.head_dim))
        with torch.no_grad():
            for parameter in module.parameters():
                WEIGHTS[weights](parameter)
    return model


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("source, way", EQUAL.values(), ids=EQUAL)
def test_equal_modules_have_a_stand_in(source, way, weights):
    assert set(ways(with_forward(source, weights))) == {way}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("source", UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_modules_have_none(source, weights):
    assert set(ways(with_forward(source, weights))) == {"interface"}


@pytest.mark.parametrize("source", [s for s, _ in EQUAL.values()], ids=EQUAL)
def test_equal_modules_have_the_bits_of_the_interface(source, monkeypatch):
    expected, _ = through(with_forward(source), monkeypatch, "interface")
    found = {w: through(with_forward(source), monkeypatch, w) for w in ("deferred", "fused")}
    assert all(same(tensors, expected) for tensors, _ in found.values())
    assert found["deferred"][1]


def test_weights_are_not_written_to():
    """Nor is anything else left on the model."""
    model = tiny("qwen3")
    before = {n: (p, p._version, p.clone()) for n, p in model.named_parameters()}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    assert set(ways(model)) == {"fused"}
    for name, parameter in model.named_parameters():
        own, version, values = before[name]
        assert parameter is own and parameter._version == version
        assert torch.equal(parameter, values)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes


def opposite(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, -sin)


def other_sign(q, k, cos, sin):
    """Halves swapped, without a sign."""
    return tuple(x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in (q, k))


def k_less(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin)[0], apply_rotary_pos_emb(q, k, cos, sin / 2)[1]


def by_position(q, k, cos, sin):
    scale = torch.where(torch.arange(q.shape[2]) > 40, 0.3, 1.0)[:, None]
    return tuple(x * scale for x in apply_rotary_pos_emb(q, k, cos, sin))


@pytest.mark.parametrize("rotate", [other_sign, k_less, by_position, opposite])
def test_other_rotations_are_not_the_kernels(rotate):
    found = ways(with_forward(STANDARD, rotate=rotate))
    assert set(found) == {"interface"}


def wide(q, k, cos, sin):
    """In fp32, rounded once."""
    return tuple(x.to(q.dtype) for x in apply_rotary_pos_emb(q.float(), k.float(), cos, sin))


def neighbours(q, k, cos, sin):
    def one(x):
        other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * ropes.pairs(cos) + other * ropes.pairs(sin)

    return one(q), one(k)


BF16, FP32 = torch.bfloat16, torch.float32
CONTIGUOUS = torch.Tensor.contiguous


@pytest.mark.parametrize(
    "rotate, expected",
    [
        (apply_rotary_pos_emb, Rope(False, CONTIGUOUS, BF16)),
        (wide, Rope(False, CONTIGUOUS, FP32)),
        (neighbours, Rope(True, ropes.pairs, BF16)),
    ],
)
def test_the_form_of_a_rotation_is_found(rotate, expected):
    """By its bits, in bf16, where the dtype to rotate in shows."""
    v_scaled, _ = EQUAL["v scaled"]
    model = with_forward(v_scaled, rotate=rotate).bfloat16()
    patched = install.install(model, CONFIG)
    found = [vars(layer.self_attn)["tinyspec_rope"] for layer in patched.model.model.layers]
    assert [deferred.rope for deferred in found] == [expected] * len(found)
    assert all(deferred.whole for deferred in found) and patched


def attention(kind="llama"):
    model = tiny(kind)
    return model, model.model.layers[0].self_attn


def test_what_runs_is_what_is_tried():
    """A decorated forward, one of the module's own, another rotation in its module."""
    model, module = attention()
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
    assert ways(model) == ["interface", "fused"]

    def subclass(forward):
        model, module = attention()
        module.__class__ = type("LlamaAttention", (LlamaAttention,), {"forward": forward})
        return ways(model)[0]

    forward = LlamaAttention.forward
    assert subclass(forward) == "fused"
    assert subclass(wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))) == "fused"

    def scaled(self, *args, **kwargs):
        out, weights = forward(self, *args, **kwargs)
        return out * 0.3, weights

    # Tried and run with what is around it; one that keeps its function elsewhere calls it as it is.
    assert subclass(wraps(forward)(scaled)) == "deferred"
    kept = [forward]
    elsewhere = wraps(forward)(lambda *args, **given: kept[0](*args, **given))
    assert subclass(elsewhere) == "fused"

    def swapped(q, k, cos, sin, unsqueeze_dim=1):
        return k.repeat(1, 2, 1, 1), q[:, ::2]

    inside = unwrap(forward)
    scope = {**inside.__globals__, ropes.ROTATE: swapped}
    assert subclass(FunctionType(inside.__code__, scope)) == "interface"


def test_norms_of_another_kind_are_not_fused():
    """Of another formula, with another epsilon for k, with a forward of its own."""
    changes = {
        "layer norm": lambda module: setattr(module, "k_norm", nn.LayerNorm(module.head_dim)),
        "epsilon": lambda module: setattr(module.k_norm, "variance_epsilon", 1e-5),
        "forward": lambda module: setattr(module.k_norm, "forward", lambda states: states),
    }
    model, _ = attention("qwen3")
    assert ways(model)[0] == "fused"
    for change in changes.values():
        model, module = attention("qwen3")
        change(module)
        assert ways(model) == ["deferred", *["fused"] * (len(ways(model)) - 1)]


def test_a_rotation_that_the_kernels_library_wrapped():
    """It makes modules of functions, so that its own can take their place."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return apply_rotary_pos_emb(*args, **kwargs)

    v_scaled, _ = EQUAL["v scaled"]
    assert set(ways(with_forward(v_scaled, rotate=Func()))) == {"deferred"}


# Which modules are tried


def counted(monkeypatch):
    tried = []
    first = Trial.first_equal
    monkeypatch.setattr(
        Trial, "first_equal", lambda trial, makes: tried.append(trial) or first(trial, makes)
    )
    return tried


def test_modules_of_one_kind_are_tried_once(monkeypatch):
    tried = counted(monkeypatch)
    ways(model_of("llama"))
    assert len(tried) == 1
    model = tiny("llama")
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.ones(32))
    ways(model)
    assert len(tried) == 3
    ways(model_of("gemma2"))
    assert len(tried) == 5, "layers with a window and without"


BY_NUMBER = changed(TURN, TURN + "    if self.layer_idx == 1:\n        q = q * 0.3\n")


def test_layers_that_go_by_their_number_have_none():
    """What one of them does says nothing of the others."""
    assert set(ways(with_forward(BY_NUMBER))) == {"interface"}


def test_layers_that_are_called_in_another_way_are_tried_one_by_one():
    """As where the first layer's values are handed to all others."""
    text = "    v = v if first is None else v * 0.3 + first\n"
    source = changed("    cos, sin =", text + "    cos, sin =")
    source = changed("past_key_values=None,", "past_key_values=None, first=None,", source)
    model = with_forward(source)
    layer = model.model.layers[1]
    layer.self_attn = Handed(layer.self_attn)
    assert ways(model) == ["fused", "deferred"]


class Handed(nn.Module):
    """Calls a module with one argument more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, first=torch.ones(1), **kwargs)


# What 64 rows did not show


UNTRIED = "hidden_states.shape[1] not in (12, 64)"
LATER = {
    "scaled behind": behind(f"q = q * 0.3 if {UNTRIED} else q"),
    "rotated twice": changed(
        TURN,
        TURN + f"    if {UNTRIED}:\n        q, k = apply_rotary_pos_emb(q, k, cos, sin)\n",
    ),
    "another q": behind(f"q = hidden_states.view(heads).transpose(1, 2) if {UNTRIED} else q"),
}


@pytest.mark.parametrize("source", LATER.values(), ids=LATER)
def test_what_reaches_attention_must_be_what_was_handed_on(source, monkeypatch):
    """A pass ends where a module does something else with q and k than in its trial."""
    monkeypatch.setattr(install, "WAYS", (rope_left_out,))
    model = with_forward(source)
    assert set(ways(model)) == {"deferred"}
    with Engine(model, config=CONFIG) as engine:
        completion = engine.generate([[3, 4, 5, 6]])[0].completions[0]
    assert "must not depend on its rows" in completion.error or "twice" in completion.error


def reordered(model):
    """Layers 0 and 1 the other way round only after load."""
    one, two = (layer.self_attn for layer in model.model.layers)

    class Either(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, hidden_states, **kwargs):
            untried = hidden_states.shape[1] not in (12, 64)
            return (self.second if untried else self.first)(hidden_states, **kwargs)

    model.model.layers[0].self_attn = Either(one, two)
    model.model.layers[1].self_attn = Either(two, one)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_each_call_must_come_from_the_module_of_the_survey(way, monkeypatch):
    """As many calls as at load, in another order: another layer's keys would be read."""
    monkeypatch.setattr(install, "WAYS", WAYS[way])
    model = reordered(tiny("llama"))
    prompt = [3, 4, 5, 6, 7]
    with Engine(model, config=CONFIG) as engine:
        error = engine.generate([prompt])[0].completions[0].error
        assert "call 0 of a pass came from model.layers.0.self_attn.second, when" in error
        assert "the model was loaded from model.layers.0.self_attn.first:" in error


# Stand-ins


ROPE = Rope(False, CONTIGUOUS, FP32)


def stand_in_of(kind="llama", whole=True):
    context = AttentionContext()
    _, module = attention(kind)
    return module, deferred(module, context, ROPE, whole), context


def test_a_stand_in_shares_all_and_changes_nothing():
    module, stand_in, _ = stand_in_of()
    before = dict(vars(module))
    assert isinstance(stand_in, type(module)) and type(stand_in).__name__ == "LlamaAttention"
    assert stand_in._parameters is module._parameters and stand_in._modules is module._modules
    assert vars(module) == before and "tinyspec_context" not in vars(module)
    assert rotate_of(module) is apply_rotary_pos_emb


def rotated(stand_in, cos):
    """What a stand-in's forward is handed for q and k of ones."""
    q, k = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
    rotate = stand_in.tinyspec_rope
    return (q, k), rotate(q, k, cos, cos * 0.5)


def test_only_the_running_pass_defers():
    """Elsewhere, and where cos is not of the pass's rows, the module's own function rotates."""
    _, stand_in, context = stand_in_of()
    cos = torch.full((1, 3, 16), 0.5)
    q, _ = rotated(stand_in, cos)[1]
    assert torch.equal(q[..., 8:], torch.full_like(q[..., 8:], 0.75))
    assert context.take_rope(stand_in, q, q) is None
    context.begin(SimpleNamespace(derived={}), None, None)
    (q, k), found = rotated(stand_in, cos)
    assert found[0] is q and found[1] is k
    rope = context.take_rope(stand_in, q, k)
    assert rope is not None and not rope.interleaved and torch.equal(rope.angles[0], cos[0])
    found = []
    thread = Thread(target=lambda: found.extend(rotated(stand_in, cos)[1]))
    thread.start()
    thread.join()
    assert float(found[0][..., 8:].max()) == 0.75
    _, (q, k) = rotated(stand_in, cos[:, :1])
    assert context.take_rope(stand_in, q, k) is None and float(q[..., 8:].max()) == 0.75


def test_a_pending_rope_is_its_layers_and_its_passes():
    """What a failed pass has left is no other layer's, and gone with the pass."""
    _, stand_in, context = stand_in_of()
    _, other, _ = stand_in_of()
    context.begin(SimpleNamespace(derived={}), None, None)
    cos = torch.full((1, 3, 16), 0.5)
    (q, k), _ = rotated(stand_in, cos)
    with pytest.raises(RuntimeError, match="other q and k"):
        context.take_rope(other, q, k)
    for wrong in (0, 1):
        handed, _ = rotated(stand_in, cos)
        reached = [x.clone() if n == wrong else x for n, x in enumerate(handed)]
        with pytest.raises(RuntimeError, match="other q and k"):
            context.take_rope(stand_in, *reached)
    (q, k), _ = rotated(stand_in, cos)
    with pytest.raises(RuntimeError, match="twice"):
        rotated(stand_in, cos)
    assert context.take_rope(stand_in, q, k).q is q
    assert context.take_rope(stand_in, q, k) is None
    rotated(stand_in, cos)
    with pytest.raises(RuntimeError, match="then did not call attention"):
        context.check()
    context.end()
    context.check()


def test_parts_that_are_joined_later_are_not_what_arrives():
    _, stand_in, context = stand_in_of(whole=False)
    context.begin(SimpleNamespace(derived={}), None, None)
    rotated(stand_in, torch.full((1, 3, 16), 0.5))
    other = torch.ones(1, 4, 3, 32)
    assert context.take_rope(stand_in, other, other) is not None


def test_angles_are_worked_out_once_per_pass():
    """For pairs, whatever the number of layers."""
    context = AttentionContext()
    rope = replace(ROPE, interleaved=True, spread=ropes.pairs)
    layers = tiny("glm").model.layers
    stand_ins = [deferred(layer.self_attn, context, rope, True) for layer in layers]
    segments = SimpleNamespace(derived={})
    context.begin(segments, None, None)
    cos = torch.rand(1, 3, 8)
    sin = cos * 0.5
    found = set()
    for stand_in in stand_ins:
        q, k = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
        stand_in.tinyspec_rope(q, k, cos, sin)
        found.add(context.take_rope(stand_in, q, k).angles[0].data_ptr())
    assert len(stand_ins) > 1 and len(found) == 1 and len(segments.derived) == 1


def test_no_modeling_file_is_imported():
    """A release of transformers without one of them must not matter."""
    files = list(Path(tinyspec.__file__).parent.rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                names = [ast.unparse(argument).lstrip("f'\"") for argument in node.args]
            assert not [name for name in names if name.startswith("transformers.models")], path


def test_a_family_that_is_no_longer_fused_says_so_once(monkeypatch, caplog):
    """Where transformers writes its attention in another way, as 5.24 did with decorators."""
    monkeypatch.setattr(install, "WAYS", ())
    install._warn_unfused.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tinyspec"):
        for kind in ("phi3", "phi3", "gpt2"):
            model = tiny(kind)
            install.install(model, CONFIG)
            assert [line for line in caplog.messages if "keeps its own forward" in line] == [
                line for line in caplog.messages if "attention of phi3" in line
            ]
    assert len(caplog.messages) == 1
