"""Plain requests against transformers' ``generate``.

Both sides of a ratio run in turns in one process, and the ratio is that of their medians. Before
anything is timed in fp32, both must give the same tokens. Everything is included on both sides:
prompts, planning, sampling, lists in and lists out. What ``deterministic=True`` costs is measured
by ``bench_share.py``. Run with

    pytest benchmarks/bench_generate.py --benchmark-enable --benchmark-json=FILE
    python benchmarks/render.py FILE
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.presets import build
from benchmarks.workloads import DEVICE, Workload, in_turns, of_shapes
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.linears import by_onednn


def workload(name: str, vocab: int, smoke: bool) -> Workload:
    """``equal-B``: B prompts of 64 tokens, 40 out; ``ragged``: 32 of 8 to 256, 8 to 128 out."""
    rng = random.Random(1)
    if name == "ragged":
        count, long, out = (4, 24, 8) if smoke else (32, 256, 128)
        shapes = [(rng.randint(8, long), rng.randint(min(8, out), out)) for _ in range(count)]
    else:
        batch = int(name.split("-")[1])
        shapes = [(8, 4)] * min(batch, 4) if smoke else [(64, 40)] * batch
    return of_shapes(name, shapes, vocab)


@cache
def model_for(dtype: str, smoke: bool, side: str) -> Any:
    """The same weights for both sides; two models, as an engine patches its own."""
    model = build("tiny" if smoke else "small", getattr(torch, dtype), DEVICE).eval()
    if side == "transformers, same linears":
        for parent, name, linear in by_onednn(model):
            setattr(parent, name, linear)
    model.generation_config.eos_token_id = None
    return model


def transformers_generate(model: Any, work: Workload) -> list[list[int]]:
    """Left-padded, the longest output for all: what a user of ``generate`` has to do."""
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in work.prompts], device=DEVICE)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts], device=DEVICE
    )
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(work.lengths),
        do_sample=False,
        pad_token_id=0,
    )
    rows = out[:, longest:].tolist()
    return [row[:length] for row, length in zip(rows, work.lengths, strict=True)]


def tinyspec_generate(engine: Engine, work: Workload) -> list[list[int]]:
    base = SamplingParams(ignore_eos=True)
    params = [replace(base, max_new_tokens=length) for length in work.lengths]
    outputs = engine.generate([list(p) for p in work.prompts], params)
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("dtype", "theirs"),
    [
        ("float32", "transformers"),
        ("float32", "transformers, same linears"),
        ("bfloat16", "transformers"),
    ],
)
@pytest.mark.parametrize("name", ["equal-1", "equal-4", "equal-16", "equal-64", "ragged"])
@pytest.mark.benchmark(group="plain requests against transformers generate()")
def bench_plain(
    benchmark: Any, name: str, dtype: str, theirs: str, smoke: bool, rounds: int
) -> None:
    """``ratio`` above 1: tinyspec is faster than transformers.

    In fp32 on a CPU tinyspec runs linears by oneDNN; "same linears" gives them to both sides.
    """
    model = model_for(dtype, smoke, theirs)
    work = workload(name, model.config.vocab_size, smoke)
    # Every round has the same prompts, and transformers computes them anew.
    config = EngineConfig(prefix_cache=False)
    with Engine(model_for(dtype, smoke, "tinyspec"), config=config) as engine:
        ours = tinyspec_generate(engine, work)
        if dtype == "float32":
            assert ours == transformers_generate(model, work)
        assert list(map(len, ours)) == list(work.lengths)
        ratio = in_turns(
            benchmark,
            lambda: tinyspec_generate(engine, work),
            lambda: transformers_generate(model, work),
            rounds,
        )
    benchmark.extra_info["ratio"] = round(ratio, 3)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["tokens_per_second"] = round(work.tokens / seconds, 1)
