"""AsyncEngine: an Engine whose calls are awaited."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any

import torch

from tinyspec.config import EngineConfig
from tinyspec.engine.engine import Engine, Params
from tinyspec.engine.lock import LOOK, OneProcess
from tinyspec.engine.results import EventStream, output_of
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scalars import plain
from tinyspec.scheduler.request import Request

# Seconds that a finalizer waits for the thread: it runs at any line, also where its own thread
# holds what the other one needs to end.
FINALIZERS_WAIT = 1.0


@dataclass(eq=False)
class Call:
    """What one task asks for: outputs of the requests that ``prepare`` makes, or their events.

    future: of the answer that the task waits for. ended: it wants no more. Of the worker: asked:
    the task waits; begun: its requests are made; error: what ended it; stream: of events.
    """

    prepare: Callable[[], list[Request]]
    streams: bool
    future: asyncio.Future[Any]
    ended: bool = False
    asked: bool = False
    begun: bool = False
    error: BaseException | None = None
    requests: list[Request] = field(default_factory=list)
    stream: EventStream | None = None

    def begin(self, engine: Engine) -> None:
        """Make its requests and queue them. Raises what is wrong with them."""
        requests = self.prepare()
        if self.streams:
            self.stream = engine.follow(requests)
        else:
            engine.tracker.add(requests)
        self.requests, self.begun = requests, True
        for request in requests:
            request.thread = 0  # its code ends no worker

    @property
    def unfinished(self) -> bool:
        """Whether steps are to be run for it."""
        return self.begun and not all(request.finished for request in self.requests)

    def answer(self, tokenizer: Any) -> list[Any] | None:
        """Outputs, or the events since the last answer; None where there are none yet, an empty
        list where none will come."""
        if self.stream is not None:
            return self.stream.new_events()
        return None if self.unfinished else [output_of(r, tokenizer) for r in self.requests]

    def resolve(self, value: Any) -> None:
        """Let its task go on with ``value``, or with an exception that is raised there."""
        self.asked, future = False, self.future

        def set_value() -> None:
            if future.done():  # its task was cancelled
                return
            raises = isinstance(value, BaseException)
            (future.set_exception if raises else future.set_result)(value)

        try:
            future.get_loop().call_soon_threadsafe(set_value)
        except RuntimeError:  # it is closed: nobody waits any more
            self.ended = True


class AsyncWorker:
    """Steps ``engine`` in one thread while calls are unfinished.

    Calls begin in order, while fewer than ``max_requests`` requests are unfinished. closes: whether
    ``stop``, which the end of the interpreter calls too, closes the engine.
    """

    def __init__(self, engine: Engine, max_requests: int, closes: bool):
        self._engine, self.closes = engine, closes
        self._max_requests = max_requests
        # Closed while there is nothing to do. No Event: to set one takes a lock, which a finalizer
        # would wait for where its own thread holds it.
        self._gate = Lock()
        self._stopping = self._stopped = False
        # Calls that wait for an answer, or have ended, which the worker has not seen; all others.
        self._told: deque[Call] = deque()
        self._calls: dict[Call, None] = {}
        self._thread = Thread(target=self._work, name="tinyspec", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # open already
            self._gate.release()

    def tell(self, call: Call) -> None:
        """The task waits for its next answer. Raises ValueError where no worker is left to give
        it."""
        self._engine.tracker.lock.check_process()
        self._told.append(call)
        self._wake()
        if self._stopped:
            call.future.cancel()
            raise refuse("engine", "closed", "an engine that is open")

    def end(self, call: Call) -> None:
        """The task wants no more, as finalizers tell too: what is unfinished is aborted."""
        call.ended = True
        self._told.append(call)
        self._wake()

    def stop(self, seconds: float | None = None) -> None:
        """Fail the calls that are unfinished, and end the thread; wait for that, at most so many
        ``seconds``, but not where the calling thread has the lock, which the worker may need."""
        if self._engine.tracker.lock.forked:
            return
        self._stopping = True
        self._wake()
        if current_thread() is not self._thread and not self._engine.tracker.lock.mine:
            self._thread.join(seconds)

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._serve()
        finally:  # whatever a tokenizer raised, nobody waits for ever
            self._stopped = True
            self._take()
            self._fail(list(self._calls), refuse("engine", "closed", "an engine that is open"))
            if self.closes:
                self._engine.close()
            atexit.unregister(self.stop)

    def _serve(self) -> None:
        """Begin what waits, run a step, answer; wait where there is nothing to do."""
        engine, tracker = self._engine, self._engine.tracker
        self._gate.acquire(blocking=False)
        self._take()
        waiting = [call for call in self._calls if not call.begun]
        while waiting and len(tracker.requests) < self._max_requests:
            call = waiting.pop(0)
            try:
                call.begin(engine)
            except Exception as error:
                self._fail([call], error)
        unfinished = [call for call in self._calls if call.unfinished]
        try:
            with tracker.lock("generate"):
                # Another thread may have stepped for them meanwhile.
                if any(call.unfinished for call in unfinished):
                    tracker.advance()
        except BaseException as error:  # of no request: the engine's own
            self._fail(unfinished, error)
        with tracker.lock("generate"):
            for call in [call for call in self._calls if call.begun and call.asked]:
                try:
                    found = call.answer(engine.tokenizer)
                except Exception as error:  # a tokenizer's
                    self._fail([call], error)
                else:
                    if found is not None:
                        call.resolve(found)
        for call in [call for call in self._calls if call.ended]:
            self._forget(call)
        if not unfinished and not self._told:
            # Other threads may be using the engine, and calls wait for them.
            self._gate.acquire(timeout=LOOK if waiting else -1)

    def _take(self) -> None:
        while self._told:
            call = self._told.popleft()
            call.asked = not call.ended
            if call.ended:
                self._forget(call)
            elif call.error is not None:
                call.resolve(call.error)
            else:
                self._calls[call] = None

    def _fail(self, calls: Iterable[Call], error: BaseException) -> None:
        for call in calls:
            self._forget(call)
            call.error = error
            if call.asked:
                call.resolve(error)

    def _forget(self, call: Call) -> None:
        """Abort what is unfinished."""
        self._calls.pop(call, None)
        self._engine.tracker.cancel(call.requests)


class AsyncEngine(OneProcess):
    """Generates for any number of asyncio tasks, whose requests share the passes of one Engine.

    Passes run in a thread of their own, and so does the user's code in requests. Cancelling a task
    aborts its requests. model, tokenizer, config: as for ``Engine``, or an Engine as ``model``,
    which others may use as well, and which stays open. max_requests: calls begin, in order, while
    fewer requests than this are unfinished; the others wait. An asynchronous context manager.

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
    ):
        max_requests = plain(max_requests)
        if not isinstance(max_requests, int) or max_requests < 1:
            raise refuse("max_requests", max_requests, "an integer of at least 1")
        given = isinstance(model, Engine)
        if given and (tokenizer, config) != (None, None):
            raise refuse("tokenizer, config", (tokenizer, config), "None with an Engine")
        self.engine: Engine = model if given else Engine(model, tokenizer, config)
        self.lock = self.engine.lock
        self._worker = AsyncWorker(self.engine, max_requests, closes=not given)
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
        **given: Any,
    ) -> AsyncEngine:
        """As ``Engine.from_pretrained``; returns when the model is loaded."""
        engine = Engine.from_pretrained(name_or_path, dtype, device, config, **given)
        served = cls(engine, max_requests=max_requests)
        served._worker.closes = True
        return served

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the thread, and close the engine unless it was given; unfinished calls raise
        ValueError."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.stop)

    async def generate(self, prompts: Any, params: Params = None) -> list[RequestOutput]:
        """Outputs for ``prompts``, in their order; arguments and errors as ``Engine.generate``."""
        call = self._call(prompts, params, streams=False)
        try:
            return await self._answer(call)
        finally:
            self._worker.end(call)

    async def stream(self, prompts: Any, params: Params = None) -> AsyncIterator[StreamEvent]:
        """Committed tokens of ``prompts`` as they come; arguments and errors as ``generate``, at
        the first event.

        An event has all tokens of its completion since the one before: who reads slowly gets fewer
        events, keeps nobody waiting, and nothing piles up. Leaving the loop aborts what is left.
        """
        call = self._call(prompts, params, streams=True)
        try:
            while events := await self._answer(call):
                for event in events:
                    yield event
        finally:
            self._worker.end(call)

    def _call(self, prompts: Any, params: Params, streams: bool) -> Call:
        future = asyncio.get_running_loop().create_future()
        return Call(partial(self.engine.prepare, prompts, params), streams, future)

    async def _answer(self, call: Call) -> Any:
        if call.future.done():
            call.future = asyncio.get_running_loop().create_future()
        self._worker.tell(call)
        return await call.future
