"""Seconds of work on a device, without the host's part: by replay of a graph, or by events.

Buffers are rotated: a function for each of several sets of inputs, together larger than the caches.
On a CPU the clock. Knows calls, not what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

CUDA = torch.cuda.is_available()
# Larger than the caches of any device in the table of roofline.py (an H200 has 60 MB).
CACHE_BYTES = 128 << 20
MOST_SETS = 16
REPEATS = 7
Call = Callable[[], object]


class Timed(NamedTuple):
    """Seconds of one call, and how they were found: "graph", "events" or "clock"."""

    seconds: float
    by: str


def sets(moved: int) -> int:
    """How many sets of inputs of ``moved`` bytes to rotate."""
    return max(1, min(MOST_SETS, -(-CACHE_BYTES // max(1, moved)))) if CUDA else 1


def timed(calls: Sequence[Call], budget: float = 0.2) -> Timed:
    """Median over a few rounds of one call's time; a round makes all ``calls`` in turns, as often
    as fits ``budget`` seconds in all."""
    run, by = _captured(calls)
    if not CUDA:
        return Timed(_by_clock(run) / len(calls), by)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - began, 1e-5)
    times = max(1, min(50, int(budget / REPEATS / once)))
    rounds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / times / len(calls))
    return Timed(median(rounds), by)


def _captured(calls: Sequence[Call]) -> tuple[Call, str]:
    """All calls, made once already: as one graph, or one after the other where they cannot be
    captured."""

    def run() -> None:
        for call in calls:
            call()

    run()
    if not CUDA:
        return run, "clock"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:
        torch.cuda.synchronize()
        return run, "events"
    return graph.replay, "graph"


def _by_clock(run: Call) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
