"""Says what a call waits for, where that takes long: once, on a terminal and in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("tinyspec")
# Seconds that a call waits without a word.
PATIENCE = 2.0


class Notice:
    """To be called again and again while a call waits; time counts from when it is made. pause:
    called every time."""

    def __init__(self, text: str, pause: Callable[[], None] = lambda: None):
        self._text, self._pause = text, pause
        self._begun = time.perf_counter()
        self._said = False

    def __call__(self) -> None:
        self._pause()
        if self._said or time.perf_counter() - self._begun <= PATIENCE:
            return
        self._said = True
        logger.info(self._text)
        if sys.stderr.isatty():
            sys.stderr.write(f"tinyspec: {self._text}\n")
