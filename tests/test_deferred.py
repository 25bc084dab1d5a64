"""Deferred rotation: recognised by source, and the same to the bit as transformers' own rotation.

Both ways attend over the same pages by the same kernel; what differs is who rotates. Control: a
kind that is not the module's differs.
"""

from __future__ import annotations

import ast
import copy
import weakref
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from threading import Thread
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.walk import places
from tests.support.zoo import VOCAB, tiny
from tinyspec import EngineConfig, kernels
from tinyspec import deferred as deferring
from tinyspec.attention import AttentionContext
from tinyspec.deferrable import hands_over, source_of
from tinyspec.deferred import ROPES, deferred, layout
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
    """Have ``install`` put in stand-ins for attention alone, and of one way alone."""
    monkeypatch.setattr(patch, "_is_rotary", lambda module: False)
    if way == "interface":
        monkeypatch.setattr(patch, "layout", lambda module: None)
    elif way == "deferred":
        monkeypatch.setattr(patch, "layout", lambda module: layout(module) and "deferred")


def through(model, monkeypatch, way):
    """Logits of a pass of three prompts whose attention goes one way, and the keys and values that
    it wrote; how often the kernel was told to rotate."""
    told = []
    with monkeypatch.context() as patches:
        only(patches, way)
        patched = patch.install(model, EngineConfig(max_model_len=512, max_rows=64))
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


# One of each rotation, and of each thing that may stand before it; all others in the slow tests.
QUICK = (
    *("llama", "qwen3", "glm4", "cohere", "cohere2", "ernie4_5", "gpt_oss", "phi", "phi3", "olmo2"),
    *("stablelm", "gemma3_text", "smollm3", "modernbert-decoder", "mllama"),
)
OTHERS = pytest.mark.slow("model types", 0.3)
WITH_STAND_INS = [kind for kind, cells in places().items() if cells[0] == "fused module"]


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
    found, told = through(model, monkeypatch, "deferred")
    assert same(found, expected)
    assert told > 0 or kind == "granitemoehybrid"  # has no RoPE by default
    if "fused" in layouts(kind):
        found, told = through(model, monkeypatch, "fused")
        assert same(found, expected) and told > 0


@pytest.mark.parametrize("kind", ["glm", "cohere", "llama", "olmo2"])
def test_another_kind_differs(kind, monkeypatch):
    """Control: what is compared depends on the rotation."""
    model = model_of(kind, torch.bfloat16)
    expected, _ = through(model, monkeypatch, "interface")
    (module, *_) = attentions(model)
    rope = deferring._rope(module)
    assert rope is not None
    turned = rope._replace(interleaved=not rope.interleaved)
    monkeypatch.setattr(deferring, "_rope", lambda module: turned)
    found, told = through(model, monkeypatch, "deferred")
    assert told and not same(found[:1], expected[:1])


def test_every_rotation_is_known_and_its_own():
    """Every reference is found in this version of transformers; no two kinds share a source."""
    assert None not in deferring._references()
    kinds = {}
    for family, rope in ROPES.items():
        essence = deferring.essence(deferring.of_family(family, deferring.ROTATE))
        assert kinds.setdefault(essence, rope) == rope


STANDARD = """
def forward(self, hidden_states, position_embeddings, past_key_values=None, **kwargs):
    q = self.q_proj(hidden_states).transpose(1, 2)
    k = self.k_proj(hidden_states).transpose(1, 2)
    v = self.v_proj(hidden_states).transpose(1, 2)
    cos, sin = position_embeddings
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation)
    out, weights = attend(self, q, k, v, None, scaling=self.scaling, **kwargs)
    return self.o_proj(out), weights
"""
TURN = "    q, k = apply_rotary_pos_emb(q, k, cos, sin)\n"
UPDATE = "    if past_key_values is not None:\n"
CUT = "    {0}_rot, {0}_pass = {0}[..., : self.n], {0}[..., self.n :]\n"
JOIN = "    {0} = torch.cat(({0}_rot, {0}_pass), dim=-1)\n"
PARTLY = TURN.replace("q, k", "q_rot, k_rot")
PARTIAL = CUT.format("q") + CUT.format("k") + PARTLY + JOIN.format("q") + JOIN.format("k")


def changed(old, new):
    assert old in STANDARD
    return STANDARD.replace(old, new)


HANDED_OVER = {
    "as it is": STANDARD,
    "some layers": changed(TURN, "    if self.turns:\n    " + TURN),
    "cos and sin where it turns": changed(
        "    cos, sin = position_embeddings\n" + TURN,
        "    if position_embeddings is not None:\n        cos, sin = position_embeddings\n    "
        + TURN,
    ),
    "partial": changed(TURN, PARTIAL),
    "norm before": changed(TURN, "    q = self.q_norm(q)\n" + TURN),
    "no cache": changed(
        UPDATE + "        k, v = past_key_values.update(k, v, self.layer_idx)\n", ""
    ),
    "otherwise for v": changed("attend(self, q", "attend(self, q").replace(
        UPDATE, "    v = v * self.scale\n" + UPDATE
    ),
}
NOT_HANDED_OVER = {
    "norm behind": changed(TURN, TURN + "    q = self.q_norm(q)\n"),
    "norm of k behind": changed(TURN, TURN + "    k = self.k_norm(k)\n"),
    "scaled behind": changed(TURN, TURN + "    q *= self.scale\n"),
    "in place": changed(TURN, TURN + "    q.mul_(2)\n"),
    "k as v": changed(TURN, TURN + "    v = k\n"),
    "noted": changed(TURN, TURN + "    self.last = k\n"),
    "returned": changed("return self.o_proj(out), weights", "return self.o_proj(out), k"),
    "otherwise": changed(
        TURN, "    if self.turns:\n    " + TURN + "    else:\n        k = k * 2\n"
    ),
    "twice": changed(TURN, TURN + TURN),
    "by another name": changed(
        TURN, "    turn = apply_rotary_pos_emb\n" + TURN.replace("apply", "")
    ),
    "more arguments": changed("cos, sin)\n", "cos, sin, unsqueeze_dim=2)\n"),
    "sin first": changed(TURN, TURN.replace("cos, sin", "sin, cos")),
    "k first": changed(TURN, TURN.replace("(q, k", "(k, q")),
    "to other names": changed(TURN, TURN.replace("q, k =", "r, k =")),
    "k attends": changed("attend(self, q, k", "attend(self, k, q"),
    "by keyword": changed("attend(self, q, k, v, None", "attend(self, query=q, key=k, value=v"),
    "attends twice": changed("    return", "    attend(self, q, k, v, None)\n    return"),
    "its own attention": changed(
        "    attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface", "    attend = get"
    ),
    "another attention, at times": changed(
        "    out,", "    if self.eager:\n        attend = eager\n    out,"
    ),
    "cache at all events": changed(UPDATE, "    if True:\n"),
    "another update": changed("update(k, v, self.layer_idx)", "update(k, v, k)"),
    "both updated": changed(
        "k, v = past_key_values.update(k, v", "k, v = past_key_values.update(q, k"
    ),
    "in a loop": changed(TURN, "    for _ in range(2):\n    " + TURN),
    "in a function": changed(TURN, TURN + "    later = lambda: q\n"),
    "renamed within": changed(TURN, TURN + "    print(q := q)\n"),
    "last parts turn": changed(TURN, PARTIAL.replace("(q_rot, q_pass)", "(q_pass, q_rot)")),
    "other cuts": changed(TURN, PARTIAL.replace("q[..., self.n :]", "q[..., self.m :]")),
    "rest used": changed(TURN, PARTIAL + "    q_pass.mul_(2)\n"),
    "parts used": changed(TURN, PARTIAL + "    v = k_rot\n"),
    "one joined": changed(TURN, PARTIAL.replace(JOIN.format("k"), "")),
    "part scaled": changed(TURN, PARTIAL.replace(PARTLY, PARTLY + "    q_rot = q_rot * 2\n")),
}


def read(source):
    (function,) = ast.parse(source).body
    return function


@pytest.mark.parametrize("source", HANDED_OVER.values(), ids=HANDED_OVER)
def test_handed_over(source):
    assert hands_over(read(source))


@pytest.mark.parametrize("source", NOT_HANDED_OVER.values(), ids=NOT_HANDED_OVER)
def test_not_handed_over(source):
    assert not hands_over(read(source))


def attention(kind="llama"):
    return attentions(tiny(kind))[0]


def test_what_runs_must_be_what_stands_there():
    """A decorated forward, one of the module's own, one without source, one whose source is
    another's, another rotation in its module: all left to the interface."""
    assert layout(attention()) == "fused"
    own = attention()
    own.forward = lambda *args, **kwargs: None
    assert layout(own) is None

    def subclass(forward):
        module = attention()
        module.__class__ = type("LlamaAttention", (type(module),), {"forward": forward})
        return module

    forward = type(attention()).forward
    assert layout(subclass(forward)) == "fused"
    assert layout(subclass(torch.no_grad()(forward))) is None
    assert layout(subclass(wraps(forward)(lambda *args, **kwargs: None))) is None
    scope = {}
    exec(STANDARD, scope)
    assert layout(subclass(scope["forward"])) is None
    other = forward.__code__.replace(co_names=(*forward.__code__.co_names[:-1], "other"))
    assert source_of(FunctionType(other, forward.__globals__)) is None

    def turned(q, k, cos, sin, unsqueeze_dim=1):
        return k, q

    for rotate in (turned, None, print):
        scope = {**forward.__globals__, deferring.ROTATE: rotate}
        assert layout(subclass(FunctionType(forward.__code__, scope))) is None


def test_norms_of_another_kind_are_not_fused():
    """Over more than a head, with another forward, with one of its own."""
    assert layout(attention("qwen3")) == "fused"
    wide, other, own = (attention("qwen3") for _ in range(3))
    wide.q_norm = type(wide.q_norm)(64)
    other.k_norm = nn.LayerNorm(other.head_dim)
    own.k_norm.forward = lambda states: states
    assert {layout(module) for module in (wide, other, own)} == {"deferred"}


def test_a_rotation_that_the_kernels_library_wrapped():
    """It makes modules of functions, so that its own can take their place; until one has."""
    rotate = deferring.of_family("llama", deferring.ROTATE)

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return rotate(*args, **kwargs)

    wrapped = Func()
    assert deferring._plain(wrapped) is rotate
    wrapped.forward = print
    assert deferring._plain(wrapped) is not rotate


def stand_in_of(kind="llama"):
    context = AttentionContext()
    module = attention(kind)
    return module, deferred(module, context), context


def test_a_stand_in_shares_all_and_changes_nothing():
    module, stand_in, _ = stand_in_of()
    before = {name: value for name, value in vars(module).items()}
    assert isinstance(stand_in, type(module)) and type(stand_in).__name__ == "LlamaAttention"
    assert stand_in._parameters is module._parameters and stand_in._modules is module._modules
    assert vars(module) == before and "tinyspec_context" not in vars(module)
    assert type(module).forward.__globals__[deferring.ROTATE] is deferring.of_family(
        "llama", "apply_rotary_pos_emb"
    )


def test_a_stand_in_is_freed_at_once():
    """Nothing of it holds itself: no collection of garbage is needed."""
    _, stand_in, _ = stand_in_of()
    gone = weakref.ref(stand_in)
    del stand_in
    assert gone() is None


def rotated(stand_in, context, cos):
    """What a stand-in's forward is handed for q and k of ones."""
    q, k = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
    rotate = stand_in.run_deferred.__globals__[deferring.ROTATE]
    return (q, k), rotate(q, k, cos, cos * 0.5)


def test_only_the_running_pass_defers():
    """Elsewhere, and where cos is not of the pass's rows, the module's own function rotates."""
    _, stand_in, context = stand_in_of()
    cos = torch.full((1, 3, 16), 0.5)
    q, _ = rotated(stand_in, context, cos)[1]
    assert torch.equal(q[..., 8:], torch.full_like(q[..., 8:], 0.75)) and context.note is None
    context.begin(SimpleNamespace(derived={}), None, None)
    (q, k), found = rotated(stand_in, context, cos)
    assert found[0] is q and found[1] is k
    assert context.note is not None and not context.note.interleaved
    assert torch.equal(context.note.cos, cos[0])
    context.note = None
    found = []
    thread = Thread(target=lambda: found.extend(rotated(stand_in, context, cos)[1]))
    thread.start()
    thread.join()
    assert context.note is None and float(found[0][..., 8:].max()) == 0.75
    for other in (cos[:, :1], cos.double()):
        _, (q, _) = rotated(stand_in, context, other)
        assert context.note is None and float(q[..., 8:].max()) == 0.75


def test_a_note_is_its_layers_and_its_passes():
    """What a failed pass has left is no other layer's, and gone with the pass."""
    module, stand_in, context = stand_in_of()
    context.begin(SimpleNamespace(derived={}), None, None)
    cos = torch.full((1, 3, 16), 0.5)
    rotated(stand_in, context, cos)
    with pytest.raises(AssertionError, match="another"):
        context.noted(SimpleNamespace(layer_idx=module.layer_idx + 1))
    rotated(stand_in, context, cos)
    assert context.noted(stand_in).layer == module.layer_idx
    assert context.noted(stand_in) is None
    rotated(stand_in, context, cos)
    context.end()
    assert context.note is None


def test_laid_once_per_pass():
    """GLM's angles are laid out for pairs once, whatever the number of layers."""
    model = tiny("glm")
    context = AttentionContext()
    stand_ins = [deferred(module, context) for module in attentions(model)]
    segments = SimpleNamespace(derived={})
    context.begin(segments, None, None)
    cos = torch.rand(1, 3, 8)
    sin = cos * 0.5
    laid = set()
    for stand_in in stand_ins:
        rotate = stand_in.run_deferred.__globals__[deferring.ROTATE]
        rotate(torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16), cos, sin)
        laid.add(context.note.cos.data_ptr())
        context.note = None
    assert len(stand_ins) > 1 and len(laid) == 1 and len(segments.derived) == 1


@pytest.mark.parametrize("kind", ["glm", "phi3", "gpt_oss"])
def test_suspended_and_resumed(kind, monkeypatch):
    """The stand-ins go and come back with the rest of what ``install`` did."""
    model = tiny(kind)
    own = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    patched = patch.install(model, EngineConfig(max_model_len=64, max_rows=64))
    stand_ins = [m for m in model.modules() if isinstance(m, deferring._Deferred)]
    assert stand_ins
    for _ in range(2):
        patched.suspend()
        now = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
        assert {n: (k, v.keys()) for n, (k, v) in now.items() if n} == {
            n: (k, v.keys()) for n, (k, v) in own.items() if n
        }
        assert patched.resume()
        assert [m for m in model.modules() if isinstance(m, deferring._Deferred)] == stand_ins
    patch.uninstall(model)
    assert not [m for m in model.modules() if isinstance(m, deferring._Deferred)]
