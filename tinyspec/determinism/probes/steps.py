"""A probe in steps: a generator that yields wherever a probe may pause, and returns what it found.

A pass or a few of them make a step, so that a probe can run to its end at once, or between the
passes of running requests. Knows neither probes nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Run = Callable[[Callable[[], list[T]]], list[T]]


def finished(steps: Steps[T], after_each: Callable[[], None] = lambda: None) -> T:
    """What the steps return, run to their end at once; after_each: called after every step."""
    while not (found := _advance(steps, 0.0)):
        after_each()
    return found[0]


def within(run: Run[T], steps: Steps[T], seconds: float | None) -> Steps[T]:
    """The same steps, each by ``run``, which may give a model other weights for as long as a call
    lasts; several at a time until ``seconds`` are over (None: all)."""
    while not (found := run(lambda: _advance(steps, seconds))):
        yield
    return found[0]


def _advance(steps: Steps[T], seconds: float | None) -> list[T]:
    """Run steps for so many seconds, one at least; what they return, if they ended."""
    begun = time.perf_counter()
    try:
        next(steps)
        while seconds is None or time.perf_counter() - begun < seconds:
            next(steps)
    except StopIteration as end:
        return [end.value]
    return []
