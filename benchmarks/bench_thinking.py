"""Prompts that are thought about: speculative against sequential prefill, and against a chain of
thought.

Both sides in turns in one process. First on one model: windows of 1 chunk (sequential), of the
default and without a bound, and the same prompts read without thoughts. The prompts are held-out
ones of as many flips as the model was trained on, so that it can be right: the part of the answers
that are stands beside the time. In "dense" every sentence is a flip or none, the worst case of
speculation; in "half" and "stories" 50 and 85 % of the sentences change nothing. Thoughts and
answers of all windows are compared before anything is reported. Then, with ``--chain`` and
``--retold``, held-out prompts of several lengths are answered by a model that thinks and by ones of
the same backbone that write a chain of thought before their answer: the states alone, or each
behind the sentence that it follows from. Run with

    python benchmarks/bench_thinking.py FOLDER [--task coin] [--rounds N] [--flips N]
        [--batches 1 8 32] [--count N] [--chain FOLDER] [--retold FOLDER]
        [--operations 10 20 40 100] [--smoke] [--json FILE]

FOLDER: what ``python -m benchmarks.coin_reader.train coin --output FOLDER`` wrote, of the chains
with ``--mode chain`` and ``--mode retold``. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.coin_reader.tasks import TASKS, Example
from benchmarks.render import table
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.thinking.model import ThinkingModel

WINDOWS: tuple[int | None, ...] = (1, 8, None)
# Part of the sentences that change nothing, by workload.
WORKLOADS = {"dense": 0.0, "half": 0.5, "stories": 0.85}
TOKENS = 3
# Most words of a chain of thought for an operation, by the mode of its training.
CHAINS = {"chain": 1, "retold": 7}


@dataclass
class Result:
    """Of one workload, batch and window. right: part of the answers. rounds: mean over prompts of
    the passes after which thoughts were looked for. chunks, active: mean number of a prompt's
    thoughts, and of those that are not trivial. rows: prompt rows, and seconds, for one batch; the
    seconds are the median of the rounds."""

    workload: str
    batch: int
    window: str
    right: float
    chunks: float
    active: float
    rounds: float
    rows: int
    seconds: float


def examples(task: str, seed: object, operations: int, count: int, filler: float) -> list[Example]:
    """Held-out ones."""
    rng = Random(f"{seed} {operations}")
    return [TASKS[task].example(rng, operations, True, filler) for _ in range(count)]


def ids_of(tokenizer: Any, made: list[Example]) -> list[list[int]]:
    return [list(tokenizer(" ".join(example.prompt)).input_ids) for example in made]


def measure(
    model: ThinkingModel,
    tokenizer: Any,
    made: list[Example],
    batch: int,
    name: str,
    rounds: int,
) -> Iterator[Result]:
    """Every window, and the prompts without thoughts, in turns; ``batch`` prompts at once."""
    prompts = ids_of(tokenizer, made)
    wanted = [tokenizer.convert_tokens_to_ids(example.answer[0]) for example in made]
    starts = range(0, len(prompts), batch)
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
                before, found[side] = engine.stats().rows["prompt"], []
                begun = time.perf_counter()
                for start in starts:
                    found[side] += engine.generate(prompts[start : start + batch], params)
                seconds[side].append((time.perf_counter() - begun) / len(starts))
                rows[side] = (engine.stats().rows["prompt"] - before) // len(starts)
    _compare([found[_shown(window)] for window in WINDOWS])
    for side, outputs in found.items():
        thoughts = [output.thoughts or [] for output in outputs]
        said = [output.completions[0].token_ids[0] for output in outputs]
        yield Result(
            name,
            batch,
            side,
            mean(token == word for token, word in zip(said, wanted, strict=True)),
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


def results_table(results: list[Result]) -> str:
    """Markdown; speed-up: the seconds of the sequential side over these."""
    sequential = {(r.workload, r.batch): r.seconds for r in results if r.window == "1"}
    header = ("workload", "prompts", "window", "right", "thoughts", "not trivial", "rounds", "rows")
    rows = []
    for r in results:
        means = (f"{mean:.1f}" for mean in (r.chunks, r.active, r.rounds))
        over = sequential[r.workload, r.batch] / r.seconds
        times = f"{r.seconds * 1000:.0f}", f"{over:.2f}"
        right = f"{r.right:.3f}"
        rows.append((r.workload, r.batch, r.window, right, *means, r.rows, *times))
    return table((*header, "ms", "speed-up"), rows)


@dataclass
class Answer:
    """Of prompts of so many operations, ``batch`` at once. right: part of the answers. seconds: for
    one batch, the median."""

    operations: int
    batch: int
    way: str
    right: float
    seconds: float


def against_chain(
    sides: dict[str, tuple[ThinkingModel, SamplingParams]],
    tokenizer: Any,
    made: list[Example],
    operations: int,
    batch: int,
) -> Iterator[Answer]:
    """All ways in turns, on the same prompts."""
    count = len(made)
    prompts = ids_of(tokenizer, made)
    wanted = [tokenizer.convert_tokens_to_ids(list(example.answer[:-1])) for example in made]
    end = tokenizer.eos_token_id
    seconds: dict[str, list[float]] = {way: [] for way in sides}
    right = dict.fromkeys(sides, 0)
    with ExitStack() as stack:
        engines = {}
        for way, (model, params) in sides.items():
            engine = stack.enter_context(Engine(model, config=EngineConfig(prefix_cache=False)))
            engine.generate(prompts[:batch], params)  # the first warms up
            engines[way] = engine, params
        for start in range(0, count - batch + 1, batch):
            for way, (engine, params) in engines.items():
                begun = time.perf_counter()
                outputs = engine.generate(prompts[start : start + batch], params)
                seconds[way].append(time.perf_counter() - begun)
                for output, words in zip(outputs, wanted[start:], strict=False):
                    said = [token for token in output.completions[0].token_ids if token != end]
                    right[way] += said[-len(words) :] == words
    asked = count // batch * batch
    for way in sides:
        yield Answer(operations, batch, way, right[way] / asked, median(seconds[way]))


def answers_table(answers: list[Answer]) -> str:
    """Markdown: all ways side by side; over: the seconds of a chain over those of thoughts."""
    ways = list(dict.fromkeys(answer.way for answer in answers))
    header = [name for way in ways for name in (f"{way}: right", "ms")]
    header += [f"{way} over" for way in ways[1:]]
    rows = []
    for case in dict.fromkeys((answer.operations, answer.batch) for answer in answers):
        found = [a for a in answers if (a.operations, a.batch) == case]
        cells = [cell for a in found for cell in (f"{a.right:.3f}", f"{a.seconds * 1000:.1f}")]
        cells += [f"{chain.seconds / found[0].seconds:.2f}" for chain in found[1:]]
        rows.append([*case, *cells])
    return table(["operations", "prompts", *header], rows)


def main(arguments: list[str] | None = None) -> None:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for mode in CHAINS:
        parser.add_argument(f"--{mode}", type=Path, help=f"a model trained with --mode {mode}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", choices=list(TASKS), default="coin")
    parser.add_argument("--flips", type=int, default=10, help="of a prompt of the first table")
    parser.add_argument("--operations", type=int, nargs="+", default=[10, 20, 40, 100])
    parser.add_argument("--count", type=int, default=96, help="prompts of each workload or length")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; reports nothing")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rounds, options.flips, options.batches = 1, 3, [1, 2]
        options.operations, options.count = [2], 2
    model = ThinkingModel.from_pretrained(options.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.folder)
    results: list[Result] = []
    for name, filler in WORKLOADS.items():
        made = examples(options.task, name, options.flips, options.count, filler)
        for batch in options.batches:
            results += measure(model, tokenizer, made, batch, name, options.rounds)
    answers: list[Answer] = []
    chains = {mode: getattr(options, mode) for mode in CHAINS if getattr(options, mode)}
    for operations in options.operations if chains else ():
        sides = {"thoughts": (model, SamplingParams(max_new_tokens=TOKENS, thinking=True))}
        for mode, folder in chains.items():
            # Words for each operation, for the first state, and of the answer.
            most = CHAINS[mode] * (operations + 1) + TOKENS
            chain = ThinkingModel.from_pretrained(folder)
            sides[mode] = chain, SamplingParams(max_new_tokens=most)
        made = examples(options.task, "chain", operations, options.count, 0.0)
        for batch in options.batches:
            answers += against_chain(sides, tokenizer, made, operations, batch)
    if options.smoke:
        return
    print(results_table(results))
    if answers:
        print("\n" + answers_table(answers))
    if options.json:
        rows = [asdict(result) for result in (*results, *answers)]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
