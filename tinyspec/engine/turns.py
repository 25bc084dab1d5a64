"""Turns: of the threads that call one engine, one at a time uses it; the others wait.

Whoever has the turn and runs steps runs them for all. A thread whose requests have got something,
or that wants something else than steps, gets the turn after the step that is running; only where no
such thread waits does another one get it, to go on with the steps. Knows no requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock, get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinyspec.engine.interrupts import between_steps, flush, in_main_thread
from tinyspec.errors import refuse

# Seconds between two looks of a thread for what cannot wake it: Ctrl-C, for the main one.
LOOK = 0.05


class _Caller:
    """A block that waits or has the turn. ready: whether it need not wait for another step; gate:
    open once it has the turn."""

    def __init__(self, ready: Callable[[], bool]):
        self.ready = ready
        self.gate = Lock()
        self.gate.acquire()


def _always() -> bool:
    return True


class Turns:
    """Hands the turn from thread to thread, to those that are ready in the order in which they
    came. Ctrl-C takes effect between blocks and while a thread waits, never in between.

    before_end: called by the thread that has the turn before it gives it up; left_over: whether
    that is to be done once more.
    """

    def __init__(
        self, before_end: Callable[[], None], left_over: Callable[[], bool] = lambda: False
    ):
        self._before_end, self._left_over = before_end, left_over
        self._process = os.getpid()
        self._lock = Lock()
        self._waiting: list[_Caller] = []
        self._current: _Caller | None = None
        self._thread: int | None = None

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that made the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise ValueError in a forked process: threads and locks of the parent are not there, and
        OpenMP and CUDA do not work on."""
        if self.forked:
            raise refuse(
                "engine",
                f"one of process {self._process}",
                "in a forked process its threads are missing; make an engine of its own in a "
                'process started by the "spawn" method',
            )

    @property
    def mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._thread == get_ident() and not self.forked

    @property
    def wanted(self) -> bool:
        """Whether a thread that is ready waits."""
        if not self._waiting:
            return False
        with self._lock:
            return any(caller.ready() for caller in self._waiting)

    @contextmanager
    def turn(self, ready: Callable[[], bool] = _always) -> Iterator[None]:
        """A block during which no other thread uses the engine; within another block of the same
        thread it does nothing.

        ready: whether there is something for the block but to step; while it answers False, and
        others step, it waits. Called by other threads. Raises ValueError in a forked process.
        """
        if self.mine:
            yield
            return
        self.check_process()
        with between_steps():
            caller = _Caller(ready)
            try:
                self._begin(caller)
                yield
            finally:
                self._end(caller)

    def try_turn(self) -> None:
        """A turn with nothing but ``before_end``, if nobody has one now. Waits for nothing, and may
        be called at any line of any thread, as finalizers are."""
        if self.forked:
            return
        with between_steps():
            if not self._lock.acquire(blocking=False):
                return
            caller = _Caller(_always)
            if free := self._current is None:
                self._current, self._thread = caller, get_ident()
            self._lock.release()
            if free:
                self._end(caller)

    def _begin(self, caller: _Caller) -> None:
        with self._lock:
            if self._current is None:
                self._current, self._thread = caller, get_ident()
                return
            self._waiting.append(caller)
        while not caller.gate.acquire(timeout=LOOK if in_main_thread() else -1):
            flush()
        self._thread = get_ident()

    def _end(self, caller: _Caller) -> None:
        """Give the turn to the next one; or stop waiting for it."""
        try:
            if self._current is caller:
                self._thread = get_ident()  # it may have got the turn while it waited no more
                self._before_end()
        finally:
            with self._lock:
                if caller in self._waiting:
                    self._waiting.remove(caller)
                elif self._current is caller:
                    self._thread, self._current = None, None
                    self._wake_next()
            if self._left_over():  # what came while the turn ended
                self.try_turn()

    def _wake_next(self) -> None:
        if self._waiting:
            ready = (caller for caller in self._waiting if caller.ready())
            self._current = next(ready, self._waiting[0])
            self._waiting.remove(self._current)
            self._current.gate.release()


class HasTurns:
    """Whose methods may be called by several threads of one process."""

    turns: Turns

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to one model and one "
            "process; make another where it is needed"
        )


S = TypeVar("S", bound=HasTurns)
P = ParamSpec("P")
T = TypeVar("T")


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """``method``, during which no other thread uses the engine."""

    @wraps(method)
    def run(self: S, *args: Any, **kwargs: Any) -> T:
        if self.turns.mine:
            return method(self, *args, **kwargs)
        with self.turns.turn():
            return method(self, *args, **kwargs)

    return run


def in_turns(*names: str) -> Callable[[type[T]], type[T]]:
    """For a class whose methods ``names`` are ``in_turn``."""

    def change(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, in_turn(vars(cls)[name]))
        return cls

    return change
