"""Training around ``model.generate`` of a patched model: it evaluates, and the next call sees every
step; and training sees the numbers that generation saw, over steps of an optimizer. What an engine
does with each kind of change: tests/engine/test_changes.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.drop_in import PAD, greedy, patched, random_ids
from tests.support.grpo import FAMILIES, PRECISIONS, steps
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


@pytest.mark.crossed(4)
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_training_are_those_of_the_rollouts(family, precision, lora):
    if lora:
        pytest.importorskip("peft")
    found = steps(family, precision, 2, lora)
    assert [step.exact for step in found] == [0.0] * 2
    assert max(step.plain for step in found) > 0, "the control"
