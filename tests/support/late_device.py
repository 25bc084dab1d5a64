"""A device whose results arrive at the fetch and not before, on a CPU.

Work that is handed over waits; a fetch does it, and all that was handed over earlier, in order.
Whoever asks for results before they are fetched is told by an error that nothing catches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from tinyspec import Engine, EngineConfig
from tinyspec.engine.core import EngineCore
from tinyspec.runner.device_queue import Pending
from tinyspec.scheduler.step import Step


class TooEarly(BaseException):
    """Results were read before they were fetched."""


class LatePending:
    """As ``Pending``, but nothing is done before ``fetch``."""

    def __init__(self, queue: LateQueue, work: Callable[[], Any]):
        self._queue, self._work = queue, work
        self._done: Pending[Any] | None = None

    @property
    def failed(self) -> bool:
        return self._done is not None and self._done.failed

    @property
    def results(self) -> Any:
        if self._done is None:
            raise TooEarly
        return self._done.results

    def fetch(self) -> list[Any]:
        self._queue.fetches += 1
        while self._done is None:
            first = self._queue.waiting.pop(0)
            work = first._work
            del first._work  # it holds the pass before, which would hold the one before it
            first._done = Pending(work)
        return self._done.fetch()


class LateQueue:
    """waiting: work that was handed over. most: how much there was at once. launches, fetches: how
    often either was called."""

    def __init__(self) -> None:
        self.waiting: list[LatePending] = []
        self.most = self.launches = self.fetches = 0

    def launch(self, work: Callable[[], Any]) -> Any:
        pending = LatePending(self, work)
        self.waiting.append(pending)
        self.launches += 1
        self.most = max(self.most, len(self.waiting))
        return pending


QUEUES: WeakKeyDictionary[EngineCore, LateQueue] = WeakKeyDictionary()


def _launch(core: EngineCore, step: Step) -> Step:
    step.pending = QUEUES.setdefault(core, LateQueue()).launch(partial(core.compute, step))
    return step


def force(patches: pytest.MonkeyPatch) -> None:
    """Engines overlap on a late device, unless their config says that they do not overlap."""
    resolve = EngineConfig.resolve

    def forced(config: EngineConfig, **facts: Any) -> EngineConfig:
        found = resolve(config, **facts)
        return found if config.overlap is not None else replace(found, overlap=True)

    patches.setattr(EngineConfig, "resolve", forced)
    patches.setattr(EngineCore, "launch", _launch)


def queue_of(engine: Engine) -> LateQueue:
    return QUEUES.setdefault(engine.core, LateQueue())
