"""Speculative against sequential prefill of prompts that are thought about.

Both sides in turns in one process, on one model: windows of 1 chunk (sequential), of the default
and without a bound, and the same prompts read without thoughts. The prompts are a coin's flips: in
"dense" every sentence is one, which is the worst case of speculation; in "stories" 85 % of the
sentences change nothing. Thoughts and answers of all windows are compared before anything is
reported. Run with

    python benchmarks/bench_thinking.py FOLDER [--rounds N] [--operations N] [--batches 1 8 32]
        [--smoke] [--json FILE]

FOLDER: what ``ThinkingModel.save_pretrained`` wrote, and its tokenizer. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from transformers import AutoTokenizer

from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.thinking.model import ThinkingModel

WINDOWS: tuple[int | None, ...] = (1, 8, None)
FILLER = 0.85
NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")
VERBS = ("flips", "doesn't flip")
TOKENS = 2
Workload = Callable[[Random, int], str]


@dataclass
class Result:
    """Of one workload, batch and window. rounds: mean over prompts of the passes after which
    thoughts were looked for. chunks, active: mean number of a prompt's thoughts, and of those that
    are not trivial. rows: prompt rows of all passes. seconds: median of the rounds."""

    workload: str
    batch: int
    window: str
    chunks: float
    active: float
    rounds: float
    rows: int
    seconds: float


def dense(rng: Random, operations: int) -> str:
    """Every sentence flips the coin or says that it is not flipped."""
    return _story([_operation(rng) for _ in range(operations)], rng)


def stories(rng: Random, operations: int) -> str:
    """Of as many sentences FILLER change nothing."""
    sentences = [
        _filler(rng) if rng.random() < FILLER else _operation(rng) for _ in range(operations)
    ]
    return _story(sentences, rng)


def _story(sentences: list[str], rng: Random) -> str:
    first = f"A coin's state is {rng.choice(('heads', 'tails'))}."
    return " ".join([first, *sentences, "What's the state? A:"])


def _operation(rng: Random) -> str:
    return f"{rng.choice(NAMES)} {rng.choice(VERBS)} the coin."


def _filler(rng: Random) -> str:
    subject = rng.choice(("wind", "river", "bird", "cloud"))
    place = rng.choice(("hill", "town", "wood", "bridge"))
    verb, where = rng.choice(("moves", "rests", "sings")), rng.choice(("over", "behind", "near"))
    return f"{rng.choice(('The', 'A', 'One'))} {subject} {verb} {where} the {place}."


WORKLOADS: dict[str, Workload] = {"dense": dense, "stories": stories}


def measure(
    model: ThinkingModel, prompts: list[list[int]], name: str, rounds: int
) -> Iterator[Result]:
    """Every window, and the prompts without thoughts, in turns."""
    sides = {"plain": None, **{_shown(window): window for window in WINDOWS}}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    rows: dict[str, int] = {}
    found: dict[str, list[RequestOutput]] = {}
    for _ in range(rounds + 1):  # the first warms up
        for side, window in sides.items():
            config = EngineConfig(thinking_window=window, prefix_cache=False)
            params = SamplingParams(max_new_tokens=TOKENS, thinking=side != "plain")
            with Engine(model, config=config) as engine:
                engine.generate(prompts[0][:9], params)  # allocates the pool
                before = engine.stats().rows["prompt"]
                begun = time.perf_counter()
                found[side] = engine.generate(prompts, params)
                seconds[side].append(time.perf_counter() - begun)
                rows[side] = engine.stats().rows["prompt"] - before
    _compare([found[_shown(window)] for window in WINDOWS])
    for side, outputs in found.items():
        thoughts = [output.thoughts or [] for output in outputs]
        yield Result(
            name,
            len(prompts),
            side,
            mean(map(len, thoughts)),
            mean(sum(len(t.token_ids) > 1 for t in each) for each in thoughts),
            mean(output.completions[0].stats.thinking_passes for output in outputs),
            rows[side],
            median(seconds[side][1:]),
        )


def _shown(window: int | None) -> str:
    return "all" if window is None else str(window)


def _compare(sides: list[list[RequestOutput]]) -> None:
    """Raises ValueError where windows do not agree."""
    said = [[(o.thoughts, o.completions[0].token_ids) for o in outputs] for outputs in sides]
    if any(other != said[0] for other in said):
        raise ValueError("windows do not agree: thoughts or answers differ")


def table(results: list[Result]) -> str:
    """Markdown; speed-up: the seconds of the sequential side over these."""
    lines = [
        "| workload | prompts | window | thoughts | not trivial | rounds | rows | ms | speed-up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        same = (result.workload, result.batch)
        sequential = next(
            r.seconds for r in results if (r.workload, r.batch) == same and r.window == "1"
        )
        lines.append(
            f"| {result.workload} | {result.batch} | {result.window} | {result.chunks:.1f} | "
            f"{result.active:.1f} | {result.rounds:.1f} | {result.rows} | "
            f"{result.seconds * 1000:.0f} | {sequential / result.seconds:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operations", type=int, default=60, help="sentences of a prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; reports nothing")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rounds, options.operations, options.batches = 1, 4, [1, 2]
    model = ThinkingModel.from_pretrained(options.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.folder)
    results: list[Result] = []
    for name, workload in WORKLOADS.items():
        for batch in options.batches:
            rng = Random(batch)
            texts = [workload(rng, options.operations) for _ in range(batch)]
            prompts = [list(tokenizer(text).input_ids) for text in texts]
            results += measure(model, prompts, name, options.rounds)
    if options.smoke:
        return
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
