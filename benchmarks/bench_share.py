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
from math import ceil
from statistics import median
from typing import Any

import pytest

from benchmarks.workloads import (
    ARRIVING,
    EntropyMeter,
    Served,
    Workload,
    arriving,
    fresh,
    in_turns,
    of_shapes,
    open_engine,
    random_tokens,
    serve,
)
from tinyspec import Engine, RequestOutput, SamplingParams, audit

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
    fresh(engine)
    expected = serve(engine, work, params[ALL]).tokens
    runs: dict[int, list[Served]] = {share: [] for share in SHARES}

    def run(share: int) -> None:
        runs[share].append(serve(engine, work, params[share]))

    def others() -> None:
        even = len(runs[ALL]) % 2 == 0
        order = SHARES[:-1] if even else SHARES[-2::-1]
        for share in order:
            fresh(engine)
            run(share)
        fresh(engine)

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

    The counts are of the latest run. rolled_back_share: of the drafts, None where there are none.
    recomputed_share: rolled back drafts over all tokens committed, plain ones too. padding_share:
    of all rows.
    """
    chosen, stats = work.chosen(share), runs[share][-1].stats
    seconds = median(served.seconds for served in runs[share])
    rows = stats.padding + sum(stats.rows.values())
    return {
        "share": share,
        "deterministic": len(chosen),
        "token_share": sum(work.lengths[number] for number in chosen) / work.tokens,
        "ratio": median(served.seconds for served in runs[0]) / seconds,
        "tokens_per_second": work.tokens / seconds,
        **_latencies([n for n in range(len(work.prompts)) if n not in chosen], runs, share),
        "drafted": stats.drafted,
        "rolled_back": stats.rolled_back,
        "rolled_back_share": stats.rolled_back / stats.drafted if stats.drafted else None,
        "recomputed_share": stats.rolled_back / stats.committed,
        "padding_share": stats.padding / rows,
        "ways": dict(sorted(stats.ways.items())),
        "passes": sum(stats.passes.values()),
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "seconds": [served.seconds for served in runs[share]],
    }


def _latencies(plain: list[int], runs: dict[int, list[Served]], share: int) -> dict[str, float]:
    """Latency ratios of the requests that are plain at ``share``, the same ones on both sides.

    p50 and p99 are by nearest rank over those requests in all rounds together, so with fewer than
    a hundred values p99 is their maximum. ``slowest`` depends less on a single pause of the
    machine: the largest of the requests' own medians over the rounds.
    """
    if not plain:
        return {}

    def pooled(side: int, quantile: float) -> float:
        values = sorted(served.latencies[n] for served in runs[side] for n in plain)
        return values[ceil(quantile * len(values)) - 1]

    def slowest(side: int) -> float:
        return max(median(served.latencies[n] for served in runs[side]) for n in plain)

    return {
        "p50_ratio": pooled(share, 0.50) / pooled(0, 0.50),
        "p99_ratio": pooled(share, 0.99) / pooled(0, 0.99),
        "slowest_ratio": slowest(share) / slowest(0),
        "latencies_pooled": len(plain) * len(runs[share]),
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


@pytest.mark.parametrize("batch", [4, 16, 64])
@pytest.mark.benchmark(group="equal requests, all deterministic against none")
def bench_deterministic(
    benchmark: Any, engine: Engine, batch: int, smoke: bool, rounds: int
) -> None:
    """``ratio``: throughput with every request deterministic over that with none, at one size."""
    shapes = [(8, 4)] * min(batch, 4) if smoke else [(64, 40)] * batch
    work = of_shapes(f"equal-{batch}", shapes, engine.model.config.vocab_size)
    _against_plain(benchmark, engine, work, work.params(()), rounds)


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
        prepare=lambda: fresh(engine),
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
            fresh(engine)
            fresh(without)

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


@pytest.mark.benchmark(group="audit against generating the same one token at a time")
def bench_audit(benchmark: Any, engine: Engine, dtype: str, smoke: bool, rounds: int) -> None:
    """``ratio``: seconds to generate the outputs in order, one token a pass, over seconds to audit.

    Both sides are deterministic and give the same bits.
    """
    shapes = [(8, 8)] * 2 if smoke else [(32, 64)] * 8
    work = of_shapes("audit", shapes, engine.model.config.vocab_size)
    prompts = [list(prompt) for prompt in work.prompts]
    params = [replace(p, logprobs=True) for p in work.params(range(len(prompts)))]
    outputs = engine.generate(prompts, params)
    reports = [audit(engine, outputs)]
    token_by_token = {"verify": "padded", "max_sequences": 1, "prefix_cache": False}
    with open_engine(dtype, smoke, **token_by_token) as slow:
        again = slow.generate(prompts, params)
        assert list(map(_bits, again)) == list(map(_bits, outputs))
        ratio = in_turns(
            benchmark,
            lambda: reports.append(audit(engine, outputs)),
            lambda: slow.generate(prompts, params),
            rounds,
        )
    for report in reports:
        assert report, str(report)
    benchmark.extra_info["ratio"] = round(ratio, 3)
    benchmark.extra_info["tokens"] = work.tokens


def _bits(output: RequestOutput) -> str:
    """Tokens and log-probabilities as text, which keeps every bit."""
    completion = output.completions[0]
    return repr((completion.token_ids, completion.logprobs))
