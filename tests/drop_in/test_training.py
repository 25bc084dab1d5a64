"""Training, changes, saving and loading around ``model.generate`` of a patched model.

The next call sees every change; the oracle is an unpatched model with the same. What an engine does
with each kind of change: tests/engine/test_changes.py."""

from __future__ import annotations

import torch

from tests.support.drop_in import PAD, greedy, patched, random_ids
from tests.support.tiny import tiny

PROMPT = random_ids(11)
BATCH = torch.tensor([random_ids(24, seed) for seed in range(3)])


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
