"""What the suites run: prompts with lengths and arrivals, served step by step, and clocks.

A workload depends on its name, the vocabulary and the size only; which requests are deterministic
is a separate argument, so that both sides of a ratio serve the same prompts with the same seeds.
Knows engines, and not what a benchmark makes of the times.
"""

from __future__ import annotations

import copy
import random
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.presets import build, sharpen
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.scheduler.passes import EngineStats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Workload:
    """Prompts, how many tokens each is to get, and before which engine step each arrives."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    arrivals: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def first(self, count: int | None) -> Workload:
        """Only so many requests, None for all."""
        parts = (self.prompts, self.lengths, self.arrivals)
        return Workload(self.name, *(part[:count] for part in parts))

    def params(
        self, deterministic: Collection[int], processors: tuple[Any, ...] = ()
    ) -> list[SamplingParams]:
        """Every second request is sampled at temperature 1 with its number as seed, the others
        are greedy. deterministic: numbers of the requests that are."""
        return [
            SamplingParams(
                max_new_tokens=length,
                temperature=float(number % 2),
                seed=number,
                ignore_eos=True,
                deterministic=number in deterministic,
                logits_processors=processors,
            )
            for number, length in enumerate(self.lengths)
        ]

    def chosen(self, share: int) -> frozenset[int]:
        """The deterministic requests at ``share`` percent, rounded, one at least: the first of a
        fixed shuffle, so that a smaller share is part of a larger one."""
        order = list(range(len(self.prompts)))
        random.Random(2).shuffle(order)
        count = max(1, round(len(order) * share / 100)) if share else 0
        return frozenset(order[:count])


def random_tokens(rng: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, vocab) for _ in range(count))


def of_shapes(name: str, shapes: list[tuple[int, int]], vocab: int) -> Workload:
    """Random prompts of the given (tokens in, tokens out), all there from the start."""
    rng = random.Random(0)
    prompts = tuple(random_tokens(rng, count, vocab) for count, _ in shapes)
    return Workload(name, prompts, tuple(out for _, out in shapes))


@dataclass(frozen=True)
class _Arriving:
    """Ranges (least, most) of a workload whose requests arrive over time.

    systems: how many system prompts of ``system`` tokens the requests share in turns; 0: none.
    every: engine steps between two arrivals.
    """

    requests: int
    own: tuple[int, int]
    out: tuple[int, int]
    every: int
    systems: int = 0
    system: tuple[int, int] = (0, 0)


ARRIVING = {
    "short-in-long-out": _Arriving(40, (16, 48), (32, 112), every=4),
    "long-in-short-out": _Arriving(40, (192, 512), (8, 24), every=2),
    "chat": _Arriving(40, (8, 96), (16, 64), every=3, systems=4, system=(128, 256)),
}
ARRIVING_SMOKE = {
    "short-in-long-out": _Arriving(4, (4, 8), (8, 12), every=2),
    "long-in-short-out": _Arriving(4, (24, 48), (3, 6), every=1),
    "chat": _Arriving(4, (4, 12), (4, 8), every=2, systems=2, system=(16, 32)),
}


def arriving(name: str, vocab: int, smoke: bool) -> Workload:
    """One of ``ARRIVING``: half of its requests at once, then one more every few engine steps.

    In steps, not seconds, so that arrivals do not depend on the machine's speed and slow passes
    cause no growing queue.
    """
    sizes = (ARRIVING_SMOKE if smoke else ARRIVING)[name]
    rng = random.Random(1)
    systems = [random_tokens(rng, rng.randint(*sizes.system), vocab) for _ in range(sizes.systems)]
    prompts = []
    for number in range(sizes.requests):
        own = random_tokens(rng, rng.randint(*sizes.own), vocab)
        prompts.append(systems[number % len(systems)] + own if systems else own)
    lengths = tuple(rng.randint(*sizes.out) for _ in prompts)
    half = len(prompts) // 2
    arrivals = tuple(max(0, number - half + 1) * sizes.every for number in range(len(prompts)))
    return Workload(name, tuple(prompts), lengths, arrivals)


@dataclass(frozen=True)
class Served:
    """One run of a workload. latencies: seconds from add_request to the output, by request."""

    seconds: float
    latencies: list[float]
    tokens: list[list[int]]
    stats: EngineStats


def serve(engine: Engine, work: Workload, params: list[SamplingParams]) -> Served:
    """Run ``work`` by add_request and step, each request added before the step it arrives at."""
    before = copy.deepcopy(engine.stats())
    waiting = sorted(range(len(params)), key=lambda number: (work.arrivals[number], number))
    numbers: dict[str, int] = {}
    added, latencies = [0.0] * len(params), [0.0] * len(params)
    tokens: list[list[int]] = [[] for _ in params]
    step = 0
    synchronize()
    began = time.perf_counter()
    while waiting or engine.has_unfinished():
        while waiting and work.arrivals[waiting[0]] <= step:
            number = waiting.pop(0)
            added[number] = time.perf_counter()
            numbers[engine.add_request(list(work.prompts[number]), params[number])] = number
        finished = engine.step()
        now = time.perf_counter()
        for output in finished:
            number = numbers.pop(output.request_id)
            latencies[number] = now - added[number]
            tokens[number] = output.completions[0].token_ids
        step += 1
    seconds = time.perf_counter() - began
    return Served(seconds, latencies, tokens, difference(engine.stats(), before))


def difference(after: EngineStats, before: EngineStats) -> EngineStats:
    """The sums over the passes between two copies of an engine's statistics."""
    found: dict[str, Any] = {}
    for one in fields(EngineStats):
        late, early = getattr(after, one.name), getattr(before, one.name)
        if isinstance(late, dict):
            counts = {key: late[key] - early.get(key, 0) for key in late}
            found[one.name] = {key: count for key, count in counts.items() if count}
        else:
            found[one.name] = late - early
    return EngineStats(**found)


@dataclass
class EntropyMeter:
    """A logits processor that changes nothing and records every token's entropy in nats."""

    values: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        self.values.append(-float((logprobs.exp() * logprobs).sum()))
        return scores

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def open_engine(dtype: str, smoke: bool, kind: str = "", **config: Any) -> Engine:
    """An engine that has been probed, on a new model sharpened to a trained model's entropy.

    All of one dtype have the same weights. kind: "-moe" for a mixture of experts.
    """
    preset = ("tiny" if smoke else "small") + kind
    model: Any = sharpen(build(preset, getattr(torch, dtype), DEVICE), preset)
    engine = Engine(model, config=EngineConfig(**config))
    # What is proven while requests run otherwise.
    engine.warm_up()
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, deterministic=True))
    return engine


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], object]) -> float:
    """Seconds that ``function`` takes."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def in_turns(
    benchmark: Any,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> float:
    """Time ``ours`` with the fixture and ``theirs`` before each round; their median over ours.

    prepare: runs before either, untimed. The page faults of either (medians) go into the fixture's
    extra information: on a CPU they are the largest cause of differing times.
    """
    others: list[float] = []
    mine: list[float] = []
    faults: dict[str, list[int]] = {"page faults": [], "their page faults": []}

    def clocked(run: Callable[[], object], name: str) -> float:
        before = page_faults()
        seconds = timed(run)
        faults[name].append(page_faults() - before)
        return seconds

    def before() -> None:
        prepare()
        others.append(clocked(theirs, "their page faults"))
        prepare()

    def run() -> None:
        mine.append(clocked(ours, "page faults"))

    benchmark.pedantic(run, setup=before, rounds=rounds, iterations=1)
    benchmark.extra_info.update({name: median(counts) for name, counts in faults.items()})
    return median(others) / median(mine)


def page_faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
