"""Where a thread leaves outputs, and others wait for them.

Knows ids of requests and event loops, and not who runs what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

from tinyspec.engine.turns import LOOK

Handler = Callable[[GenerationOutput], Any]


class Mailbox:
    """Outputs in order of arrival. Those of requests with a handler go to its event loop."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._outputs: list[GenerationOutput] = []
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}

    def put(self, outputs: Iterable[GenerationOutput]) -> None:
        """Leave ``outputs``; any thread."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Handler, GenerationOutput]]] = {}
        with self._changed:
            for output in outputs:
                handler = self._handlers.get(output.request_id)
                if handler is None:
                    self._outputs.append(output)
                    continue
                if output.is_finished() or output.error is not None:
                    del self._handlers[output.request_id]
                calls.setdefault(handler[1], []).append((handler[0], output))
            self._changed.notify_all()
        for loop, found in calls.items():
            if not loop.is_closed():  # otherwise nobody waits any more
                loop.call_soon_threadsafe(_hand_over, found)

    def take(
        self, request_id: str | None, timeout: float | None, expected: Callable[[], bool]
    ) -> GenerationOutput | None:
        """The first output, or the first of one request. None after ``timeout`` seconds, and where
        there is none and none is ``expected``."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                for place, output in enumerate(self._outputs):
                    if request_id in (None, output.request_id):
                        return self._outputs.pop(place)
                left = LOOK if end is None else min(LOOK, end - time.monotonic())
                if left <= 0 or not expected():
                    return None
                self._changed.wait(left)

    def handle(self, request_id: str, handler: Handler) -> None:
        """Give outputs of one request to ``handler``, in the event loop that runs now; also those
        that were left before."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._handlers[request_id] = handler, loop
            before = [o for o in self._outputs if o.request_id == request_id]
            self._outputs = [o for o in self._outputs if o.request_id != request_id]
        self.put(before)


def _hand_over(found: list[tuple[Handler, GenerationOutput]]) -> None:
    for handler, output in found:
        handler(output)
