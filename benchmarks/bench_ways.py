"""What each optimization of a CPU gains: switched off against on, in turns in one process.

``ratio`` above 1: with the way it is faster. A way that gains less than 3 % is to be removed. All
but three run the workloads of ``bench_generate.py`` through a patched model's ``generate``, plain.
``swapped in canonical passes`` runs those of ``bench_share.py``, all requests deterministic, on two
engines that are probed with and without it, ``bench_swapped_deep`` rows of equal length on a wider
model. ``keep-heap`` cannot be switched off again in a process, so each side of each round is a
process. Before timing, three deterministic requests must have equal bits on both sides. What one
workload leaves on the heap changes another's times, so each has a process of its own:

    for run in equal-{1,4,16,64}:9 long:7 ragged:2; do
        pytest benchmarks/bench_ways.py -k "bench_way and ${run%:*}-" --rounds "${run#*:}" \\
            --benchmark-enable --benchmark-json="ways-${run%:*}.json"
    done
    pytest benchmarks/bench_ways.py -k "keep_heap or canonical or deep" --rounds 3 \\
        --benchmark-enable --benchmark-json=ways-others.json
    python benchmarks/render.py ways-*.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.bench_generate import by_tinyspec, model_for, patched, workload
from benchmarks.presets import PRESETS, build
from benchmarks.ways import (
    BF16,
    FP32,
    WAYS,
    Way,
    never_swapped,
    separate_probes,
    swaps,
    without_keeping_the_heap,
    without_swapping,
)
from benchmarks.workloads import (
    ARRIVING,
    DEVICE,
    Workload,
    arriving,
    fresh,
    in_turns,
    of_shapes,
    open_engine,
    page_faults,
    serve,
    timed,
)
from tinyspec import Engine, EngineConfig
from tinyspec.determinism.probes.attention import MANY_ROWS

# Instead of a workload's name: ``deterministic_bits``.
BITS = "bits"
NAMES = ("equal-1", "equal-4", "equal-16", "equal-64", "long", "ragged")
DEEP = EngineConfig(prefix_cache=False, max_model_len=1024, max_rows=1024)
# Timed calls of a process, after one that is not timed.
CALLS, CALLS_OF_LARGE = 3, 1

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="ways that only a CPU takes"),
    pytest.mark.benchmark(group="a way switched off against on"),
]


def deterministic_bits(engine: Engine) -> list[str]:
    """Tokens and log-probabilities, as text, of three deterministic requests beside two plain."""
    work = of_shapes("check", [(40, 12)] * 5, engine.model.config.vocab_size)
    params = [replace(p, logprobs=True) for p in work.params(range(3))]
    fresh(engine)
    outputs = engine.generate([list(prompt) for prompt in work.prompts], params)
    completions = [output.completions[0] for output in outputs]
    assert [len(c.token_ids) for c in completions] == list(work.lengths)
    return [repr((c.token_ids, c.logprobs)) for c in completions[:3]]


@cache
def check_bits(way: Way, dtype: str, smoke: bool) -> None:
    """Deterministic requests have the same bits without the way."""
    with open_engine(dtype, smoke) as engine:
        expected = deterministic_bits(engine)
        with way.off(engine.model):
            assert deterministic_bits(engine) == expected


def alternating(off: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """A function that enters ``off`` when called first, and leaves and enters it in turns."""
    stack = ExitStack()
    entered = False

    def switch() -> None:
        nonlocal entered
        entered = not entered
        if entered:
            stack.enter_context(off())
        else:
            stack.close()

    return switch


def note(benchmark: Any, way: str, name: str, dtype: str, ratio: float) -> None:
    benchmark.extra_info |= {"way": way, "workload": name, "dtype": dtype, "ratio": ratio}


@pytest.mark.parametrize(
    ("way", "name", "dtype"),
    [(way, name, dtype) for way in WAYS for name in NAMES for dtype in way.dtypes],
    ids=str,
)
def bench_way(benchmark: Any, way: Way, name: str, dtype: str, smoke: bool, rounds: int) -> None:
    """Plain requests through ``generate`` of a patched model."""
    check_bits(way, dtype, smoke)
    model = model_for(dtype, smoke, "tinyspec")
    work = workload(name, model.config.vocab_size, smoke)
    with patched(model, EngineConfig(prefix_cache=False)):
        if not way.applies(model):
            pytest.skip("this CPU has no such linears")

        def run() -> None:
            assert list(map(len, by_tinyspec(model, work))) == list(work.lengths)

        run()
        with way.off(model):
            run()
        # ``in_turns`` prepares the side without, then the side with the way.
        switch = alternating(lambda: way.off(model))
        ratio = in_turns(benchmark, run, run, rounds, prepare=switch)
    note(benchmark, way.name, name, dtype, ratio)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ARRIVING)
@pytest.mark.benchmark(group="a way switched off against on, all requests deterministic")
def bench_swapped_canonical(
    benchmark: Any, name: str, dtype: str, smoke: bool, rounds: int, tmp_path: Path
) -> None:
    """Linears swap their operands where that was probed to have the same bits."""
    with ExitStack() as stack:
        with separate_probes(str(tmp_path / "on")):
            on = stack.enter_context(open_engine(dtype, smoke))
        if not smoke and not swaps(on.model):
            pytest.skip("no linear swaps its operands in any bucket")
        with separate_probes(str(tmp_path / "off")), without_swapping():
            off = stack.enter_context(open_engine(dtype, smoke))
            assert not swaps(off.model)
            assert deterministic_bits(on) == deterministic_bits(off)
        work = arriving(name, on.model.config.vocab_size, smoke)
        params = work.params(range(len(work.prompts)))

        def prepare() -> None:
            fresh(on)
            fresh(off)

        prepare()
        expected = serve(on, work, params).tokens
        assert serve(off, work, params).tokens == expected

        def run(engine: Engine) -> None:
            assert serve(engine, work, params).tokens == expected

        ratio = in_turns(benchmark, lambda: run(on), lambda: run(off), rounds, prepare)
    note(benchmark, "swapped in canonical passes", name, dtype, ratio)


@cache
def deep_model(smoke: bool) -> Any:
    """Four layers of Qwen3-0.6B's shape and a small vocabulary, probed; what was found is on
    disk."""
    shape = dict(PRESETS["tiny" if smoke else "qwen3-0.6b"], vocab_size=8192)
    with patch.dict(PRESETS, deep=shape):
        model: Any = build("deep", torch.float32, DEVICE, layers=4)
    model.generation_config.eos_token_id = None
    with Engine(model, config=DEEP) as engine:
        engine.contract.probe(attention_rows=MANY_ROWS)
    return model


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("rows", [4, 8, 16, 32, 64])
def bench_swapped_deep(
    benchmark: Any, rows: int, deterministic: bool, smoke: bool, rounds: int
) -> None:
    """Linears swap their operands, in fp32, where they are 1024 and more deep."""
    model = deep_model(smoke)
    work = of_shapes(str(rows), [(16, 4 if smoke else 24)] * rows, model.config.vocab_size)
    with patched(model, DEEP):

        def run() -> list[list[int]]:
            return by_tinyspec(model, work, deterministic)

        expected = run()
        with never_swapped(model):
            assert run() == expected or not deterministic
        switch = alternating(lambda: never_swapped(model))
        ratio = in_turns(benchmark, run, run, rounds, prepare=switch)
    name = f"{rows} rows, {'deterministic' if deterministic else 'plain'}"
    note(benchmark, "swapped", name, FP32, ratio)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", NAMES)
def bench_keep_heap(benchmark: Any, name: str, dtype: str, smoke: bool, rounds: int) -> None:
    """The C library keeps freed memory for the next pass. Timed here are both processes whole."""
    if smoke and (name, dtype) != (NAMES[0], FP32):
        pytest.skip("a smoke run starts two processes only")
    assert smoke or bits_in_process("on", dtype) == bits_in_process("off", dtype)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    faults: dict[str, list[int]] = {"on": [], "off": []}

    def both() -> None:
        for side in ("off", "on"):
            found = in_process(side, name, dtype, smoke)
            seconds[side].append(found["seconds"])
            faults[side].append(found["page_faults"])

    benchmark.pedantic(both, rounds=rounds, iterations=1)
    benchmark.extra_info["page faults"] = median(faults["on"])
    benchmark.extra_info["their page faults"] = median(faults["off"])
    note(benchmark, "keep-heap", name, dtype, median(seconds["off"]) / median(seconds["on"]))


@cache
def bits_in_process(side: str, dtype: str) -> Any:
    """``deterministic_bits`` in a process of its own."""
    return in_process(side, BITS, dtype, smoke=False)


def in_process(side: str, name: str, dtype: str, smoke: bool) -> Any:
    """What ``main`` prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_ways", side, name, dtype]
    command += ["--smoke"] if smoke else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    """One side of ``bench_keep_heap``, as JSON: what a call takes, or deterministic bits."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("side", choices=("on", "off"))
    parser.add_argument("name", choices=(*NAMES, BITS))
    parser.add_argument("dtype", choices=(FP32, BF16))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    dtype, smoke = options.dtype, options.smoke
    with without_keeping_the_heap() if options.side == "off" else nullcontext():
        if options.name == BITS:
            with open_engine(dtype, smoke) as engine:
                print(json.dumps(deterministic_bits(engine)))
        else:
            model = model_for(dtype, smoke, "tinyspec")
            work = workload(options.name, model.config.vocab_size, smoke)
            with patched(model, EngineConfig(prefix_cache=False)):
                print(json.dumps(measured(model, work)))
    return 0


def measured(model: Any, work: Workload) -> dict[str, Any]:
    """Median seconds and page faults of a call of ``generate``, after one that is not timed."""
    assert list(map(len, by_tinyspec(model, work))) == list(work.lengths)
    calls = CALLS_OF_LARGE if work.name in ("long", "ragged") else CALLS
    seconds, faults = [], []
    for _ in range(calls):
        before = page_faults()
        seconds.append(timed(lambda: by_tinyspec(model, work)))
        faults.append(page_faults() - before)
    return {"seconds": median(seconds), "page_faults": median(faults)}


if __name__ == "__main__":
    raise SystemExit(main())
