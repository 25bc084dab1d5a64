"""AsyncEngine: an Engine whose calls are awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from tinyspec.config import EngineConfig
from tinyspec.engine.async_worker import URGENT, AsyncWorker, Call
from tinyspec.engine.driver import not_copied
from tinyspec.engine.engine import Engine, Params
from tinyspec.engine.input_processor import checked_priority, loaded
from tinyspec.engine.results import scores_of
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scalars import plain
from tinyspec.scheduler.passes import EngineStats
from tinyspec.scheduler.request import Request

# Seconds that a finalizer waits for the thread: it runs at any line, also where its own thread
# holds what the other one needs to end.
FINALIZERS_WAIT = 1.0


def checked_timeout(timeout: Any) -> float | None:
    """``timeout``, as plain data. Raises ValueError for what is neither None nor seconds."""
    timeout = plain(timeout)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise refuse("timeout", timeout, "None, or seconds, a number above 0")
    return timeout


class AsyncEngine:
    """Generates for any number of asyncio tasks, whose requests share the passes of one Engine.

    Passes run in a thread of their own, and so does the user's code in requests. Cancelling a task
    aborts its requests. model, tokenizer, config: as for ``Engine``, or an Engine as ``model``,
    which others may use as well, and which stays open. max_requests: calls begin while fewer
    requests than this are unfinished; the others wait. max_waiting: how many may wait (None: any
    number); further calls raise QueueFull. stream_interval: a stream gets its first and last tokens
    at once, and others every so many passes; None: every pass, every second one while there are 16
    streams, every third with 32, every fourth with 48. An asynchronous context manager.

    engine: the Engine, for its other methods, which wait for no event loop but for a pass.

    Raises as ``Engine``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        max_requests: int = 1024,
        max_waiting: int | None = None,
        stream_interval: int | None = None,
    ):
        max_requests, max_waiting = plain(max_requests), plain(max_waiting)
        stream_interval = plain(stream_interval)
        if not isinstance(max_requests, int) or max_requests < 1:
            raise refuse("max_requests", max_requests, "an integer of at least 1")
        if max_waiting is not None and not (isinstance(max_waiting, int) and max_waiting >= 0):
            raise refuse("max_waiting", max_waiting, "None or an integer of at least 0")
        if stream_interval is not None and not (
            isinstance(stream_interval, int) and stream_interval >= 1
        ):
            raise refuse("stream_interval", stream_interval, "None or an integer of at least 1")
        given = isinstance(model, Engine)
        if given and (tokenizer, config) != (None, None):
            raise refuse("tokenizer, config", (tokenizer, config), "None with an Engine")
        self.engine: Engine = model if given else Engine(model, tokenizer, config)
        limits = max_requests, max_waiting, stream_interval
        self._worker = AsyncWorker(self.engine, *limits, closes=not given)
        weakref.finalize(self, self._worker.stop, FINALIZERS_WAIT).atexit = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        config: EngineConfig | None = None,
        *,
        max_requests: int = 1024,
        max_waiting: int | None = None,
        stream_interval: int | None = None,
        **given: Any,
    ) -> AsyncEngine:
        """As ``Engine.from_pretrained``; returns when the model is loaded."""
        limits: Any = {"max_requests": max_requests, "max_waiting": max_waiting}
        parts = loaded(name_or_path, dtype, device, config, **given)
        return cls(*parts, **limits, stream_interval=stream_interval)

    __reduce__ = not_copied

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the thread, and close the engine unless it was given; unfinished calls raise
        ValueError."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.stop)

    async def generate(
        self, prompts: Any, params: Params = None, priority: int = 0, timeout: float | None = None
    ) -> list[RequestOutput]:
        """Outputs for ``prompts``, in their order; arguments and errors as ``Engine.generate``.

        priority: of the calls that wait, and of the requests that wait in the engine, the lowest
        begin first, equal ones in order. timeout: seconds after which a call that has not finished
        raises TimeoutError. Raises QueueFull at once where ``max_waiting`` calls wait.
        """
        return await self._outputs(lambda e: e.ready().requests(prompts, params), priority, timeout)

    async def score(
        self,
        prompts: Any,
        continuations: Any,
        params: Params = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[list[float]]:
        """As ``Engine.score``; priority, timeout: as for ``generate``."""
        return scores_of(await self.scored(prompts, continuations, params, priority, timeout))

    async def scored(
        self,
        prompts: Any,
        continuations: Any,
        params: Params = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """As ``score``, with all that ``params`` ask for: outputs with these continuations."""
        given = prompts, continuations, params
        return await self._outputs(lambda engine: engine.ready().scored(*given), priority, timeout)

    async def replay(
        self, outputs: Sequence[RequestOutput], priority: int = 0, timeout: float | None = None
    ) -> list[RequestOutput]:
        """As ``Engine.replay``; priority, timeout: as for ``generate``."""
        return await self._outputs(lambda e: e.ready().replayed(outputs), priority, timeout)

    async def stream(
        self, prompts: Any, params: Params = None, priority: int = 0, timeout: float | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Committed tokens of ``prompts`` as they come; arguments and errors as ``generate``, at
        the first event.

        An event has all tokens of its completion since the one before: who reads slowly gets fewer
        events, keeps nobody waiting, and nothing piles up. Leaving the loop aborts what is left.
        """
        call = Call(lambda e: e.ready().requests(prompts, params), None, priority)
        self._queued(call, timeout)
        try:
            while events := await self._worker.answer(call):
                for event in events:
                    yield event
        finally:
            self._worker.end(call)

    async def fingerprint(self) -> str:
        """As ``Engine.fingerprint``, between two steps, as are the following."""
        return await self._asked(lambda e: e.ready() and e.contract.fingerprint.digest)

    async def stats(self) -> EngineStats:
        """Sums over all passes so far; they stay as they are."""
        return await self._asked(lambda engine: deepcopy(engine.stats()))

    async def abort(self, request_id: str) -> RequestOutput:
        """As ``Engine.abort``: a stream ends with an event of finish_reason "abort", ``generate``
        returns what there is."""
        return await self._asked(lambda engine: engine.abort(request_id))

    @property
    def alive(self) -> bool:
        """Whether it answers calls: its thread runs, and its engine is open."""
        return not self._worker.stopped and self.engine.closed is None

    @property
    def waiting(self) -> int:
        """How many calls wait for others to finish before they begin."""
        return len(self._worker.waiting)

    def _queued(self, call: Call, timeout: float | None) -> Call:
        """It waits for its turn, and at most ``timeout`` seconds for its end."""
        timeout, loop = checked_timeout(timeout), asyncio.get_running_loop()
        call.priority = checked_priority(call.priority)
        self._worker.queue(call)
        if timeout is not None:
            error = TimeoutError(f"not finished within {timeout} seconds")
            call.timer = loop.call_later(timeout, self._expire, call, error)
        return call

    def _expire(self, call: Call, error: TimeoutError) -> None:
        if call.requests is not None and not call.unfinished:
            return  # there is still something to read
        call.error, future = error, call.future
        self._worker.end(call)
        if future is not None and not future.done():
            future.set_exception(error)

    async def _outputs(
        self, make: Callable[[Engine], list[Request]], priority: int, timeout: float | None
    ) -> list[RequestOutput]:
        """Of the requests that ``make`` makes."""
        call = self._queued(Call(make, list, priority), timeout)
        return list(await self._answered(call))

    async def _asked(self, ask: Callable[[Engine], Any]) -> Any:
        """What ``ask`` says of the engine, in the thread that steps it."""
        return await self._answered(Call(lambda _: [], lambda _: ask(self.engine), URGENT))

    async def _answered(self, call: Call) -> Any:
        try:
            return await self._worker.answer(call)
        finally:
            self._worker.end(call)
