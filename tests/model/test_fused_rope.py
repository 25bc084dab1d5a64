"""Which stand-in an attention module gets, found by comparing bits; and the bits of each way.

All ways attend over the same pages by the same kernel; what differs is who norms and rotates.
Modules altered in ways that matter get no stand-in that would not show it, whatever their weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, wraps
from inspect import unwrap
from types import FunctionType

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from tests.support.walk import places
from tests.support.zoo import BUILT, VOCAB, tiny
from tinyspec import Engine, EngineConfig
from tinyspec.config import STATE_TILE
from tinyspec.kernels import backend as kernels
from tinyspec.model import attention_stand_ins, install
from tinyspec.model import attention_stand_ins as ropes
from tinyspec.model.attention import PagedAttention
from tinyspec.model.attention_stand_ins import fused, rope_left_out
from tinyspec.model.introspection import accepted
from tinyspec.runner.batch import Batch
from tinyspec.runner.kv_cache import KVCache

PAGE = 16
LENGTHS = (21, 1, 10)
ROWS = sum(LENGTHS)
RING = 48
CONFIG = EngineConfig(max_model_len=512, max_rows=64)
WAYS = {"interface": (), "deferred": (rope_left_out,), "fused": (fused,)}


@cache
def model_of(kind, dtype=torch.float32):
    return tiny(kind) if dtype == torch.float32 else copy.deepcopy(model_of(kind)).to(dtype)


def ways(model):
    """How each module that calls attention is served, in the order of the model."""
    patched = install.install(model, CONFIG)
    swapped = {id(own): stand_in for _, _, own, stand_in in patched.swapped}
    found = [swapped.get(id(module)) for module in patched.bound]
    fused = ["fused" if isinstance(made, PagedAttention) else "deferred" for made in found]
    return [way if made else "interface" for way, made in zip(fused, found, strict=True)]


def batch_of(ids):
    """Three sequences, each its whole prompt, of the rows ``ids``."""
    parts, page, first = [], 0, 0
    for n in LENGTHS:
        count = -(-n // PAGE)
        parts.append((ids[first : first + n], 0, list(range(page, page + count))))
        page, first = page + count, first + n
    owned = [(owner, 0, n - n % STATE_TILE) for owner, n in enumerate(LENGTHS)]
    return Batch.of(parts, ROWS, PAGE, torch.device("cpu"), (owned, RING)), page


def through(model, monkeypatch, way):
    """Logits of a pass of three prompts whose attention goes one way, and the keys and values that
    it wrote; how often the kernel was to rotate."""
    rotated = []
    with monkeypatch.context() as patches:
        patches.setattr(install, "_is_rotary", lambda module: False)
        patches.setattr(attention_stand_ins, "WAYS", WAYS[way])
        patched = install.install(model, CONFIG)
    context = patched.context
    twins = kernels.load("torch")

    def write(q, k, v, cos, *args, **kwargs):
        rotated.append(cos is not None)
        return twins.fused_kv_write(q, k, v, cos, *args, **kwargs)

    context.kernels = replace(twins, fused_kv_write=write)
    ids = torch.randint(2, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    batch, pages = batch_of(ids.tolist())
    cache = KVCache(patched, pages, PAGE, model.dtype, states=(len(LENGTHS), RING))
    context.hold(*cache.held)
    more = accepted(model, position_ids=batch.positions[None], use_cache=False)
    try:
        context.begin(batch.metadata, batch.slot_mapping, batch.positions)
        with torch.no_grad():
            logits = patched.model(input_ids=ids[None], **more).logits
        context.check()
    finally:
        context.end()
    return [logits, *cache.k, *cache.v], sum(rotated)


def same(some, others):
    return all(map(torch.equal, some, others))


# One of each rotation, and of each thing that may stand before it; all others in the slow tests.
QUICK = (
    *("llama", "qwen3", "glm4", "cohere", "cohere2", "ernie4_5", "gpt_oss", "phi", "phi3", "olmo2"),
    *("stablelm", "gemma3_text", "smollm3", "modernbert-decoder", "mllama", "ministral3"),
)
SLOW = pytest.mark.slow("model types", 0.3)
# In fp32 there is less to be seen: nothing is rounded between norm, rotation and cache.
CASES = [
    pytest.param(kind, dtype, marks=() if quick else SLOW, id=f"{kind}-{str(dtype)[6:]}")
    for kind, cells in places().items()
    if cells[0] == "fused module" and kind in BUILT
    for dtype, quick in ((torch.bfloat16, kind in QUICK), (torch.float32, kind in QUICK[:4]))
]


@pytest.mark.parametrize("kind, dtype", CASES)
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


@pytest.mark.parametrize("kind", ["cohere", "olmo2"])
def test_another_rotation_differs(kind, monkeypatch):
    """Control: what is compared depends on the rotation. Nor would the trial take it."""
    model = model_of(kind, torch.bfloat16)
    expected, _ = through(model, monkeypatch, "interface")

    def others(trial):
        for make in rope_left_out(trial):
            if make.keywords["rope"].interleaved != (kind == "cohere"):
                yield make

    monkeypatch.setitem(WAYS, "deferred", (others,))
    found, rotated = through(model, monkeypatch, "deferred")
    assert same(found, expected) and rotated == 0
    monkeypatch.setattr(attention_stand_ins, "_same", lambda a, b: a is not None)
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
    "scaled behind": behind("q = q * 0.3"),
    "scaled by position": behind("q = q * (1 + (cos[0, :, -1:] * 100).floor())"),
    "scaled from some position on": behind("q = torch.where(sin[..., 7:8] > 0.1, q * 0.3, q)"),
    "a buffer behind": behind("q = q * self.ones"),
    "k as v": behind("v = k"),
    "kept": behind("self.last = k"),
    "returned": changed("self.o_proj(out), weights", "self.o_proj(out), k"),
    "used for the output": changed("self.o_proj(out)", "self.o_proj(out) + k.mean() * 100"),
    "not rotated": changed(TURN, "    k = k * 2\n"),
    "q alone": changed(TURN, "    q, _ = apply_rotary_pos_emb(q, k, cos, sin)\n"),
    "the other way round": changed("attend(self, q, k", "attend(self, q.flip(2), k"),
    "attends twice": changed(OUT, "    attend(self, q, k, v, None)\n" + OUT),
    "last part of a head": partly(
        "[..., 8:]", "[..., :8]", "torch.cat(({0}_pass, {0}_rot), dim=-1)"
    ),
    "part of a head scaled": partly("[..., :8]", "[..., 8:]", between="    q_rot = q_rot * 0.3\n"),
    # What one of the layers does says nothing of the others.
    "by number": behind("q = q * 0.3 if self.layer_idx == 1 else q"),
}


def with_forward(source, ones=False, rotate=apply_rotary_pos_emb):
    """A tiny model whose attention modules run ``source``, with weights that are all alike or
    random."""
    scope = {"apply_rotary_pos_emb": rotate, "torch": torch}
    scope["ALL_ATTENTION_FUNCTIONS"] = ALL_ATTENTION_FUNCTIONS
    exec(source, scope)
    model = tiny("llama")
    for layer in model.model.layers:
        module = layer.self_attn
        module.__class__ = type("OwnAttention", (LlamaAttention,), {"forward": scope["forward"]})
        module.register_buffer("ones", torch.ones(module.head_dim))
        for parameter in module.parameters() if ones else ():
            nn.init.ones_(parameter)
    return model


@pytest.mark.parametrize("source, way", EQUAL.values(), ids=EQUAL)
def test_equal_modules_have_a_stand_in_with_the_bits_of_the_interface(source, way, monkeypatch):
    assert set(ways(with_forward(source))) == {way}
    expected, _ = through(with_forward(source), monkeypatch, "interface")
    found = {w: through(with_forward(source), monkeypatch, w) for w in ("deferred", "fused")}
    assert all(same(tensors, expected) for tensors, _ in found.values())
    assert found["deferred"][1]


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


@pytest.mark.parametrize("ones", [False, True])
def test_unequal_modules_have_none(ones):
    for name, source in UNEQUAL.items():
        assert set(ways(with_forward(source, ones))) == {"interface"}, name


def test_other_rotations_are_not_the_kernels():
    for rotate in (other_sign, k_less, by_position, opposite):
        assert set(ways(with_forward(STANDARD, rotate=rotate))) == {"interface"}, rotate


def with_class(forward):
    """How a module is served whose class has this forward."""
    model = tiny("llama")
    module = model.model.layers[0].self_attn
    module.__class__ = type("LlamaAttention", (LlamaAttention,), {"forward": forward})
    return ways(model)[0]


def swapped(q, k, cos, sin, unsqueeze_dim=1):
    return k.repeat(1, 2, 1, 1), q[:, ::2]


class Rotation(nn.Module):
    """As the kernels library makes modules of functions, so that its own can take their place."""

    def forward(self, *args, **kwargs):
        return apply_rotary_pos_emb(*args, **kwargs)


def test_what_runs_is_what_is_tried():
    """A decorated forward, one of the module's own, another rotation in its module."""
    model = tiny("llama")
    module = model.model.layers[0].self_attn
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
    assert ways(model) == ["interface", "fused"]

    forward = LlamaAttention.forward

    def scaled(self, *args, **kwargs):
        out, weights = forward(self, *args, **kwargs)
        return out * 0.3, weights

    assert with_class(forward) == "fused"
    assert with_class(wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))) == "fused"
    # Tried and run with what is around it; one that keeps its function elsewhere calls it as it is.
    assert with_class(wraps(forward)(scaled)) == "deferred"
    kept = [forward]
    assert with_class(wraps(forward)(lambda *args, **given: kept[0](*args, **given))) == "fused"
    inside = unwrap(forward)
    scope = {**inside.__globals__, ropes.ROTATE: swapped}
    assert with_class(FunctionType(inside.__code__, scope)) == "interface"
    v_scaled, _ = EQUAL["v scaled"]
    assert set(ways(with_forward(v_scaled, rotate=Rotation()))) == {"deferred"}


OTHER_NORMS = [
    lambda module: setattr(module, "k_norm", nn.LayerNorm(module.head_dim)),
    lambda module: setattr(module.k_norm, "variance_epsilon", 1e-5),
    lambda module: setattr(module.k_norm, "forward", lambda states: states),
]


def test_norms_of_another_kind_are_not_fused():
    """Of another formula, with another epsilon for k, with a forward of its own."""
    assert ways(tiny("qwen3"))[0] == "fused"
    for change in OTHER_NORMS:
        model = tiny("qwen3")
        change(model.model.layers[0].self_attn)
        first, *others = ways(model)
        assert first == "deferred" and set(others) == {"fused"}


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
    monkeypatch.setattr(attention_stand_ins, "WAYS", (rope_left_out,))
    model = with_forward(source)
    assert set(ways(model)) == {"deferred"}
    with Engine(model, config=CONFIG) as engine:
        completion = engine.generate([[3, 4, 5, 6]])[0].completions[0]
    assert "must not depend on its rows" in completion.error or "twice" in completion.error


class Either(nn.Module):
    """Attention of the other layer where there are as many rows as at no trial."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden_states, **kwargs):
        untried = hidden_states.shape[1] not in (12, 64)
        return (self.second if untried else self.first)(hidden_states, **kwargs)


def test_each_call_must_come_from_the_module_of_the_survey():
    """As many calls as at load, in another order: another layer's keys would be read."""
    model = tiny("llama")
    one, two = (layer.self_attn for layer in model.model.layers)
    model.model.layers[0].self_attn = Either(one, two)
    model.model.layers[1].self_attn = Either(two, one)
    with Engine(model, config=CONFIG) as engine:
        error = engine.generate([[3, 4, 5, 6, 7]])[0].completions[0].error
        assert "call 0 of a pass came from model.layers.0.self_attn.second, when" in error
        assert "the model was loaded from model.layers.0.self_attn.first:" in error
