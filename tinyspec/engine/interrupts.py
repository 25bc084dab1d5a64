"""Delays Ctrl-C to the end of a step, so that no sequence is left half committed."""

from __future__ import annotations

# What ``signal`` wraps: its own functions turn handlers into enums, in ten times as long.
import _signal as signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class _Guard:
    """Replaces SIGINT's handler, and remembers whether the signal came; as a context manager, a
    step, to whose end the signal waits."""

    def __init__(self) -> None:
        self.in_step = False
        self._pending = False
        self._previous: Any = None

    def _remember(self, number: int, frame: object) -> None:
        self._pending = True

    def begin(self) -> None:
        self._previous = signal.signal(signal.SIGINT, self._remember)

    def end(self) -> None:
        """Restore the previous handler and pass on the signal, if it came."""
        signal.signal(signal.SIGINT, self._previous)
        if self._pending:
            self._pending = False
            signal.raise_signal(signal.SIGINT)

    def flush(self) -> None:
        """Pass the signal on, if it came, and go on delaying."""
        if self._pending:
            try:
                self.end()
            finally:
                self.begin()

    def __enter__(self) -> None:
        self.in_step = True

    def __exit__(self, *_: object) -> None:
        self.in_step = False
        self.flush()


_guards: list[_Guard] = []


def in_main_thread() -> bool:
    """Whether signals are handled in the calling thread."""
    return threading.current_thread() is threading.main_thread()


def _can_delay() -> bool:
    # A handler that was not set from Python (None) could not be restored.
    return in_main_thread() and signal.getsignal(signal.SIGINT) is not None


def flush() -> None:
    """Within ``between_steps``, where the thread waits: a signal that came takes effect now."""
    if _guards and not _guards[0].in_step and in_main_thread():
        _guards[0].flush()


@contextmanager
def between_steps() -> Iterator[None]:
    """Delay SIGINT to the end of the block, or of the next ``deferred_interrupt`` in it: the
    handler is set once for several of them."""
    if _guards or not _can_delay():
        yield
        return
    guard = _Guard()
    guard.begin()  # may raise if a signal has just come
    _guards.append(guard)
    try:
        yield
    finally:
        if guard in _guards:
            _guards.remove(guard)
            guard.end()


@contextmanager
def at_once() -> Iterator[None]:
    """Within ``between_steps``: a block in which SIGINT takes effect at once."""
    if not _guards or _guards[0].in_step or not in_main_thread():
        yield
        return
    guard = _guards.pop()
    try:
        guard.end()
        yield
    finally:
        guard.begin()
        _guards.append(guard)


def deferred_interrupt() -> AbstractContextManager[object]:
    """Delay SIGINT until the block has ended."""
    if not in_main_thread():
        return nullcontext()
    if not _guards:
        return _deferred_alone()
    return nullcontext() if _guards[0].in_step else _guards[0]


@contextmanager
def _deferred_alone() -> Iterator[None]:
    with between_steps(), _guards[0] if _guards else nullcontext():
        yield
