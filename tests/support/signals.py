"""Ctrl-C in tests: the handler that they start from, and interrupts at moments that they choose."""

from __future__ import annotations

import _signal
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

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


Line = tuple[str, int, str, int]


@contextmanager
def lines_of(files: set[str]) -> Iterator[list[Line]]:
    """Every line of ``files`` that the block runs, in order: file and line, and from which other
    line its function was called, so that lines of helpers count once for each caller."""
    found: list[Line] = []
    with _traced(files, found.append):
        yield found


@contextmanager
def interrupt_at_line(files: set[str], line: Line) -> Iterator[None]:
    """Ctrl-C when the block first runs ``line``, as ``lines_of`` tells it."""
    left = [line]

    def at(one: Line) -> None:
        if left and one == left[0]:
            left.clear()
            interrupt()

    with _traced(files, at):
        yield


@contextmanager
def _traced(files: set[str], at: Callable[[Line], None]) -> Iterator[None]:
    def trace(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in files or code is _traced.__wrapped__.__code__:
            return None
        caller = frame.f_back
        while caller and caller.f_code.co_filename.endswith("contextlib.py"):
            caller = caller.f_back
        if event == "line":
            by = (caller.f_code.co_filename, caller.f_lineno) if caller else ("", 0)
            at((code.co_filename, frame.f_lineno, *by))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupt_when_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in place of the next change of a handler."""
    change = _signal.signal

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(_signal, "signal", change)
        raise KeyboardInterrupt

    monkeypatch.setattr(_signal, "signal", interrupted)
