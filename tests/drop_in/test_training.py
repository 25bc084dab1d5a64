"""Training, changes, saving and loading around ``model.generate`` of a patched model.

The next call sees every change; the oracle is an unpatched model with the same. What an engine does
with each kind of change: tests/engine/test_changes.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.drop_in import PAD, greedy, own, patched, random_ids
from tests.support.tiny import FAMILIES, tiny

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


def test_a_loop_that_generates_between_steps():
    twin = tiny()
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

    with patched(tiny()) as model:
        # transformers' own generate drops out in train mode; tinyspec evaluates.
        ours = train(model, 4, rollout)
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 1
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_weights_changed_tells_of_writes_through_data():
    with patched(tiny()) as model:
        first = greedy(model, PROMPT, deterministic=True)
        before = model.generate.fingerprint
        for parameter, other in zip(model.parameters(), others().parameters(), strict=True):
            parameter.data.copy_(other)
        model.generate.weights_changed()
        assert greedy(model, PROMPT, deterministic=True) == greedy(others(), PROMPT) != first
        assert model.generate.fingerprint != before


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
