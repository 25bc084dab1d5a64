"""What an engine costs beside its passes: making one, a call, a step with and without user code.

Thread time, on the module tree of Qwen3-0.6B with small widths (``bench_host.py``). Steps have a
stubbed forward and stubbed kernels; an engine and a call run them. Two checkouts are compared by
running this file in both. Run with

    pytest benchmarks/bench_overhead.py --benchmark-enable --benchmark-json=FILE [--rounds N]
    python benchmarks/render.py FILE
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.bench_host import LAYERS, SMOKE_LAYERS, build, stub
from tinyspec import Engine, EngineConfig, SamplingParams, patch, unpatch

PROMPT = [1, 2, 3, 4]
# Tokens of a request, timed together.
TOKENS, SMOKE_TOKENS = 200, 4

pytestmark = pytest.mark.benchmark(
    group="thread time of an engine beside its passes", timer=time.thread_time
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Thread time sees one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def model(smoke: bool) -> Any:
    return build(SMOKE_LAYERS if smoke else LAYERS)


@pytest.fixture(params=[False, True], ids=["plain", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def engine(model: Any, deterministic: bool, smoke: bool) -> Iterator[Engine]:
    """An engine whose passes compute nothing, probed before."""
    config = EngineConfig(verify="padded", max_rows=256 if smoke else None)
    with Engine(model, config=config) as engine:
        first = SamplingParams(max_new_tokens=2, deterministic=deterministic)
        engine.generate([PROMPT], first)
        if deterministic:
            engine.contract.probe()
        stub(engine)
        yield engine


def _params(deterministic: bool, smoke: bool) -> SamplingParams:
    tokens = SMOKE_TOKENS if smoke else TOKENS
    return SamplingParams(max_new_tokens=tokens, deterministic=deterministic)


def bench_engine(benchmark: Any, model: Any, rounds: int) -> None:
    """``Engine(...)`` and its ``close``; nothing is probed."""

    def make() -> None:
        Engine(model).close()

    benchmark.pedantic(make, rounds=3 * rounds, iterations=1, warmup_rounds=1)


def bench_call(benchmark: Any, model: Any, deterministic: bool, smoke: bool, rounds: int) -> None:
    """A call of a patched ``generate`` for one token."""
    patch(model, EngineConfig(max_rows=256 if smoke else None))

    def call() -> None:
        given = torch.tensor([PROMPT])
        out = model.generate(
            given, max_new_tokens=1, do_sample=False, pad_token_id=0, deterministic=deterministic
        )
        assert out.shape == (1, len(PROMPT) + 1)

    benchmark.pedantic(call, rounds=2 if smoke else 50 * rounds, iterations=1, warmup_rounds=3)
    unpatch(model)


def bench_steps_of_generate(
    benchmark: Any, engine: Engine, deterministic: bool, smoke: bool, rounds: int
) -> None:
    """Steps of one request in ``Engine.generate``: no code of the user runs between them."""
    params = _params(deterministic, smoke)

    def run() -> None:
        (output,) = engine.generate([PROMPT], params)
        assert len(output.completions[0].token_ids) == params.max_new_tokens

    benchmark.pedantic(run, rounds=2 if smoke else 10 * rounds, iterations=1, warmup_rounds=1)
    _per_step(benchmark, params)


def bench_single_steps(
    benchmark: Any, engine: Engine, deterministic: bool, smoke: bool, rounds: int
) -> None:
    """Steps of one request by ``Engine.step``: code of the user runs before each of them."""
    params = _params(deterministic, smoke)

    def run() -> None:
        engine.add_request(PROMPT, params)
        while engine.has_unfinished():
            engine.step()

    benchmark.pedantic(run, rounds=2 if smoke else 10 * rounds, iterations=1, warmup_rounds=1)
    _per_step(benchmark, params)


def _per_step(benchmark: Any, params: SamplingParams) -> None:
    if benchmark.stats is not None:  # None where benchmarks are disabled
        benchmark.extra_info["step_us"] = 1e6 * benchmark.stats.stats.median / params.max_new_tokens
