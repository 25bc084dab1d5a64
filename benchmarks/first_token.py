"""How long a first deterministic token takes where nothing is on disk, and how fast one request
decodes while the rest is learnt.

A model of the shape of Qwen3-0.6B with random weights, a prompt of 16 tokens, a fresh process; run
with

    OMP_NUM_THREADS=2 python -m benchmarks.first_token [--small] [--seconds 60] > FILE

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
PASSES, TOKENS = 10, 48


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call: of wall time, and of processor time for each thread."""
    wall, own = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, (time.process_time() - own) / torch.get_num_threads()


def measure(engine: Engine, seconds: float) -> dict[str, Any]:
    """Everything in turn, on an engine that knows nothing."""

    def tokens(count: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=count, ignore_eos=True, deterministic=True)

    found: dict[str, Any] = {}
    proof, own_proof = timed(engine.contract.ensure)
    first, own_first = timed(lambda: engine.generate([PROMPT], tokens(1)))
    found["first_token_s"] = round(proof + first, 2), round(own_proof + own_first, 2)
    found["proof_s"] = round(proof, 2), round(own_proof, 2)
    # A prompt of 16 tokens is one pass of the reference bucket.
    passes = [timed(lambda: engine.generate([[7, *PROMPT[1:]]], tokens(1))) for _ in range(PASSES)]
    one = [min(side) for side in zip(*passes, strict=True)]
    found["reference_pass_s"] = [round(took, 3) for took in one]
    found["proof_passes"] = [round(proof / one[0], 1), round(own_proof / one[1], 1)]
    begun = time.perf_counter()
    stream = engine.stream([PROMPT], tokens(engine.config.max_model_len - len(PROMPT)))
    committed = 0
    for event in stream:
        committed += len(event.token_ids)
        if time.perf_counter() - begun > seconds:
            break
    stream.close()
    found["tokens_while_proving"] = committed
    found["known_buckets"] = engine.contract.results.sizes
    rates = {}
    for name in ("by_then", "everything_known"):
        if name == "everything_known":
            found["rest_s"] = [round(t, 1) for t in timed(engine.warm_up)]
        runs = [timed(lambda: engine.generate([PROMPT], tokens(TOKENS))) for _ in range(3)]
        rates[name] = [TOKENS / min(side) for side in zip(*runs, strict=True)]
        found[f"tokens_per_s_{name}"] = [round(rate, 1) for rate in rates[name]]
    found["share_of_full_speed"] = [
        round(a / b, 2) for a, b in zip(rates["by_then"], rates["everything_known"], strict=True)
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model, for a smoke run")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one request that runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        constants.HF_HOME = folder
        model = presets.build("tiny" if options.small else "qwen3-0.6b", torch.bfloat16, "cpu")
        with Engine(model) as engine:
            found = measure(engine, options.seconds)
    print(json.dumps({"environment": environment(), **found}))


if __name__ == "__main__":
    main()
