"""Ctrl-C between steps instead of within one, so that no sequence is left half committed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Hold:
    """Takes the place of SIGINT's handler, and remembers what came."""

    def __init__(self) -> None:
        self.in_step = False
        self._came = False
        self._before: Any = None

    def _note(self, number: int, frame: object) -> None:
        self._came = True

    def begin(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        """The handler of before is back; it has what came."""
        # None is not Python's to restore.
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
        if self._came:
            self._came = False
            signal.raise_signal(signal.SIGINT)

    def pause(self) -> None:
        """Let the handler of before have what came, and hold on."""
        if self._came:
            try:
                self.end()
            finally:
                self.begin()


_holds: list[_Hold] = []


def _mine() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def between_steps() -> Iterator[None]:
    """Around several blocks of ``deferred_interrupt``: spares each of them the change of handlers.
    What comes between two of them waits for the end of the next."""
    if not _mine() or _holds:
        yield
        return
    hold = _Hold()
    hold.begin()  # which may raise, where something has come already
    _holds.append(hold)
    try:
        yield
    finally:
        _holds.pop().end()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back SIGINT until the block has ended; then let the handler of before have it."""
    if not _mine() or (_holds and _holds[0].in_step):
        yield
        return
    with between_steps():
        hold = _holds[0]
        hold.in_step = True
        try:
            yield
        finally:
            hold.in_step = False
            hold.pause()
