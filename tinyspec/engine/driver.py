"""Who uses an engine: one thread at a time has the turn, everybody else posts or waits for it.

With ``async_worker`` the only file that knows of threads. Ctrl-C takes effect between passes:
SIGINT is held back in the main thread from before it asks for the turn until after it has given it
up. ``THREADS.md`` tells what each caller may do where. Knows no requests and no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Lock, get_ident

from tinyspec.errors import refuse
from tinyspec.interrupts import between_steps, flush, waking
from tinyspec.model import openmp


class _Waiter:
    """A thread in the line. ready: whether it wants more than passes, which another thread may run
    for it meanwhile. asleep_at: ``news`` when there was nothing to run for it. given: it has the
    turn. passed_over: the turn went to one behind it. bell: wakes it."""

    def __init__(self, ready: Callable[[], bool], asleep_at: int | None):
        self.ready, self.asleep_at, self.thread = ready, asleep_at, get_ident()
        self.given = self.passed_over = False
        self.bell: SimpleQueue[None] = SimpleQueue()


class Driver:
    """news: counts what may have given sleepers something to run."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._posts: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = Lock()  # for the few lines that change what follows
        self._owner: int | None = None
        self._inside: set[int] = set()
        self._line: list[_Waiter] = []
        self.news = 0

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
    def in_turn(self) -> bool:
        """Whether the calling thread has the turn: it may post, and not wait."""
        return self._owner == get_ident() and not self.forked

    # Posting

    def post(self, what: Callable[[], object]) -> None:
        """Let ``what`` be done when the next turn begins, or in this one before the next commit or
        at its end; at any line of any thread, as of finalizers and signal handlers."""
        self._posts.put(what)
        self._wake()

    def apply_posts(self) -> None:
        """To call in the turn."""
        while not self._posts.empty():
            self._posts.get_nowait()()
            self.news += 1

    def _wake(self) -> None:
        """Let a sleeper see what was posted. Where the lock is held, its holder does this."""
        while self._owner is None and self._line and not self._posts.empty():
            if not self._lock.acquire(blocking=False):
                return
            try:
                if self._owner is None and self._line:
                    self.news += 1
                    self._hand_to(self._line[0])
            finally:
                self._lock.release()

    # Waiting

    @contextmanager
    def turn(
        self, what: str, ready: Callable[[], bool] | None = None, asleep_at: int | None = None
    ) -> Iterator[None]:
        """A block in which no other thread uses the engine.

        what: the call that needs it. ready: of one who wants passes alone: whether it has more to
        do than to run them; called in other turns. asleep_at: sleep until there is other ``news``.
        Raises ValueError in a forked process, RuntimeError naming ``what`` where the calling thread
        has the turn, or is asking for it or giving it up, as a signal handler may find it.
        """
        self.check_process()
        if get_ident() in self._inside:
            raise RuntimeError(
                f"{what} was called from within a step of the same engine (by a logits processor, "
                "criterion, drafter, hook or signal handler); only abort and weights_changed may "
                "be called there"
            )
        with between_steps():
            self._inside.add(get_ident())
            try:
                self._take(ready or (lambda: True), asleep_at)
                try:
                    self.apply_posts()
                    yield
                finally:
                    try:
                        self.apply_posts()
                    finally:
                        self._give(news=ready is None)
            finally:
                self._inside.discard(get_ident())

    @property
    def wanted(self) -> bool:
        """Whether another thread waits that wants more than passes; asked in the turn."""
        return any(each.ready() for each in self._awake)

    @property
    def _awake(self) -> list[_Waiter]:
        return [each for each in tuple(self._line) if each.asleep_at != self.news]

    def pause(self, aside: AbstractContextManager[object]) -> None:
        """Let those that wait use the engine first, and do what was posted; in the turn, in a block
        of ``aside`` where there is any of it. What signal handlers raise meanwhile is raised in the
        turn; Ctrl-C waits."""
        if self._awake or not self._posts.empty():
            with aside:
                raised: BaseException | None = None
                self._give(news=False)
                while not self.in_turn:
                    try:
                        self._take(lambda: True, None, held=True)
                    except BaseException as error:
                        raised = error
                self.apply_posts()
                if raised is not None:
                    raise raised

    def _take(self, ready: Callable[[], bool], asleep_at: int | None, held: bool = False) -> None:
        with self._lock:
            if self._owner is None and asleep_at != self.news:
                self._owner = get_ident()
                return
            waiter = _Waiter(ready, asleep_at)
            self._line.append(waiter)
        self._wake()
        try:
            openmp.release()  # the workers that it has begun would spin beside those of others
            while not waiter.given:
                if not held:
                    flush()
                with nullcontext() if held else waking(waiter.bell):
                    waiter.bell.get()
        except BaseException:
            with self._lock:
                if not waiter.given:
                    self._line.remove(waiter)
            if waiter.given:
                self._give(news=False)
            else:
                self._wake()  # by whom the lock was found held
            raise

    def _give(self, news: bool) -> None:
        """To the first that wants more than passes, but past another one only once; or else to the
        first that is awake."""
        with self._lock:
            self.news += news
            self._owner = None
            if awake := self._awake:
                chosen = next((each for each in awake if each.ready()), awake[0])
                if awake[0].passed_over:
                    chosen = awake[0]
                awake[0].passed_over = True
                self._hand_to(chosen)
        self._wake()

    def _hand_to(self, waiter: _Waiter) -> None:
        self._line.remove(waiter)
        self._owner, waiter.given = waiter.thread, True
        waiter.bell.put(None)


def not_copied(self: object) -> tuple[object, ...]:
    """The ``__reduce__`` of what belongs to one model and one process."""
    raise TypeError(
        f"{type(self).__name__} cannot be copied or pickled: it belongs to one model and one "
        "process; make another where it is needed"
    )
