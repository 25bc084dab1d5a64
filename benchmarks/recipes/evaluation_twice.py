"""An evaluation run twice, the second time shuffled: the same score to the last digit.

    python benchmarks/recipes/evaluation_twice.py

The bundled model answers small sums, sampled. Without ``deterministic=True`` the order of the
questions decides who shares a pass with whom, and so the last bits of the log-probabilities.
"""

from __future__ import annotations

import math
import random

from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

QUESTIONS = 48
NAMES, THINGS = ("Ana", "Ben", "Kira", "Paul"), ("apples", "books", "coins", "hats")


def questions() -> list[tuple[str, str]]:
    """(prompt, right answer)."""
    rng = random.Random(0)
    found = []
    for _ in range(QUESTIONS):
        (one, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        told = f"{one} has {a} {thing}. {other} gives {one} {b} more."
        text = f"{told} How many {thing} does {one} have?"
        found.append((f"User: {text}\nAssistant:", f"{a} + {b} = {a + b}."))
    return found


def evaluate(
    engine: Engine, asked: list[tuple[str, str]], deterministic: bool
) -> tuple[float, float]:
    """The share of right answers, and the mean log-probability of all tokens."""
    params = [
        SamplingParams(
            max_new_tokens=24,
            temperature=0.8,
            # Of the question, not of its place.
            seed=sum(map(ord, prompt)),
            deterministic=deterministic,
            logprobs=True,
        )
        for prompt, _ in asked
    ]
    outputs = engine.generate([prompt for prompt, _ in asked], params)
    answers = [output.completions[0] for output in outputs]
    right = sum(answer in c.text for c, (_, answer) in zip(answers, asked, strict=True))
    logprobs = [value for c in answers for value in c.logprobs]
    # A plain sum would depend on the order by itself.
    return right / len(asked), math.fsum(logprobs) / len(logprobs)


def main() -> None:
    asked = questions()
    shuffled = random.Random(1).sample(asked, len(asked))
    # Few at a time, as with a large model: the order decides who runs together.
    config = EngineConfig(max_sequences=6)
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu", config) as engine:
        for deterministic in (False, True):
            first = evaluate(engine, asked, deterministic)
            second = evaluate(engine, shuffled, deterministic)
            print(f"deterministic={deterministic}")
            for name, (right, mean) in (("in order", first), ("shuffled", second)):
                print(f"  {name}  {100 * right:.1f} % right, {mean!r} nats a token")
            if deterministic:
                assert first == second, "the score depends on the order"
                print("  the same, to the last digit")


if __name__ == "__main__":
    main()
