"""Says what a call waits for, where that takes long: on a terminal and in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("tinyspec")
# Seconds that a call waits without a word; after twice as many the next one comes, and so on.
PATIENCE = 2.0


class Notice:
    """To be called after every step while a call waits; time counts from when it is made. pause:
    called every time. stage: how far it is."""

    def __init__(
        self,
        text: str,
        pause: Callable[[], None] = lambda: None,
        stage: Callable[[], str] = lambda: "",
    ):
        self._text, self._pause, self._stage = text, pause, stage
        self._begun = time.perf_counter()
        self._next = PATIENCE
        self._steps = 0

    def __call__(self) -> None:
        self._pause()
        self._steps += 1
        seconds = time.perf_counter() - self._begun
        if seconds <= self._next:
            return
        stage = self._stage()
        parts = [f"step {stage}"] if stage else []
        if self._next > PATIENCE:
            parts.append(f"{self._steps} steps in {seconds:.0f} s")
        far = f" ({'; '.join(parts)})" if parts else ""
        self._next = 2 * max(seconds, PATIENCE)
        logger.info(self._text + far)
        if sys.stderr.isatty():
            sys.stderr.write(f"tinyspec: {self._text}{far}\n")
