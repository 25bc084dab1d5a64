"""``generate`` of 8 x 24 tokens on the bundled model, each call after an optimizer step, as in
training: a patched model, plain and deterministic, against transformers' own, in turns.

    python -m benchmarks.small_calls [--dtype bfloat16] [--rounds 60] [--threads 2]

Prompts are of six lengths, and no call ends early. In fp32 all give the same tokens before anything
is timed; in bf16, in which the model is stored, what differs is near a tie. Prints medians, and the
medians of each call's time over that of transformers before it.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyspec import patch
from tinyspec.tools.demo import BUNDLED

PROMPTS = (
    "Once upon a time there was a fox.",
    "The little bird sat",
    "A boy named Tim went",
    "One day, a girl",
    "Mom said",
    "The sun was",
    "In the garden",
    "A big dog",
)
TOKENS, WARM = 24, 6


class Side:
    """A model, an optimizer of it, and what its calls are asked for."""

    def __init__(self, dtype: str, patched: bool, **asked: bool):
        self.model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype).eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.asked = asked
        if patched:
            patch(self.model)

    def call(self, inputs: dict[str, torch.Tensor]) -> tuple[float, list[list[int]]]:
        """An optimizer step, then a call: its seconds, and its tokens."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        began = time.perf_counter()
        lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        found = self.model.generate(**inputs, **lengths, do_sample=False, **self.asked)
        return time.perf_counter() - began, found.tolist()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = dict(tokenizer([*PROMPTS], return_tensors="pt", padding=True))
    sides = {
        "transformers": Side(args.dtype, patched=False),
        "plain": Side(args.dtype, patched=True),
        "deterministic": Side(args.dtype, patched=True, deterministic=True),
    }
    for _ in range(WARM):
        tokens = [side.call(inputs)[1] for side in sides.values()]
        assert args.dtype != "float32" or all(each == tokens[0] for each in tokens)
    times = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            times[name].append(side.call(inputs)[0])
    for name, taken in times.items():
        over = median(a / b for a, b in zip(taken, times["transformers"], strict=True))
        print(f"{name}: {1e3 * median(taken):.1f} ms, over transformers {over:.3f}")


if __name__ == "__main__":
    main()
