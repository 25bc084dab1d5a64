"""A model with recurrent layers: its own `generate` in transformers, plain and deterministic here.

All in turns in one process, greedy, on random weights. Run with

    python -m benchmarks.bench_hybrid [--rounds N] [--dtype float32] [--smoke]

Prints Markdown: medians of seconds, and of each round's ratios (above 1: tinyspec is faster, or
deterministic is).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from operator import truediv
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.presets import PRESETS, drawn
from tinyspec import Engine, EngineConfig, SamplingParams

# Tokens of each prompt, and of its answer.
CASES = {
    "64 in, 64 out, batch 1": [(64, 64)],
    "batch 16": [(64, 64)] * 16,
    "batch 16, 16 to 196 in": [(16 + 12 * n, 64) for n in range(16)],
    "batch 16, 16 to 196 in, 8 to 128 out": [
        (16 + 12 * n, 8 + 8 * (7 * n % 16)) for n in range(16)
    ],
    "2,048 in, 1 out": [(2048, 1)],
}
SMOKE = {"smoke": [(9, 3), (20, 2)]}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
SMALL |= {"layer_types": ["linear_attention", "full_attention"]}


def own(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> None:
    """transformers' generate, padded on the left, until the longest answer is there."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    given = {"attention_mask": mask, "max_new_tokens": tokens, "min_new_tokens": tokens}
    model.generate(ids, **given, do_sample=False, pad_token_id=0)


def measure(model: PreTrainedModel, engine: Engine, case: str, rounds: int) -> str:
    """A line of the table."""
    rng, vocab = random.Random(0), model.config.vocab_size
    lengths, answers = zip(*(CASES | SMOKE)[case], strict=True)
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in lengths]

    def ours(deterministic: bool) -> Callable[[], object]:
        common = SamplingParams(ignore_eos=True, deterministic=deterministic)
        params = [replace(common, max_new_tokens=n) for n in answers]
        return lambda: engine.generate(prompts, params)

    sides = [lambda: own(model, prompts, max(answers)), ours(False), ours(True)]
    taken: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, seconds in zip(sides, taken, strict=True):
            begun = time.perf_counter()
            side()
            if number:  # the first one warms up
                seconds.append(time.perf_counter() - begun)
    seconds = " | ".join(f"{median(side):.2f}" for side in taken)
    ratios = (median(map(truediv, *taken[n : n + 2])) for n in range(2))
    return f"| {case} | {seconds} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; reports nothing")
    options = parser.parse_args()
    shape = PRESETS["hybrid"] | (SMALL if options.smoke else {})
    model = drawn(shape, getattr(torch, options.dtype), "cpu")
    ratios = "plain over transformers | deterministic over plain"
    print(f"| requests | transformers, s | plain, s | deterministic, s | {ratios} |")
    print("| --- " * 6 + "|")
    with Engine(model, config=EngineConfig(prefix_cache=False)) as engine:
        if not options.smoke:
            engine.warm_up()
        for case in SMOKE if options.smoke else CASES:
            print(measure(model, engine, case, 1 if options.smoke else options.rounds), flush=True)


if __name__ == "__main__":
    main()
