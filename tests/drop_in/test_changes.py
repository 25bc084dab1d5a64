"""Hooks and modules of a patched model that come, go and change between calls: the next call sees
it.

The oracle is an unpatched model with the same changes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tinyspec
from tests.support.budget import first
from tests.support.changes import FOLLOWED, model_for, threads
from tests.support.drop_in import SMALL, greedy, own, patched, random_ids
from tests.support.tiny import FAMILIES, tiny
from tinyspec import EngineConfig

PROMPT = random_ids(11)


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_fire(family):
    """On all that has weights but attention itself, whose place another module takes."""
    model = tiny(family)
    hooks = {}
    with patched(model):
        for name, module in model.named_modules():
            kind = type(module).__name__
            inside = ".attn." in name or "attention." in name or "self_attn." in name
            whole = name == "" or kind.endswith(("MLP", "Norm", "Model"))
            if (whole and not inside) or isinstance(module, (nn.Linear, nn.Embedding)):
                hooks[name] = Counts(), Counts()
                module.register_forward_hook(hooks[name][0])
                module.register_forward_pre_hook(hooks[name][1])
        assert greedy(model, PROMPT, 4) == greedy(own(family), PROMPT, 4)
        assert {name for name, pair in hooks.items() if min(c.calls for c in pair) < 4} == set()


def halve(module, args, output):
    return output * 0.5


def test_hooks_that_come_and_go():
    model, twin = tiny(), tiny()
    places = ["model.norm", "lm_head", "model.layers.0.mlp", "model.layers.1.self_attn.q_proj"]
    with patched(model):
        first = greedy(model, PROMPT)
        for place in places:
            handles = [m.get_submodule(place).register_forward_hook(halve) for m in (model, twin)]
            for deterministic in (False, True):
                found = greedy(model, PROMPT, 12, deterministic=deterministic)
                assert found == greedy(twin, PROMPT, 12), place
            for handle in handles:
                handle.remove()
            assert greedy(model, PROMPT) == first
        # One hook in the place of another: as many as before.
        module = model.model.layers[0].mlp
        module.register_forward_hook(halve).remove()
        counts = Counts()
        module.register_forward_hook(counts)
        assert greedy(model, PROMPT) == first
        assert counts.calls >= 8


def test_control_the_hook_matters():
    twin = tiny()
    twin.model.layers[0].mlp.register_forward_hook(halve)
    assert greedy(twin, PROMPT, 12) != greedy(own(), PROMPT, 12)


def test_a_hook_on_attention_is_called():
    model, twin = tiny(), tiny()
    with patched(model):
        greedy(model, PROMPT)
        counts = Counts()
        for one in (model, twin):
            handle = one.model.layers[0].self_attn.register_forward_hook(
                lambda module, args, output: (counts(), (output[0] * 0.5, *output[1:]))[1]
            )
        expected = greedy(twin, PROMPT)
        counts.calls = 0
        assert greedy(model, PROMPT) == expected
        assert counts.calls >= 8
        handle.remove()


class Scaled(nn.Module):
    """Any module in the place of another."""

    def __init__(self, inner, factor=0.5):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return (out[0] * self.factor, *out[1:]) if isinstance(out, tuple) else out * self.factor


class LowRank(nn.Module):
    """An adapter as peft puts them."""

    def __init__(self, base):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=generator))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 4, generator=generator))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def swap(model, place, make):
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(place)))


@pytest.mark.crossed(1.2)
@pytest.mark.parametrize("make", [Scaled, LowRank, copy.deepcopy])
@pytest.mark.parametrize(
    "place",
    ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.v_proj"],
)
def test_replaced_linears(make, place):
    model, twin = tiny(), tiny()
    with patched(model):
        first = greedy(model, PROMPT)
        before = model.get_submodule(place)
        for one in (model, twin):
            swap(one, place, make)
        for deterministic in (False, True):
            expected = greedy(twin, PROMPT)
            assert greedy(model, PROMPT, deterministic=deterministic) == expected
        swap(model, place, lambda _: before)
        assert greedy(model, PROMPT) == first


@pytest.mark.parametrize(
    "place",
    first(2, ["model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.0", "model.norm"], 3),
)
def test_wrapped_modules(place):
    if place == "model.layers.1.self_attn":
        # transformers' layer asks its attention for nothing, so a wrapper will do.
        assert not hasattr(Scaled, "layer_idx")
    model, twin = tiny(), tiny()
    with patched(model):
        first = greedy(model, PROMPT, 16)
        for one in (model, twin):
            swap(one, place, Scaled)
        for deterministic in (False, True):
            expected = greedy(twin, PROMPT, 16)
            assert greedy(model, PROMPT, 16, deterministic=deterministic) == expected
        swap(model, place, lambda wrapper: wrapper.inner)
        assert greedy(model, PROMPT, 16) == first


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_norms(family):
    """Inside attention, too, where the model has some."""
    model, twin = tiny(family), tiny(family)
    with patched(model):
        greedy(model, PROMPT)
        for one in (model, twin):
            places = [n for n, m in one.named_modules() if "Norm" in type(m).__name__]
            for n, place in enumerate(places):
                swap(one, place, copy.deepcopy)
                with torch.no_grad():
                    weight = one.get_submodule(place).weight
                    weight += torch.linspace(-1, 1, len(weight)) * (n + 1) / 4
        assert greedy(model, PROMPT) == greedy(twin, PROMPT) != greedy(own(family), PROMPT)


def test_a_parametrized_weight():
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    model, twin = tiny(), tiny()
    with patched(model):
        first = greedy(model, PROMPT)
        for one in (model, twin):
            parametrize.register_parametrization(
                one.model.layers[0].mlp.up_proj, "weight", Doubled()
            )
        assert greedy(model, PROMPT, 16) == greedy(twin, PROMPT, 16)
        parametrize.remove_parametrizations(
            model.model.layers[0].mlp.up_proj, "weight", leave_parametrized=False
        )
        assert greedy(model, PROMPT) == first


@pytest.mark.parametrize(
    "place",
    ["model.layers.0.mlp", "lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0"],
)
def test_a_forward_of_its_own(place):
    """As accelerate and peft put them on instances."""
    model, twin = tiny(), tiny()
    with patched(model):
        first = greedy(model, PROMPT)
        for one in (model, twin):
            module = one.get_submodule(place)
            module.forward = lambda *a, inner=module.forward, **k: inner(*a, **k) * -0.5
        assert greedy(model, PROMPT) == greedy(twin, PROMPT) != first
        del model.get_submodule(place).forward
        assert greedy(model, PROMPT) == first


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation(implementation):
    with patched(tiny()) as model:
        first = greedy(model, PROMPT)
        model.set_attn_implementation(implementation)
        assert greedy(model, PROMPT) == first
        assert model.config._attn_implementation == implementation
    assert model.config._attn_implementation == implementation


def test_a_change_that_cannot_be_served_and_back():
    with patched(tiny()) as model:
        first = greedy(model, PROMPT)
        before = [layer.self_attn for layer in model.model.layers]
        for layer in model.model.layers:
            layer.self_attn = nn.Identity()
        for _ in range(2):
            with pytest.raises(TypeError):  # of its own generate
                greedy(model, PROMPT)
        for layer, attention in zip(model.model.layers, before, strict=True):
            layer.self_attn = attention
        assert greedy(model, PROMPT) == first
    tinyspec.patch(model, SMALL)
    tinyspec.unpatch(model)


def test_a_setting_of_a_module():
    prompt = random_ids(40, 1)
    asked = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    asked |= {"deterministic": True, "pad_token_id": 0}
    twin = tiny()
    twin.model.layers[0].input_layernorm.variance_epsilon = 0.5
    with patched(tiny()) as model, patched(twin):
        first = model.generate.fingerprint
        model.generate([prompt], **asked)
        model.model.layers[0].input_layernorm.variance_epsilon = 0.5
        ours, expected = (each.generate([prompt], **asked) for each in (model, twin))
        assert all(map(torch.equal, ours.logits, expected.logits))
        assert model.generate.fingerprint == twin.generate.fingerprint != first


class Changes:
    """A streamer that makes a change behind so many tokens."""

    def __init__(self, model, change, after=3):
        self.model, self.change, self.left = model, change, after + 1

    def put(self, value):
        self.left -= 1
        if self.left == 0 and self.change is not None:
            self.change(self.model)

    def end(self):
        pass


ASKED = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
ASKED |= {"deterministic": True, "pad_token_id": 0, "do_sample": False}


def answers(model):
    """Logits of a call, and the fingerprint."""
    return model.generate([PROMPT], **ASKED).logits, model.generate.fingerprint


def same(found, expected):
    return found[1] == expected[1] and all(map(torch.equal, found[0], expected[0]))


SOME = ("function", "softcap")
SERVED = [
    c if c.__name__ in SOME else pytest.param(c, marks=pytest.mark.slow("crosses", 1))
    for c in FOLLOWED
    if c is not threads
]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("change", SERVED)
@pytest.mark.parametrize("where", ["between calls", "streamer"])
def test_every_change(change, where):
    """A call under way is given up; the next one has the bits of a new engine."""
    # One token a step: no verify commits all of them.
    config = EngineConfig(reference_rows=16, page_size=8, verify="padded")
    twin = model_for(change)
    change(twin)
    with patched(twin, config):
        expected = answers(twin)
    model = model_for(change)
    with patched(model, config):
        before = answers(model)
        assert not same(before, expected)
        model.generate([PROMPT], **ASKED, streamer=Changes(model, None))  # control
        if where == "streamer":
            with pytest.raises(RuntimeError, match="changed"):
                model.generate([PROMPT], **ASKED, streamer=Changes(model, change))
        else:
            change(model)
        assert same(answers(model), expected)
