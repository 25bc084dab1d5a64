"""A patched model's ``generate``, all rows deterministic and none, against transformers' own.

fp32 on one thread, rows of equal length: the best case of ``generate``, and what everybody would
pay who asks for determinism always. Both sides of a ratio run in turns in one process, and the
ratio is that of their medians. Everything is probed beforehand. A process each, as in
``bench_generate.py``, whose sides these are:

    for run in 1x64:9 16x64:7 64x64:5 256x64:3 4x512:5 4x2048:3 2x6000:3; do
        OMP_NUM_THREADS=1 pytest benchmarks/bench_promise.py -k "${run%:*}+" --rounds "${run#*:}" \\
            --full --benchmark-json="promise-${run%:*}.json"
    done
    python benchmarks/render.py promise-*.json
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.bench_generate import by_generate, by_tinyspec, patched
from benchmarks.presets import build
from benchmarks.workloads import DEVICE, in_turns, of_shapes
from tinyspec import Engine, EngineConfig

# Rows x tokens in + tokens out.
SHAPES = ["1x64+24", "16x64+24", "64x64+24", "256x64+24", "4x512+24", "4x2048+24", "2x6000+24"]
CONFIG = EngineConfig(prefix_cache=False, max_model_len=6144)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def models(smoke: bool) -> tuple[Any, Any]:
    """Equal models, one for each side; the first is probed, and what was found is on disk."""
    ours, theirs = (
        build("tiny" if smoke else "small", torch.float32, DEVICE, positions=8192).eval()
        for _ in range(2)
    )
    with Engine(ours, config=CONFIG) as engine:
        engine.warm_up()
    return ours, theirs


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.benchmark(group="rows of equal length against generate, fp32, one thread")
def bench_promise(benchmark: Any, name: str, deterministic: bool, smoke: bool, rounds: int) -> None:
    """``ratio`` above 1: tinyspec is faster than transformers."""
    ours, theirs = models(smoke)
    rows, tokens, out = map(int, name.replace("+", "x").split("x"))
    shapes = [(8, 4)] * min(rows, 4) if smoke else [(tokens, out)] * rows
    work = of_shapes(name, shapes, ours.config.vocab_size)
    with patched(ours, CONFIG) as model:
        assert by_tinyspec(model, work, deterministic) == by_generate(theirs, work)
        ratio = in_turns(
            benchmark,
            lambda: by_tinyspec(model, work, deterministic),
            lambda: by_generate(theirs, work),
            rounds,
        )
    benchmark.extra_info["ratio"] = round(ratio, 3)
