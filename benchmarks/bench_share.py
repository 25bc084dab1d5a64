"""What ``deterministic=True`` costs: a growing share of the requests, against none of them.

Both sides of every ratio run in turns in one process, on the same engine or on engines of the same
weights, with the same prompts, seeds and arrivals; a ratio is that of their medians. The model has
random weights, its logits scaled until the next token has a trained model's entropy, which is
measured. Run with

    pytest benchmarks/bench_share.py --full --benchmark-json=FILE [--rounds N]
    python benchmarks/render.py FILE
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, nan
from statistics import median
from typing import Any

import pytest

from benchmarks.workloads import (
    ARRIVING,
    EntropyMeter,
    Served,
    Workload,
    arriving,
    in_turns,
    of_shapes,
    open_engine,
    random_tokens,
    serve,
)
from tinyspec import Engine, RequestOutput, SamplingParams

SHARES = (0, 2, 5, 10, 20, 50, 100)
ALL = SHARES[-1]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(dtype: str, smoke: bool) -> Iterator[Engine]:
    with open_engine(dtype, smoke) as engine:
        yield engine


@pytest.mark.parametrize("name", ARRIVING)
@pytest.mark.benchmark(group="a share of the requests deterministic")
def bench_share(benchmark: Any, engine: Engine, name: str, smoke: bool, rounds: int) -> None:
    """``sweep`` has one entry a share; all run in every round, in an order that is then reversed.

    In every run a deterministic request must give the tokens that it gives when all are
    deterministic, and the mean entropy of the plain requests' tokens must be a trained model's.
    """
    work = arriving(name, engine.model.config.vocab_size, smoke)
    meter = EntropyMeter()
    serve(engine, work, work.params((), processors=(meter,)))
    assert 1 < meter.mean < 4, "nats a token"
    params = {share: work.params(work.chosen(share)) for share in SHARES}
    engine.release()
    expected = serve(engine, work, params[ALL]).tokens
    runs: dict[int, list[Served]] = {share: [] for share in SHARES}

    def run(share: int) -> None:
        runs[share].append(serve(engine, work, params[share]))

    def others() -> None:
        even = len(runs[ALL]) % 2 == 0
        order = SHARES[:-1] if even else SHARES[-2::-1]
        for share in order:
            engine.release()
            run(share)
        engine.release()

    benchmark.pedantic(lambda: run(ALL), setup=others, rounds=rounds, iterations=1)
    for share in SHARES:
        for served in runs[share]:
            assert list(map(len, served.tokens)) == list(work.lengths)
            for number in work.chosen(share):
                assert served.tokens[number] == expected[number], (share, number)
    benchmark.extra_info["workload"] = name
    benchmark.extra_info["dtype"] = str(engine.model.dtype).removeprefix("torch.")
    benchmark.extra_info["requests"] = len(work.prompts)
    benchmark.extra_info["entropy"] = round(meter.mean, 3)
    benchmark.extra_info["sweep"] = [_entry(work, share, runs) for share in SHARES]


def _entry(work: Workload, share: int, runs: dict[int, list[Served]]) -> dict[str, Any]:
    """One share against none. Throughput ratios above 1 and latency ratios below 1 are faster.

    plain_p50, plain_p99: latencies, by nearest rank over all rounds, of the requests that are plain
    at ``share``, over those of the same ones where none is deterministic. The counts are of the
    latest run; padding: its share of all rows.
    """
    chosen, stats = work.chosen(share), runs[share][-1].stats
    plain = [number for number in range(len(work.prompts)) if number not in chosen]
    seconds = sorted(served.seconds for served in runs[share])

    def latency(side: int, quantile: float) -> float:
        values = sorted(served.latencies[n] for served in runs[side] for n in plain)
        return values[ceil(quantile * len(values)) - 1] if values else nan

    return {
        "share": share,
        "deterministic": len(chosen),
        "token_share": sum(work.lengths[number] for number in chosen) / work.tokens,
        "ratio": median(served.seconds for served in runs[0]) / median(seconds),
        "tokens_per_second": work.tokens / median(seconds),
        "seconds": f"{seconds[0]:.2f} to {seconds[-1]:.2f}",
        "plain_p50": latency(share, 0.50) / latency(0, 0.50),
        "plain_p99": latency(share, 0.99) / latency(0, 0.99),
        "drafted": stats.drafted,
        "rolled_back": stats.rolled_back,
        "padding": stats.padding / (stats.padding + sum(stats.rows.values())),
        "ways": dict(sorted(stats.ways.items())),
        "passes": sum(stats.passes.values()),
        "cached_prompt_tokens": stats.cached_prompt_tokens,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.benchmark(group="one request alone, deterministic against plain")
def bench_alone(
    benchmark: Any, engine: Engine, temperature: float, smoke: bool, rounds: int
) -> None:
    """``ratio``: speed of the deterministic request over that of the same one plain."""
    work = of_shapes("alone", [(8, 8) if smoke else (64, 40)], engine.model.config.vocab_size)
    plain = [replace(p, temperature=temperature) for p in work.params(())]
    _against_plain(benchmark, engine, work, plain, rounds=5 * rounds)  # short ones


@pytest.mark.parametrize("batch", [1, 6, 12, 24, 40, 64])
@pytest.mark.benchmark(group="equal requests, all deterministic against none")
def bench_deterministic(
    benchmark: Any, engine: Engine, batch: int, smoke: bool, rounds: int
) -> None:
    """``ratio``: throughput with every request deterministic over that with none, at one size."""
    shapes = [(8, 4)] * min(batch, 4) if smoke else [(64, 40)] * batch
    work = of_shapes(f"equal-{batch}", shapes, engine.model.config.vocab_size)
    _against_plain(benchmark, engine, work, work.params(()), rounds)


@pytest.fixture(scope="module")
def experts(dtype: str, smoke: bool) -> Iterator[Engine]:
    with open_engine(dtype, smoke, "-moe", prefix_cache=False) as engine:
        yield engine


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.benchmark(group="a mixture of experts, all deterministic against none")
def bench_experts(benchmark: Any, experts: Engine, requests: int, smoke: bool, rounds: int) -> None:
    """``ratio``: as in ``bench_deterministic``; canonical passes run every expert's rows by the
    linear kernel, others by transformers' grouped matmul."""
    rng = random.Random(0)
    shapes = [(8, 4) if smoke else (rng.randint(16, 96), 48) for _ in range(requests)]
    work = of_shapes("experts", shapes, experts.model.config.vocab_size)
    _against_plain(benchmark, experts, work, work.params(()), rounds)


def _against_plain(
    benchmark: Any, engine: Engine, work: Workload, plain: list[SamplingParams], rounds: int
) -> None:
    """All of ``work`` deterministic against ``plain``, in one call of ``generate`` each."""
    prompts = [list(prompt) for prompt in work.prompts]
    asking = [replace(p, deterministic=True) for p in plain]
    runs = [engine.generate(prompts, asking)]
    ratio = in_turns(
        benchmark,
        lambda: runs.append(engine.generate(prompts, asking)),
        lambda: engine.generate(prompts, plain),
        rounds,
        prepare=engine.release,
    )
    said = [list(map(_bits, outputs)) for outputs in runs]
    assert all(one == said[0] for one in said)
    benchmark.extra_info["ratio"] = round(ratio, 3)
    benchmark.extra_info["tokens"] = work.tokens


@pytest.mark.benchmark(group="a deterministic chat, prefix cache on against off")
def bench_chat_turns(benchmark: Any, engine: Engine, dtype: str, smoke: bool, rounds: int) -> None:
    """``ratio``: seconds without the prefix cache over seconds with it. ``prefill_ratio``: the same
    for prompt rows. Both sides give the same bits."""
    # A smoke run's turns fill a page each as well.
    turns, about, out = (3, engine.config.page_size, 8) if smoke else (8, 100, 100)
    rng = random.Random(3)
    vocab = engine.model.config.vocab_size
    users = [random_tokens(rng, about + rng.randint(-9, 9), vocab) for _ in range(turns)]
    with open_engine(dtype, smoke, prefix_cache=False) as without:

        def prepare() -> None:
            engine.release()
            without.release()

        prepare()
        said, rows = _chat(engine, users, out)
        said_without, rows_without = _chat(without, users, out)
        assert said == said_without
        ratio = in_turns(
            benchmark,
            lambda: _chat(engine, users, out),
            lambda: _chat(without, users, out),
            rounds,
            prepare,
        )
    benchmark.extra_info["ratio"] = round(ratio, 3)
    benchmark.extra_info["prefill_rows"] = rows
    benchmark.extra_info["prefill_rows_without"] = rows_without
    benchmark.extra_info["prefill_ratio"] = round(rows_without / rows, 2)


def _chat(engine: Engine, users: list[tuple[int, ...]], out: int) -> tuple[list[str], int]:
    """A chat, every prompt with all turns before it; the outputs' bits, and prompt rows run."""
    before = engine.stats().rows["prompt"]
    history: list[int] = []
    said = []
    for turn, user in enumerate(users):
        params = SamplingParams(
            max_new_tokens=out,
            temperature=float(turn % 2),
            seed=turn,
            ignore_eos=True,
            deterministic=True,
            logprobs=True,
        )
        history += user
        output = engine.generate([list(history)], params)[0]
        history += output.completions[0].token_ids
        said.append(_bits(output))
    return said, engine.stats().rows["prompt"] - before


def _bits(output: RequestOutput) -> str:
    """Tokens and log-probabilities as text, which keeps every bit."""
    completion = output.completions[0]
    return repr((completion.token_ids, completion.logprobs))
