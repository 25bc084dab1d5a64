"""AsyncEngine: an Engine whose calls are awaited."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any

import torch

from tinyspec.config import EngineConfig
from tinyspec.engine.engine import Engine, Params
from tinyspec.engine.lock import LOOK, OneProcess
from tinyspec.engine.results import output_of
from tinyspec.engine.stream import EventStream
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
    requests: Iterable[Request] = ()
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
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def answer(self, tokenizer: Any) -> list[Any] | None:
        """Outputs, or the events since the last answer; None where there are none yet, an empty
        list where none will come."""
        if self.stream is not None:
            return self.stream.new_events()
        return [output_of(r, tokenizer) for r in self.requests] if self.finished else None


class AsyncWorker:
    """Steps ``engine`` in one thread while calls are unfinished.

    Calls begin in order, while fewer than ``max_requests`` requests are unfinished. closes: whether
    ``stop``, which the end of the interpreter calls too, closes the engine.
    """

    def __init__(self, engine: Engine, max_requests: int, closes: bool):
        self._engine, self.closes = engine, closes
        self._max_requests = max_requests
        self._lock = Lock()
        # Closed while there is nothing to do. No Event: to set one takes a lock, which a finalizer
        # would wait for where its own thread holds it.
        self._gate = Lock()
        self._stopping = self._stopped = False
        # Calls with a new future, or ended, that the worker has not seen; those that wait; those
        # that have begun.
        self._told: deque[Call] = deque()
        self._waiting: dict[Call, None] = {}
        self._running: dict[Call, None] = {}
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        self._thread = Thread(target=self._work, name="tinyspec", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # open already
            self._gate.release()

    def tell(self, call: Call) -> None:
        """The task waits for its next answer, or has ended it. Raises ValueError where no worker
        is left to answer."""
        self._engine.tracker.lock.check_process()
        with self._lock:
            if self._stopped:
                raise refuse("engine", "closed", "an engine that is open")
            self._told.append(call)
        self._wake()

    def end(self, call: Call) -> None:
        """The task wants no more: what is unfinished is aborted."""
        call.ended = True
        self._told.append(call)  # under no lock: called by finalizers too
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
            self._serve()
        finally:  # whatever a tokenizer raised, nobody waits for ever
            with self._lock:
                self._stopped = True
            self._take()
            closed = refuse("engine", "closed", "an engine that is open")
            self._fail([*self._waiting, *self._running], closed)
            self._send()
            if self.closes:
                self._engine.close()
            atexit.unregister(self.stop)

    def _serve(self) -> None:
        while not self._stopping:
            self._gate.acquire(blocking=False)
            self._take()
            while self._waiting and len(self._engine.tracker.requests) < self._max_requests:
                self._begin()
            unfinished = [call for call in self._running if not call.finished]
            try:
                if unfinished:
                    self._step(unfinished)
            except BaseException as error:  # of no request: the engine's own
                self._fail(unfinished, error)
            self._answer()
            if not unfinished and not self._told:
                # Other threads may be using the engine, and calls wait for them.
                self._gate.acquire(timeout=LOOK if self._waiting else -1)

    def _step(self, unfinished: list[Call]) -> None:
        """Unless another thread has stepped for them meanwhile."""
        tracker = self._engine.tracker
        with tracker.lock("generate"):
            if not all(call.finished for call in unfinished):
                tracker.advance()

    def _take(self) -> None:
        while self._told:
            call = self._told.popleft()
            call.asked = not call.ended
            if call.ended:
                self._forget(call)
            elif call.error is not None:
                self._put(call, call.error)
            elif not call.begun:
                self._waiting[call] = None

    def _begin(self) -> None:
        call = next(iter(self._waiting))
        del self._waiting[call]
        try:
            call.begin(self._engine)
        except Exception as error:
            self._fail([call], error)
        else:
            self._running[call] = None

    def _answer(self) -> None:
        """To calls that wait for an answer and can have one."""
        with self._engine.tracker.lock("generate"):
            for call in [call for call in self._running if call.asked]:
                try:
                    found = call.answer(self._engine.tokenizer)
                except Exception as error:  # a tokenizer's
                    self._fail([call], error)
                    continue
                if found is not None:
                    self._put(call, found)
        self._send()

    def _put(self, call: Call, value: Any) -> None:
        call.asked = False
        self._answers.setdefault(call.future.get_loop(), []).append((call.future, value))

    def _send(self) -> None:
        """Hand over the answers, all of one loop's at a time."""
        answers, self._answers = self._answers, {}
        for loop, found in answers.items():
            try:
                loop.call_soon_threadsafe(_settle, found)
            except RuntimeError:  # closed: nobody waits any more
                futures = {future for future, _ in found}
                for call in [call for call in self._running if call.future in futures]:
                    self._forget(call)

    def _fail(self, calls: Iterable[Call], error: BaseException) -> None:
        for call in calls:
            self._forget(call)
            call.error = error
            if call.asked:
                self._put(call, error)

    def _forget(self, call: Call) -> None:
        """Abort what is unfinished."""
        self._waiting.pop(call, None)
        self._running.pop(call, None)
        self._engine.tracker.cancel(list(call.requests))


def _settle(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, value in answers:
        if future.done():  # its task was cancelled
            continue
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


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
        device: str = "auto",
        config: EngineConfig | None = None,
        *,
        max_requests: int = 1024,
    ) -> AsyncEngine:
        """As ``Engine.from_pretrained``; returns when the model is loaded."""
        engine = Engine.from_pretrained(name_or_path, dtype, device, config)
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
