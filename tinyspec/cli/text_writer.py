"""Completions as text, in the order of the prompts. Knows events and outputs, not engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TextIO

from tinyspec.outputs import RequestOutput, StreamEvent


class TextWriter:
    """Writes one completion after the other, each followed by a line feed, while all of them grow.

    live: the first that is unfinished is shown as it grows, what came of the others in the meantime
    follows when it is their turn; otherwise each is written as a whole. keys: (request id, index)
    of the completions, in order.
    """

    def __init__(self, keys: Iterable[tuple[str, int]], file: TextIO, live: bool):
        self._waiting = deque(keys)
        self._texts: dict[tuple[str, int], str] = dict.fromkeys(self._waiting, "")
        self._ended: set[tuple[str, int]] = set()
        self._file, self._live = file, live

    def event(self, event: StreamEvent) -> None:
        """Tokens that one completion got."""
        if self._live:
            self._add((event.request_id, event.index), event.text, event.finish_reason is not None)

    def output(self, output: RequestOutput) -> None:
        """A request has finished."""
        if not self._live:
            for index, completion in enumerate(output.completions):
                self._add((output.request_id, index), completion.text, True)

    def _add(self, key: tuple[str, int], text: str | None, ended: bool) -> None:
        self._texts[key] += text or ""
        if ended:
            self._ended.add(key)
        if not self._waiting or key != self._waiting[0]:
            return
        while self._waiting:
            first = self._waiting[0]
            self._file.write(self._texts[first])
            self._texts[first] = ""
            if first not in self._ended:
                break
            self._file.write("\n")
            self._waiting.popleft()
        self._file.flush()
