"""The thread that steps an engine for calls that are awaited. Knows no prompts and no events."""

from __future__ import annotations

import asyncio
import atexit
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from time import monotonic
from typing import Any

from tinyspec.determinism.proving import Meanwhile
from tinyspec.engine.engine import Engine
from tinyspec.engine.results import EventStream, output_of
from tinyspec.errors import QueueFull, refuse
from tinyspec.model import openmp
from tinyspec.outputs import RequestOutput
from tinyspec.scheduler.request import Request

# Seconds between two looks for room that calls of other threads have left.
LOOK = 0.05
# Of a call that has no requests, and waits for nobody.
URGENT = -math.inf
# By so many streams more each rests a step longer, at most so many: to tell one takes a tenth of a
# millisecond here and as long where it is read, which steps share few processors with. 32 streams
# on two, steps of 27 ms, end 4 % sooner told every second time, 15 % every fourth.
CROWD, MOST_RESTS = 16, 3


@dataclass(eq=False)
class Call:
    """What one task asks for: what ``collect`` makes of the outputs of the requests that ``make``
    makes, or their events.

    priority: lower begins first. future: of the answer that the task waits for, if it does. ended:
    it wants no more. error: what ended it. timer: ends it. Of the worker: requests, once they are
    made; stream: of their events; rests: how many steps longer it tells none. queued: when.
    """

    make: Callable[[Engine], list[Request]]
    collect: Callable[[list[RequestOutput]], Any] | None
    priority: float = 0
    future: asyncio.Future[Any] | None = None
    ended: bool = False
    error: BaseException | None = None
    timer: asyncio.TimerHandle | None = None
    requests: list[Request] | None = None
    stream: EventStream | None = None
    rests: int = 0
    queued: float = field(default_factory=monotonic)

    def begin(self, engine: Engine, meanwhile: Meanwhile) -> None:
        """Make its requests and queue them. Raises what is wrong with them. meanwhile: as of
        ``Proving.pausing``."""
        requests = self.make(engine)
        for request in requests:
            request.priority, request.queued = self.priority, self.queued
        engine.tracker.add(requests, meanwhile)
        if self.collect is None:
            self.stream = EventStream(requests, engine.tokenizer, engine.tracker, engine)
        for request in requests:
            request.thread = 0  # its code ends no worker
        self.requests = requests

    @property
    def unfinished(self) -> bool:
        """Whether steps are to be run for it."""
        return not all(request.finished for request in self.requests or ())

    def answer(self, tokenizer: Any) -> Any:
        """What ended it, the events since the last answer, or what was collected; None where there
        is nothing yet, an empty list where no event will come."""
        if self.error is not None:
            return self.error
        if self.collect is None:
            return self.stream and self.stream.new_events()
        if self.requests is None or self.unfinished:
            return None
        return self.collect([output_of(request, tokenizer) for request in self.requests])


Answer = tuple[asyncio.Future[Any], Any]


def settle(answers: list[Answer]) -> None:
    """Let the tasks that wait go on with values, or with exceptions that are raised there."""
    for future, value in answers:
        if not future.done():  # else its task was cancelled
            raises = isinstance(value, BaseException)
            (future.set_exception if raises else future.set_result)(value)


class AsyncWorker:
    """Steps ``engine`` in one thread while calls are unfinished.

    Calls begin by priority, then in order, while fewer than ``max_requests`` requests are
    unfinished. interval: steps from one answer to a stream to the next; None: by how many streams
    there are. closes: whether ``stop``, which the end of the interpreter calls too, closes the
    engine. waiting: calls with requests that have not begun. stopped: whether the thread has ended,
    or is about to.
    """

    def __init__(
        self,
        engine: Engine,
        max_requests: int,
        max_waiting: int | None,
        interval: int | None,
        closes: bool,
    ):
        self._engine, self._interval, self.closes = engine, interval, closes
        self._max_requests, self._max_waiting = max_requests, max_waiting
        self.waiting: set[Call] = set()
        self.stopped = False
        # Calls that wait for an answer, or have ended; None to stop. A finalizer may put what it
        # has to tell at any line, of this queue's own too.
        self._told: SimpleQueue[Call | None] = SimpleQueue()
        self._calls: dict[Call, None] = {}
        self._thread = Thread(target=self._work, name="tinyspec", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def queue(self, call: Call) -> None:
        """Let a call wait for its turn. Raises QueueFull where as many wait as may, and it could
        not begin at once."""
        free = max(0, self._max_requests - len(self._engine.tracker.requests))
        if self._max_waiting is not None and len(self.waiting) >= free + self._max_waiting:
            raise QueueFull(f"{self._max_waiting} calls wait already (max_waiting)")
        self.waiting.add(call)

    async def answer(self, call: Call) -> Any:
        """The next one. Raises what ended the call, ValueError where no worker is left."""
        if call.error is not None:
            raise call.error
        self._engine.driver.check_process()
        call.future = future = asyncio.get_running_loop().create_future()
        self._tell(call)
        openmp.release()  # this thread waits for passes of another
        if self.stopped:
            future.cancel()
            raise refuse("engine", "closed", "an engine that is open")
        return await future

    def end(self, call: Call) -> None:
        """The task wants no more, as finalizers tell too: what is unfinished is aborted."""
        call.ended = True
        if call.timer is not None:
            call.timer.cancel()
        self._tell(call)

    def _tell(self, call: Call | None) -> None:
        self._told.put(call)
        self._engine.driver.post(bool)  # in case that it sleeps in the line

    def stop(self, seconds: float | None = None) -> None:
        """Fail the calls that are unfinished, and end the thread; wait for that, at most so many
        ``seconds``, but not where the calling thread has the turn, which the worker may need."""
        if self._engine.driver.forked:
            return
        self._tell(None)
        if current_thread() is not self._thread and not self._engine.driver.in_turn:
            self._thread.join(seconds)

    def _work(self) -> None:
        driver = self._engine.driver
        try:
            asleep_at = None
            while self._take():
                # Another thread may run the pass that it waits for.
                with driver.turn("generate", lambda: True, asleep_at):
                    self._begin()
                    asleep_at = driver.news if self._idles() else None
                    self._answer()
        finally:  # whatever a tokenizer raised, nobody waits for ever
            self.stopped = True
            self._take()
            with driver.turn("generate"):
                self._fail(self._calls, refuse("engine", "closed", "an engine that is open"))
                self._answer()
            if self.closes:
                self._engine.close()
            atexit.unregister(self.stop)

    def _take(self, waits: bool = True) -> bool:
        """Note what was told, once there is something to do if it ``waits``; whether to go on."""
        waits = waits and not (self.stopped or any(call.unfinished for call in self._calls))
        with suppress(Empty):
            while True:
                # Other threads may be using the engine, and calls wait for them.
                call = self._told.get(waits, LOOK if self.waiting else None)
                waits = False
                if call is None:
                    self.stopped = True
                elif call.ended:
                    self._forget(call)
                else:
                    self._calls[call] = None
        return not self.stopped

    def _begin(self) -> None:
        waiting = [call for call in self._calls if call.requests is None and call.error is None]
        for call in sorted(waiting, key=lambda call: call.priority):
            full = len(self._engine.tracker.requests) >= self._max_requests
            if full and call.priority != URGENT:
                break
            self.waiting.discard(call)
            try:
                call.begin(self._engine, self._meanwhile)
            except BaseException as error:  # panics of Rust, as in a tokenizer, are no Exception
                self._fail([call], error)

    def _idles(self) -> bool:
        """Run a pass, if calls are unfinished; whether there was none to run for them."""
        unfinished = [call for call in self._calls if call.unfinished]
        try:
            return bool(unfinished) and not self._engine.tracker.step(self._meanwhile)
        except BaseException as error:  # of no request: the engine's own
            self._fail(unfinished, error)
            return False

    def _meanwhile(self, aside: AbstractContextManager[None]) -> None:
        """Between passes of a proof: a pass for the calls that are unfinished, and their answers,
        and then the turns of other threads. Calls that are new begin behind the proof."""
        self._take(waits=False)
        if any(call.unfinished for call in self._calls):
            with aside:
                self._idles()
                self._answer()
                self._engine.tracker.pause(nullcontext())
        else:
            self._engine.tracker.pause(aside)

    def _answer(self) -> None:
        """Tell every loop once what its tasks wait for: waking one takes longer than a token's
        text."""
        answers = defaultdict[asyncio.AbstractEventLoop, dict[Call, Answer]](dict)
        streams = sum(call.stream is not None for call in self._calls)
        rests = min(streams // CROWD, MOST_RESTS) if self._interval is None else self._interval - 1
        for call in list(self._calls):
            if (future := call.future) is None:
                continue
            if call.rests and call.unfinished and call.error is None:
                call.rests -= 1
                continue
            try:
                found = call.answer(self._engine.tokenizer)
            except BaseException as error:  # a tokenizer's
                self._fail([call], error)
                found = call.error
            if found is not None:
                call.future, call.rests = None, rests
                answers[future.get_loop()][call] = future, found
        for loop, told in answers.items():
            try:
                loop.call_soon_threadsafe(settle, list(told.values()))
            except RuntimeError:  # it is closed: no task waits any more
                for call in told:
                    self._forget(call)

    def _fail(self, calls: Iterable[Call], error: BaseException) -> None:
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            # No future takes the one, and others may end the loop of the tasks.
            error, cause = RuntimeError(repr(error)), error
            error.__cause__ = cause
        for call in calls:
            call.error = error
            self._engine.tracker.drop(call.requests or [])

    def _forget(self, call: Call) -> None:
        """Abort what is unfinished."""
        self._calls.pop(call, None)
        self.waiting.discard(call)
        self._engine.tracker.drop(call.requests or [])
