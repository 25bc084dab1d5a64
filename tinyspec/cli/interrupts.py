"""Ctrl-C in a process of the command line: one line and exit status 130, whenever it comes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

# As shells report a process that Ctrl-C has ended.
INTERRUPTED = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A block that holds nothing worth saving, and in which an exception must not come at any line:
    code in C++ that runs while torch is imported ends the process with a message of its own."""
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def load_libraries() -> None:
    """Import what every engine needs."""
    with ends_at_once():
        import torch  # noqa: F401
        import transformers  # noqa: F401

        import tinyspec.engine.engine  # noqa: F401


def ignore_further() -> None:
    """The process is about to end by Ctrl-C: another one comes too late."""
    if current_thread() is main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(*_: Any) -> None:
    start = "\n" if sys.stderr.isatty() else ""
    os.write(2, f"{start}tinyspec: interrupted\n".encode())
    os._exit(INTERRUPTED)
