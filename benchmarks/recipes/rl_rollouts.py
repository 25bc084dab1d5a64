"""Rollouts for RL that can be repeated: in batches of another size, and after the weights moved.

    python benchmarks/recipes/rl_rollouts.py

A small REINFORCE loop on the bundled model, which is paid for different words. In every round the
same rollouts are drawn twice, in one batch and in small ones: tokens and log-probabilities are the
same bits. They are also those of ``engine.score``: the ratio to the policy that drew them is 1.
"""

from __future__ import annotations

import torch

from tinyspec import Engine, SamplingParams
from tinyspec.tools.demo import BUNDLED

PROMPTS = [
    f"User: Tell me a story about a {animal}.\nAssistant:" for animal in ("fox", "dog", "bee")
]
SAMPLES, ROUNDS, TOKENS = 4, 3, 40


def rollouts(engine: Engine, seed: int, batch: int) -> list:
    """(prompt, tokens, log-probabilities) of every sample, from batches of ``batch`` prompts."""
    params = SamplingParams(
        max_new_tokens=TOKENS,
        temperature=1.0,
        seed=seed,
        num_return_sequences=SAMPLES,
        deterministic=True,
        logprobs=True,
    )
    outputs = []
    for first in range(0, len(PROMPTS), batch):
        outputs += engine.generate(PROMPTS[first : first + batch], params)
    return [(o.prompt_token_ids, c.token_ids, c.logprobs) for o in outputs for c in o.completions]


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list) -> float:
    """One step of REINFORCE; the mean reward."""
    rewards = torch.tensor([float(len(set(tokens))) for _, tokens, _ in samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for (prompt, tokens, _), advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor([prompt + tokens])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        (-advantage * chosen.mean() / len(samples)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item()


def main() -> None:
    with Engine.from_pretrained(BUNDLED, "float32", "cpu") as engine:
        optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.01)
        prints = set()
        for number in range(ROUNDS):
            together = rollouts(engine, seed=number, batch=len(PROMPTS))
            apart = rollouts(engine, seed=number, batch=1)
            assert together == apart, "other bits in another batch"
            prompts, tokens, drawn = (list(column) for column in zip(*together, strict=True))
            scores = engine.score(prompts, tokens, SamplingParams(temperature=1.0))
            assert scores == drawn, "score gives other bits than the rollout"
            prints.add(engine.fingerprint)
            reward = update(engine.model, optimizer, together)
            count = sum(map(len, tokens))
            print(
                f"round {number}: {len(tokens)} rollouts, {count} tokens, reward {reward:.2f}; "
                f"batches of {len(PROMPTS)} and of 1, and score: the same {count} log-probabilities"
            )
        assert len(prints) == ROUNDS, "the fingerprint follows the weights"
        print(f"{len(prints)} fingerprints, one for each state of the weights")


if __name__ == "__main__":
    main()
