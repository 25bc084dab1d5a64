"""Requests as they run: their events and outputs, and what a run says on a terminal.

A line that changes while it lasts, and one at its end; silent where standard error is no terminal.
Knows an engine's sums, not how passes run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, TextIO

from tinyspec.outputs import RequestOutput, StreamEvent

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine
    from tinyspec.scheduler.request import Request

# Seconds without a word, and between two changes of the line.
PATIENCE, EVERY = 2.0, 0.2


class Progress:
    """How far a run is, by its events. most: tokens that each completion may get, by request id and
    index. live: show it while it lasts; off where text comes on the same terminal."""

    def __init__(self, engine: Engine, most: dict[tuple[str, int], int], file: TextIO, live: bool):
        self._engine, self._most, self._file = engine, dict(most), file
        self._total = len(most)
        self._live = live and file.isatty()
        self._before = deepcopy(engine.stats())
        self._begun = time.perf_counter()
        self._next = PATIENCE
        self._tokens = self._width = 0

    def event(self, event: StreamEvent) -> None:
        """Tokens that one completion got."""
        key = event.request_id, event.index
        self._tokens += len(event.token_ids)
        self._most[key] -= len(event.token_ids)
        if event.finish_reason is not None:
            del self._most[key]
        if self._live and (seconds := time.perf_counter() - self._begun) >= self._next:
            self._next = seconds + EVERY
            line = self.line(seconds)
            self._file.write(f"\r{line:{self._width}}")
            self._file.flush()
            self._width = len(line)

    def clear(self) -> None:
        """Remove the line, so that others can be written."""
        if self._width:
            self._file.write(f"\r{'':{self._width}}\r")
            self._file.flush()
            self._width = 0

    def line(self, seconds: float) -> str:
        """After so many seconds: how far, how fast, and how long still."""
        stats, before, pool = self._engine.stats(), self._before, self._engine.pool
        done = self._total - len(self._most)
        parts = [f"{done} of {self._total} completions", _speed(self._tokens, seconds)]
        if drafted := stats.drafted - before.drafted:
            accepted = _percent(stats.accepted - before.accepted, drafted)
            parts.append(f"{accepted} of drafts accepted")
        parts.append(f"{pool.num_pages - pool.num_free} of {pool.num_pages} pages")
        if self._tokens:
            left = round(seconds * sum(self._most.values()) / self._tokens)
            parts.append(f"at most {left // 60}:{left % 60:02d} left")
        return ", ".join(parts)


@contextmanager
def followed(
    engine: Engine, requests: list[Request]
) -> Iterator[Iterator[tuple[StreamEvent, RequestOutput | None]]]:
    """A block in which what ``prepare`` made runs: its events, and with the last one of a request
    its output. The block changes no model; what is unfinished at its end is aborted."""
    from tinyspec.engine.interrupts import between_steps
    from tinyspec.engine.results import output_of

    of = {request.request_id: request for request in requests}
    left = {request.request_id: len(request.sequences) for request in requests}

    def output(event: StreamEvent) -> RequestOutput | None:
        left[event.request_id] -= event.finish_reason is not None
        name = event.request_id
        return None if left[name] else output_of(of[name], engine.tokenizer)

    with between_steps(), engine.follow(requests) as events, engine.tracker.hold_state():
        yield ((event, output(event)) for event in events)


@contextmanager
def summed_up(engine: Engine, file: TextIO, completions: int) -> Iterator[None]:
    """A block that runs so many completions: the line about it at its end, on a terminal."""
    before, begun = deepcopy(engine.stats()), time.perf_counter()
    yield
    if not file.isatty():
        return
    seconds, stats = time.perf_counter() - begun, engine.stats()
    tokens = stats.committed - before.committed
    passes = sum(stats.passes.values()) - sum(before.passes.values())
    canonical = _percent(stats.canonical_passes - before.canonical_passes, passes)
    cached = stats.cached_prompt_tokens - before.cached_prompt_tokens
    file.write(
        f"tinyspec: {completions} completions, {tokens} tokens in {seconds:.1f} s "
        f"({_speed(tokens, seconds)}); {cached} prompt tokens cached; {canonical} of "
        f"{passes} passes canonical\n"
    )


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):.0f} tokens/s"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"
