"""Training, changes, saving and loading around ``model.generate`` of a patched model.

The next call sees every change; the oracle is an unpatched model with the same. What an engine does
with each kind of change: tests/engine/test_changes.py."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support.drop_in import PAD, greedy, own, patched, random_ids
from tests.support.tiny import FAMILIES, tiny
from tests.support.tolerances import LOGITS, OTHER_WEIGHTS, close

PROMPT = random_ids(11)
BATCH = torch.tensor([random_ids(24, seed) for seed in range(3)])


def others(family: str = "llama", seed: int = 5):
    """Another model's weights; those that begin as ones (norms) are others, too."""
    model = tiny(family, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 + 1.4 * torch.rand(parameter.shape, generator=generator))
    return model


def train(model, steps: int, between) -> list[object]:
    """Losses and gradients of a loop that calls ``between`` before every optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    seen: list[object] = []
    torch.manual_seed(1)
    for step in range(steps):
        model.train()
        between(model, step)
        loss = model(BATCH, labels=BATCH).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_loop_that_generates_between_steps(family):
    twin = tiny(family)
    expected, found = [], []

    def evaluate(model, _):
        expected.append(greedy(model.eval(), PROMPT))
        model.train()

    plain = train(twin, 4, evaluate)

    def rollout(model, step):
        assert all(module.training for module in model.modules())
        found.append(greedy(model, PROMPT))
        asked = {"do_sample": True, "seed": 3, "max_new_tokens": 6, "pad_token_id": PAD}
        model.generate(BATCH, **asked, deterministic=bool(step % 2))
        assert all(module.training for module in model.modules())

    with patched(tiny(family)) as model:
        # transformers' own generate drops out in train mode; tinyspec evaluates.
        ours = train(model, 4, rollout)
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 1
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def load(model, other):
    model.load_state_dict(other.state_dict())
    return model


def assign(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    return model


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [load, assign])
def test_loaded_weights_are_seen(family, change):
    other = others(family)
    with patched(tiny(family)) as model:
        before = logits_of(model)
        change(model, other)
        twin = copy.deepcopy(model)
        expected = greedy(twin, PROMPT)
        with torch.no_grad():
            logits = twin(torch.tensor([PROMPT])).logits[0, -1]
        for deterministic in (False, True):
            assert greedy(model, PROMPT, deterministic=deterministic) == expected
            found = logits_of(model, deterministic=deterministic)
            assert close(found, logits, LOGITS)
        assert not close(before, logits, OTHER_WEIGHTS)


def logits_of(model, **settings) -> torch.Tensor:
    """Logits of the first token behind PROMPT."""
    found = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=1,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return found.logits[0][0]


def test_weights_changed_tells_of_writes_through_data():
    with patched(tiny()) as model:
        first = greedy(model, PROMPT, deterministic=True)
        before = model.generate.fingerprint
        for parameter, other in zip(model.parameters(), others().parameters(), strict=True):
            parameter.data.copy_(other)
        model.generate.weights_changed()
        assert greedy(model, PROMPT, deterministic=True) == greedy(others(), PROMPT) != first
        assert model.generate.fingerprint != before


def test_save_and_load(tmp_path):
    with patched(tiny()) as model:
        first = greedy(model, PROMPT)
        model.save_pretrained(tmp_path / "patched")
        tiny().save_pretrained(tmp_path / "plain")
        for file in (tmp_path / "plain").iterdir():
            assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
        assert greedy(loaded, PROMPT) == first
        assert list(model.state_dict()) == list(tiny().state_dict())
        with patched(loaded):
            assert greedy(loaded, PROMPT) == first


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_copy_of_a_patched_model_is_not_patched(copied, family):
    with patched(tiny(family)) as model:
        first = greedy(model, PROMPT)
        twin = copied(model)
        assert not isinstance(twin.generate, type(model.generate))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert greedy(twin, PROMPT) == first != greedy(model, PROMPT)
        assert torch.equal(twin(BATCH).logits, tiny(family)(BATCH).logits)
        # It can be trained, copied, patched and unpatched like any other.
        tinyspec.unpatch(twin)
        with patched(twin):
            assert greedy(twin, PROMPT) == first
        assert greedy(copied(twin), PROMPT) == first
        # An instance's methods may stay, if they are those of the class.
        methods = {"generate", "generate_batch"}
        assert vars(twin).keys() - methods == vars(tiny(family)).keys()
        assert all(getattr(twin, m).__func__ is getattr(type(twin), m) for m in methods)


def test_dtypes_between_calls():
    twin = tiny()
    with patched(tiny()) as model:
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float32):
            model.to(dtype), twin.to(dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert torch.equal(model(BATCH).logits, twin(BATCH).logits)
            if dtype == torch.float32:
                assert greedy(model, PROMPT) == greedy(twin, PROMPT)
            elif dtype == torch.bfloat16:
                found = greedy(model, PROMPT, deterministic=True)
                with patched(tiny().to(dtype)) as other:
                    other.load_state_dict(model.state_dict())
                    assert greedy(other, PROMPT, deterministic=True) == found


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
