"""One lock around a step: the thread that holds it steps for all. Knows no requests.

Ctrl-C takes effect between steps: SIGINT is held back in the main thread while it has the lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock, get_ident
from typing import Concatenate, ParamSpec, TypeVar

from tinyspec.errors import refuse
from tinyspec.interrupts import between_steps, flush, in_main_thread

# Seconds between two looks of a thread that waits for what cannot wake it: Ctrl-C, for the main
# one.
LOOK = 0.05


class StepLock:
    """Held by one thread at a time. A thread that waits gets it between two steps of another one.

    in_step: a step is running, from within which nothing may take it.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._owner: int | None = None
        # Of each thread that waits: whether it wants more than to step, and what opens once it has
        # the lock.
        self._waiting: dict[int, tuple[Callable[[], bool], Lock]] = {}
        self.in_step = False

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
        """Whether the calling thread holds it."""
        return self._owner == get_ident() and not self.forked

    @property
    def wanted(self) -> bool:
        """Whether a thread waits that wants more than to step."""
        return any(ready() for ready, _ in tuple(self._waiting.values()))

    @contextmanager
    def __call__(self, what: str, ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """A block during which no other thread uses the engine; within another block of the same
        thread it does nothing.

        what: the call that needs it. ready: whether it has more to do than to step, which another
        thread may do for it meanwhile; called by other threads. Raises ValueError in a forked
        process, RuntimeError naming ``what`` within a step of the calling thread.
        """
        self.check_process()
        if self.mine:
            if self.in_step:
                raise RuntimeError(
                    f"{what} was called from within a step of the same engine (by a logits "
                    "processor, criterion, drafter or hook); only abort and weights_changed may be "
                    "called there"
                )
            yield
            return
        with between_steps():
            self._take(ready)
            try:
                yield
            finally:
                self._give()

    def _take(self, ready: Callable[[], bool]) -> None:
        with self._lock:
            if self._owner is None:
                self._owner = get_ident()
                return
            gate = Lock()
            gate.acquire()
            self._waiting[get_ident()] = ready, gate
        try:
            while not gate.acquire(timeout=LOOK if in_main_thread() else -1):
                flush()
        except BaseException:
            with self._lock:
                waits = self._waiting.pop(get_ident(), None)
            if waits is None:  # it has got it meanwhile
                self._give()
            raise

    def _give(self) -> None:
        """To the first that wants more than to step, or else to the first."""
        with self._lock:
            wanting = (thread for thread, (ready, _) in self._waiting.items() if ready())
            self._owner = next(wanting, next(iter(self._waiting), None))
            if self._owner is not None:
                self._waiting.pop(self._owner)[1].release()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block of the thread that holds it that is a step, or runs the model otherwise: code of
        the user's in it may not take the lock."""
        outer, self.in_step = self.in_step, True
        try:
            yield
        finally:
            self.in_step = outer


class OneProcess:
    """What belongs to one model and one process, and which threads share by its lock."""

    lock: StepLock

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to one model and one "
            "process; make another where it is needed"
        )


S = TypeVar("S", bound=OneProcess)
P = ParamSpec("P")
T = TypeVar("T")


def locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """``method``, during which no other thread uses the engine."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock(method.__name__):
            return method(self, *args, **kwargs)

    return run
