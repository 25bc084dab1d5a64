"""Fresh processes, each with an environment of its own, and what a pass and its fingerprint are
there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Two threads: with one, most variables would change nothing.
BASE = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "0"}

# Wide enough that libraries cut their sums.
MODEL = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
def model_of(dtype):
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
"""

PASSES = (
    MODEL
    + """
import json, sys
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec import UnsupportedModelError
params = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)
prompts = [[n * 7 % 512 for n in range(length)] for length in (3, 90, 200)]
found = {}
for dtype in sys.argv[1:]:
    try:
        with Engine(model_of(dtype), config=EngineConfig(max_model_len=256)) as engine:
            outputs = engine.generate(prompts, params)
            bits = [(c.token_ids, c.logprobs) for output in outputs for c in output.completions]
            found[dtype] = {"bits": bits, "fingerprint": engine.fingerprint}
    except (DeterminismError, UnsupportedModelError, RuntimeError):
        found[dtype] = None
print(json.dumps(found))
"""
)

# Random allocations, some of which stay, before anything of tinyspec runs.
CANARY = (
    MODEL
    + """
import random, sys
rng = random.Random(int(sys.argv[1]))
kept = [torch.empty(rng.randrange(1, 1 << rng.randrange(4, 23))) for _ in range(rng.randrange(200))]
kept = [x for x in kept if rng.random() < 0.5]
kept += [bytearray(rng.randrange(1, 1 << 16)) for _ in range(rng.randrange(200))]
if rng.random() < 0.5:
    torch.randn(300, 300) @ torch.randn(300, 300)
from tinyspec import Engine, EngineConfig
from tinyspec.determinism.environment import canary
for dtype in ("float32", "bfloat16", "float16"):
    with Engine(model_of(dtype), config=EngineConfig(max_model_len=256)) as engine:
        print(canary(engine.runner.model, engine.config.reference_rows), end=" ")
"""
)


def child(code: str, *arguments: str, **variables: str) -> str:
    """What ``code`` prints in a fresh process with these variables beside BASE."""
    unset = ("OPENBLAS_CORETYPE", *BASE)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**kept, **BASE, **variables},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def passes(*dtypes: str, **variables: str) -> dict[str, Any]:
    """By dtype: bits and fingerprint of deterministic requests; None where they are refused."""
    return json.loads(child(PASSES, *dtypes, **variables).splitlines()[-1])
