"""The thread that steps an engine for calls that are awaited. Knows no prompts and no events."""

from __future__ import annotations

import asyncio
import atexit
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread, current_thread
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.engine.lock import LOOK
from tinyspec.engine.results import EventStream, output_of
from tinyspec.errors import QueueFull, refuse
from tinyspec.model import openmp
from tinyspec.outputs import RequestOutput
from tinyspec.scheduler.request import Request

# Of a call that has no requests, and waits for nobody.
URGENT = -math.inf


@dataclass(eq=False)
class Call:
    """What one task asks for: what ``collect`` makes of the outputs of the requests that
    ``prepare`` makes, or their events.

    future: of the answer that the task waits for. priority: lower begins first. ended: it wants no
    more. error: what ended it. timer: ends it. Of the worker: asked: the task waits; begun: its
    requests are made; stream: of events.
    """

    prepare: Callable[[], list[Request]]
    collect: Callable[[list[RequestOutput]], Any] | None
    future: asyncio.Future[Any]
    priority: float = 0
    ended: bool = False
    asked: bool = False
    begun: bool = False
    error: BaseException | None = None
    timer: asyncio.TimerHandle | None = None
    requests: list[Request] = field(default_factory=list)
    stream: EventStream | None = None

    def begin(self, engine: Engine) -> None:
        """Make its requests and queue them. Raises what is wrong with them."""
        with engine.lock("generate"):
            requests = self.prepare()
            for request in requests:
                request.priority = self.priority
            if self.collect is None:
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

    def answer(self, tokenizer: Any) -> Any:
        """What was collected, or the events since the last answer; None where there are none yet,
        an empty list where none will come."""
        if self.collect is None:
            return self.stream and self.stream.new_events()
        if self.unfinished:
            return None
        return self.collect([output_of(request, tokenizer) for request in self.requests])

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

    Calls begin by priority, then in order, while fewer than ``max_requests`` requests are
    unfinished. closes: whether ``stop``, which the end of the interpreter calls too, closes the
    engine. waiting: calls with requests that have not begun. stopped: whether the thread has ended,
    or is about to.
    """

    def __init__(self, engine: Engine, max_requests: int, max_waiting: int | None, closes: bool):
        self._engine, self.closes = engine, closes
        self._max_requests, self._max_waiting = max_requests, max_waiting
        self.waiting: set[Call] = set()
        # Closed while there is nothing to do. No Event: to set one takes a lock, which a finalizer
        # would wait for where its own thread holds it.
        self._gate = Lock()
        self._stopping = self.stopped = False
        # Calls that wait for an answer, or have ended, which the worker has not seen; all others.
        self._told: deque[Call] = deque()
        self._calls: dict[Call, None] = {}
        self._thread = Thread(target=self._work, name="tinyspec", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # open already
            self._gate.release()

    def queue(self, call: Call) -> None:
        """Let a call wait for its turn. Raises QueueFull where as many wait as may, and it could
        not begin at once."""
        free = max(0, self._max_requests - len(self._engine.tracker.requests))
        if self._max_waiting is not None and len(self.waiting) >= free + self._max_waiting:
            raise QueueFull(f"{self._max_waiting} calls wait already (max_waiting)")
        self.waiting.add(call)

    def tell(self, call: Call) -> None:
        """The task waits for its next answer. Raises ValueError where no worker is left to give
        it."""
        self._engine.tracker.lock.check_process()
        self._told.append(call)
        self._wake()
        openmp.release()  # this thread waits for passes of another
        if self.stopped:
            call.future.cancel()
            raise refuse("engine", "closed", "an engine that is open")

    def end(self, call: Call) -> None:
        """The task wants no more, as finalizers tell too: what is unfinished is aborted."""
        call.ended = True
        if call.timer is not None:
            call.timer.cancel()
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
            self.stopped = True
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
        waiting = sorted((c for c in self._calls if not c.begun), key=lambda call: call.priority)
        while waiting:
            if len(tracker.requests) >= self._max_requests and waiting[0].priority != URGENT:
                break
            call = waiting.pop(0)
            self.waiting.discard(call)
            try:
                call.begin(engine)
            except BaseException as error:  # panics of Rust, as in a tokenizer, are no Exception
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
                except BaseException as error:  # a tokenizer's
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
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            # No future takes the one, and others may end the loop of the tasks.
            error, cause = RuntimeError(repr(error)), error
            error.__cause__ = cause
        for call in calls:
            self._forget(call)
            call.error = error
            if call.asked:
                call.resolve(error)

    def _forget(self, call: Call) -> None:
        """Abort what is unfinished."""
        self._calls.pop(call, None)
        self.waiting.discard(call)
        self._engine.tracker.cancel(call.requests)
