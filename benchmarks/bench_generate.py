"""Plain requests of a patched model against transformers' ``generate`` and continuous batching.

Both sides of a ratio run in turns in one process, and the ratio is that of their medians. Before
anything is timed in fp32, both must give the same tokens. Everything is included on both sides:
prompts, planning, sampling, lists in and lists out; neither caches a prompt for the next round.
What ``deterministic=True`` costs is measured by ``bench_share.py`` and ``bench_promise.py``. What
one workload leaves on the heap changes another's times by up to a half, so each has a process of
its own:

    for run in equal-{1,4,16,64}:9 long:7 ragged:2; do
        pytest benchmarks/bench_generate.py -k "${run%:*}-" --rounds "${run#*:}" \\
            --full --benchmark-json="${run%:*}.json"
    done
    python benchmarks/render.py {equal-*,long,ragged}.json
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.presets import build
from benchmarks.workloads import DEVICE, Workload, in_turns, of_shapes
from tinyspec import EngineConfig, patch, unpatch
from tinyspec.model.cpu_linears import cpu_stand_ins
from tinyspec.model.one_dnn import PrepackedWeights
from tinyspec.runner.kv_cache import free_memory

SAME_LINEARS = ", same linears"
BLOCK = 256
Generate = Callable[[Workload], list[list[int]]]


def nothing() -> None:
    """Nothing to do between two rounds."""


def workload(name: str, vocab: int, smoke: bool) -> Workload:
    """``equal-B``: B prompts of 64 tokens, 40 out; ``long``: 32 of 512, 32 out; ``ragged``: 64 of
    8 to 512, 8 to 256 out."""
    rng = random.Random(1)
    if name == "ragged":
        count, long, out = (4, 24, 8) if smoke else (64, 512, 256)
        shapes = [(rng.randint(8, long), rng.randint(min(8, out), out)) for _ in range(count)]
    elif name == "long":
        shapes = [(24, 4)] * 4 if smoke else [(512, 32)] * 32
    else:
        batch = int(name.split("-")[1])
        shapes = [(8, 4)] * min(batch, 4) if smoke else [(64, 40)] * batch
    return of_shapes(name, shapes, vocab)


@cache
def model_for(dtype: str, smoke: bool, side: str) -> Any:
    """The same weights for all sides; a model for each, as engine and manager change theirs."""
    model = build("tiny" if smoke else "small", getattr(torch, dtype), DEVICE).eval()
    if side.endswith(SAME_LINEARS):
        prepacked = PrepackedWeights(partial(free_memory, torch.device(DEVICE)))
        made = cpu_stand_ins(model, SimpleNamespace(canonical=False, prepacked=prepacked))
        for parent in list(model.modules()):
            for name, own in list(parent.named_children()):
                setattr(parent, name, made.get(own, own))
    return model


def by_generate(model: Any, work: Workload) -> list[list[int]]:
    """Prompts padded on the left, and the longest output for all, as ``generate`` needs it."""
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


@contextmanager
def by_manager(model: Any, work: Workload) -> Iterator[tuple[Generate, Callable[[], None]]]:
    """What ``generate_batch`` wraps, with every request's own length, and how to stop its thread.

    ``generate_batch`` itself has one length for all and allocates its memory in every call; here
    manager and cache stay, and the thread ends between rounds, untimed: it would slow the other
    side's threads. The cache holds all requests at once and a pass as many tokens as tinyspec's; by
    default it allocates gigabytes on a CPU.
    """
    sizes = [len(p) + n for p, n in zip(work.prompts, work.lengths, strict=True)]
    config = ContinuousBatchingConfig(
        page_size=BLOCK,
        num_blocks=sum(-(-size // BLOCK) for size in sizes) + 1,
        max_batch_tokens=2048,
        max_requests_per_batch=len(sizes),
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(work.lengths))
    manager = model.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=config
    )

    def run(work: Workload) -> list[list[int]]:
        manager.start()
        asked = zip(work.prompts, work.lengths, strict=True)
        names = [manager.add_request(list(p), max_new_tokens=length) for p, length in asked]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            output = manager.get_result(timeout=1)
            assert output is not None or manager.is_running()
            if output is not None and output.is_finished():
                assert output.error is None, output.error
                found[output.request_id] = output.generated_tokens
        return [found[name] for name in names]

    def rest() -> None:
        if manager.is_running():
            manager.stop(block=True, keep_for_next_session=True)

    try:
        yield run, rest
    finally:
        rest()
        model.destroy_cached_continuous_batching_manager()


@contextmanager
def by_transformers(
    side: str, dtype: str, smoke: bool, work: Workload
) -> Iterator[tuple[Generate, Callable[[], None]]]:
    """One of transformers' two ways to serve ``work``, and what to do between rounds."""
    model = model_for(dtype, smoke, side)
    if side == "generate_batch":
        with by_manager(model, work) as found:
            yield found
    else:
        yield lambda work: by_generate(model, work), nothing


def by_tinyspec(model: Any, work: Workload, deterministic: bool = False) -> list[list[int]]:
    """``generate`` of a patched model: prompts as they are, every one with its own length."""
    prompts = [list(prompt) for prompt in work.prompts]
    out = model.generate(
        prompts,
        max_new_tokens=list(work.lengths),
        do_sample=False,
        pad_token_id=0,
        deterministic=deterministic,
    )
    rows = out[:, max(map(len, prompts)) :].tolist()
    return [row[:length] for row, length in zip(rows, work.lengths, strict=True)]


@contextmanager
def patched(model: Any, config: EngineConfig) -> Iterator[Any]:
    """The model with tinyspec behind its ``generate``."""
    patch(model, config)
    try:
        yield model
    finally:
        unpatch(model)


@pytest.mark.parametrize(
    ("dtype", "theirs"),
    [
        ("float32", "generate"),
        ("float32", "generate" + SAME_LINEARS),
        ("float32", "generate_batch"),
        ("bfloat16", "generate"),
        ("bfloat16", "generate" + SAME_LINEARS),
        ("bfloat16", "generate_batch"),
    ],
)
@pytest.mark.parametrize("name", ["equal-1", "equal-4", "equal-16", "equal-64", "ragged", "long"])
@pytest.mark.benchmark(group="plain requests against transformers")
def bench_plain(
    benchmark: Any, name: str, dtype: str, theirs: str, smoke: bool, rounds: int
) -> None:
    """``ratio`` above 1: tinyspec is faster than transformers.

    On a CPU tinyspec runs linears by oneDNN in fp32, those of few rows in bf16 by the transposed
    product; "same linears" gives them to both sides.
    """
    if name in ("ragged", "long") and theirs == "generate_batch":
        rounds = min(rounds, 1)  # up to minutes a round, and far from 1
    work = workload(name, model_for(dtype, smoke, theirs).config.vocab_size, smoke)
    # Every round has the same prompts, and transformers computes them anew.
    config = EngineConfig(prefix_cache=False)
    with (
        patched(model_for(dtype, smoke, "tinyspec"), config) as model,
        by_transformers(theirs, dtype, smoke, work) as (transformers, rest),
    ):
        ours = by_tinyspec(model, work)
        if dtype == "float32":
            assert ours == transformers(work)
        assert list(map(len, ours)) == list(work.lengths)
        ratio = in_turns(
            benchmark,
            lambda: by_tinyspec(model, work),
            lambda: transformers(work),
            rounds,
            prepare=rest,
        )
    benchmark.extra_info["ratio"] = round(ratio, 3)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["tokens_per_second"] = round(work.tokens / seconds, 1)
