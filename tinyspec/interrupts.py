"""Ctrl-C between steps: SIGINT is held back in the main thread, and takes effect where nothing is
half done. Knows no lock and no step."""

from __future__ import annotations

# What ``signal`` wraps: its own functions turn handlers into enums, in ten times as long.
import _signal as signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class _Guard:
    """In place of SIGINT's handler: remembers whether the signal came, and rings the bell of a
    thread that sleeps."""

    def __init__(self) -> None:
        self.came = False
        self.bell: SimpleQueue[None] | None = None
        self._previous = signal.signal(signal.SIGINT, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.came = True
        if self.bell is not None:
            self.bell.put(None)

    def end(self) -> None:
        """Restore the previous handler and pass on the signal, if it came."""
        signal.signal(signal.SIGINT, self._previous)
        if self.came:
            signal.raise_signal(signal.SIGINT)


_guards: list[_Guard] = []  # at most one


def in_main_thread() -> bool:
    """Whether signals are handled in the calling thread."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def between_steps() -> Iterator[None]:
    """Hold SIGINT back to the end of the block, or to the next ``flush`` in it."""
    # A handler that was not set from Python (None) could not be restored.
    if _guards or not in_main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    _guards.append(_Guard())  # may raise if a signal has just come
    try:
        yield
    finally:
        if _guards:
            _guards.pop().end()


def flush() -> None:
    """Within ``between_steps``: a signal that came takes effect now."""
    if _guards and _guards[0].came and in_main_thread():
        with at_once():
            pass


@contextmanager
def waking(bell: SimpleQueue[None]) -> Iterator[None]:
    """Within ``between_steps``: a block in which a signal puts something into ``bell``, also one
    that has come and taken no effect."""
    guard = _guards[0] if _guards and in_main_thread() else None
    if guard is not None:
        guard.bell = bell
        if guard.came:
            bell.put(None)
    try:
        yield
    finally:
        if guard is not None:
            guard.bell = None


@contextmanager
def at_once() -> Iterator[None]:
    """Within ``between_steps``: a block in which SIGINT takes effect at once."""
    if not _guards or not in_main_thread():
        yield
        return
    guard = _guards.pop()
    try:
        guard.end()
        yield
    finally:
        _guards.append(_Guard())
