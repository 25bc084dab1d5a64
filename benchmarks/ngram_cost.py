"""What the n-gram drafter costs on text without repeats: the bundled model at temperature 2 on
prompts of random tokens, with the drafter and without, in turns.

    python -m benchmarks.ngram_cost [--dtype bfloat16] [--rounds 60] [--threads 2]

A round is four calls of one engine: without, with, with, without. (Two engines differ by up to 3 %
where nothing else does, by where their buffers lie.) Prints the median over rounds of the times
with over those without, by the clock and by CPU time.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

SEQUENCES, PROMPT, TOKENS, WARM = 8, 64, 48, 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=args.dtype).eval()
    engine = Engine(model, config=EngineConfig(drafter="ngram"))
    random = np.random.default_rng(0)
    prompts = random.integers(5, model.config.vocab_size, (SEQUENCES, PROMPT)).tolist()
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    params = [SamplingParams(**lengths, temperature=2.0, seed=n) for n in range(SEQUENCES)]

    def call(drafts: bool) -> np.ndarray:
        began = time.perf_counter(), time.process_time()
        requests = engine.prepare(prompts, params)
        for request in requests if not drafts else ():
            request.drafter = None
        engine.finish(requests, progress=False)
        return np.array([time.perf_counter() - began[0], time.process_time() - began[1]])

    for _ in range(WARM):
        call(False), call(True)
    ratios = []
    for _ in range(args.rounds):
        first, second, third, last = map(call, (False, True, True, False))
        ratios.append((second + third) / (first + last))
    clock, processor = (median(each) for each in zip(*ratios, strict=True))
    print(f"with the drafter over without: clock {clock:.3f}, CPU time {processor:.3f}")


if __name__ == "__main__":
    main()
