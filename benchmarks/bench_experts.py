"""What ``deterministic=True`` costs a mixture of experts: all requests, against none of them.

Canonical passes run every expert's rows by the linear kernel, others by transformers' grouped
matmul. Both sides run in turns on one engine in one process; the ratio is that of their medians.
The model has random weights and the shape of a small Qwen3-MoE. Run with

    pytest benchmarks/bench_experts.py --full --benchmark-json=FILE [--rounds N]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.workloads import DEVICE, Workload, fresh, in_turns, of_shapes, serve
from tinyspec import Engine, EngineConfig, SamplingParams

SIZES = (1, 8, 32)


def build(dtype: torch.dtype, smoke: bool) -> Any:
    """Hidden 256, 4 layers, 8 experts of which a token takes 2."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256 if smoke else 8192,
        hidden_size=64 if smoke else 256,
        moe_intermediate_size=64 if smoke else 512,
        num_hidden_layers=2 if smoke else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if smoke else 64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512 if smoke else 4096,
        initializer_range=0.06,
        eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, smoke: bool) -> Iterator[Engine]:
    model = build(getattr(torch, request.param), smoke)
    with Engine(model, config=EngineConfig(prefix_cache=False)) as engine:
        engine.warm_up()
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, deterministic=True))
        yield engine


def workload(requests: int, vocab: int, smoke: bool) -> Workload:
    """Prompts of 16 to 96 tokens, all there from the start; 48 tokens out."""
    rng = random.Random(0)
    shapes = [(8, 4) if smoke else (rng.randint(16, 96), 48) for _ in range(requests)]
    work = of_shapes(f"{requests} requests", shapes, vocab)
    return Workload(work.name, work.prompts, work.lengths, (0,) * requests)


@pytest.mark.parametrize("requests", SIZES)
@pytest.mark.benchmark(group="experts: deterministic against plain")
def bench_experts(benchmark: Any, engine: Engine, requests: int, smoke: bool, rounds: int) -> None:
    """``ratio``: tokens a second of deterministic requests over those of the same ones, plain.

    A deterministic request must give the tokens that it gives alone.
    """
    work = workload(requests, engine.model.config.vocab_size, smoke)
    plain, asked = work.params(()), work.params(range(requests))
    alone = engine.generate([list(work.prompts[0])], asked[0])[0].completions[0].token_ids
    assert serve(engine, work, asked).tokens[0] == alone
    serve(engine, work, plain)
    ratio = in_turns(
        benchmark,
        lambda: serve(engine, work, asked),
        lambda: serve(engine, work, plain),
        rounds,
        prepare=lambda: fresh(engine),
    )
    stats = serve(engine, work, asked).stats
    benchmark.extra_info["dtype"] = str(engine.model.dtype).removeprefix("torch.")
    benchmark.extra_info["ratio"] = round(ratio, 3)
    benchmark.extra_info["ways"] = dict(sorted(stats.ways.items()))
    benchmark.extra_info["rolled_back"] = stats.rolled_back
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["tokens_per_second"] = round(work.tokens / seconds, 1)
