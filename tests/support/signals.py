"""Ctrl-C in tests: the handler that they start from, and interrupts at moments that they choose;
and forks."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGINT, RAISE = signal.SIGINT, signal.default_int_handler
Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handled_by(handler: Handler = RAISE) -> Iterator[None]:
    """SIGINT calls ``handler``; by default it raises KeyboardInterrupt, also where the tests were
    started with it ignored."""
    before = signal.signal(SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(SIGINT, before)


def interrupt() -> None:
    """Ctrl-C, now."""
    signal.raise_signal(SIGINT)


def interrupt_main_thread() -> None:
    """Ctrl-C, as a terminal sends it: to the main thread, from another one."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, SIGINT)


def handler() -> Any:
    """What SIGINT calls."""
    return signal.getsignal(SIGINT)


@contextmanager
def interrupt_at_call(number: int) -> Iterator[None]:
    """Ctrl-C when the block makes its ``number``-th call of a Python function: a moment of its
    own for each number, and the same one on every machine."""
    left = number

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event == "call"
        if left == 0:
            left = -1
            sys.setprofile(None)
            interrupt()

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def told_in_a_fork(*calls: Callable[[], object]) -> int:
    """How many of ``calls`` say, in a forked process, that it is one."""
    child = os.fork()
    if child == 0:
        told = 0
        for call in calls:
            try:
                call()
            except ValueError as error:
                told += "forked process" in str(error)
        os._exit(told)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
