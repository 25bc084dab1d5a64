"""How long a first deterministic token takes where nothing is on disk.

A model of the shape of Qwen3-0.6B with random weights, a prompt of 16 tokens, a fresh process; run
with

    OMP_NUM_THREADS=2 python -m benchmarks.first_token [--small] > FILE

Prints one line of JSON. Seconds are of wall time, and beside them of processor time for each
thread, which other processes of a busy machine do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub import constants

from benchmarks import presets
from benchmarks.environment import environment
from tinyspec import Engine, SamplingParams

PROMPT = [*range(5, 21)]
PASSES = 10


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call: of wall time, and of processor time for each thread."""
    wall, own = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, (time.process_time() - own) / torch.get_num_threads()


def measure(engine: Engine) -> dict[str, Any]:
    """Everything in turn, on an engine that knows nothing."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, deterministic=True)
    proof, first = timed(engine.contract.ensure), timed(lambda: engine.generate([PROMPT], params))
    # A prompt of 16 tokens is one pass of the reference bucket.
    passes = [timed(lambda: engine.generate([[7, *PROMPT[1:]]], params)) for _ in range(PASSES)]
    one = [min(side) for side in zip(*passes, strict=True)]
    return {
        "first_token_s": [round(sum(both), 2) for both in zip(proof, first, strict=True)],
        "proof_s": [round(took, 2) for took in proof],
        "reference_pass_s": [round(took, 3) for took in one],
        "proof_passes": [round(all_ / each, 1) for all_, each in zip(proof, one, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model, for a smoke run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        constants.HF_HOME = folder
        model = presets.build("tiny" if options.small else "qwen3-0.6b", torch.bfloat16, "cpu")
        with Engine(model) as engine:
            found = measure(engine)
    print(json.dumps({"environment": environment(), **found}))


if __name__ == "__main__":
    main()
