"""The thoughts of one prompt, and how far it may run before there are more. Host only.

A prompt is cut into chunks. A thought is made of each whole one, and its state is added to the next
chunk alone. Chunks ahead run before the thoughts between are known, as if these were trivial; what
follows the first that is not is computed again. Knows neither blocks nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinyspec.outputs import Thought


class Made(NamedTuple):
    """A thought and its state [chunk_size, d], None for zero."""

    thought: Thought
    state: Any


@dataclass(eq=False)
class Thoughts:
    """Of a prompt of ``num_prompt`` tokens in chunks of ``chunk_size``.

    window: most chunks that run at once while thoughts are missing; None: all. width: how many do
    now, fewer where what ran ahead was in vain. found: of the first chunks. rest: hidden states
    [r, d] of the chunk that is partly computed.
    """

    chunk_size: int
    num_prompt: int
    window: int | None
    found: list[Made] = field(default_factory=list)
    rest: Any = None
    width: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self.width = self.window or 1

    @property
    def end(self) -> int:
        """Positions that are thought about."""
        return self.num_prompt // self.chunk_size * self.chunk_size

    @property
    def known(self) -> int:
        """Positions whose thoughts are found."""
        return len(self.found) * self.chunk_size

    @property
    def unthought(self) -> int:
        """Chunks without a thought."""
        return (self.end - self.known) // self.chunk_size

    @property
    def reach(self) -> int:
        """Positions that may run before the next thought is found: all, drafts too, where the rest
        of the prompt is within the window."""
        most = 2**62
        if self.window is None or not self.unthought:
            return most
        reach = self.known + self.width * self.chunk_size
        return most if reach >= self.num_prompt else reach

    def add(self, thought: Thought, state: Any) -> None:
        """The thought of the next chunk."""
        self.found.append(Made(thought, state))
        self.rest = None

    def looked(self, chunks: int, thinking: int | None) -> None:
        """So many chunks ran, of which the one numbered ``thinking`` was the first whose thought is
        not trivial; None: all are."""
        if self.window is None or not chunks:
            return
        if thinking is None:
            self.width = self.window
        elif thinking == 0 or 4 * (thinking + 1) <= chunks:
            self.width = max(1, self.width // 2)

    def forget(self) -> None:
        """The model changed."""
        self.found, self.rest = [], None

    def added(self, first: int, end: int) -> Iterator[tuple[int, Any]]:
        """(position, states [n, d] from there on) of what is added to positions ``first`` to
        ``end - 1``."""
        size, end = self.chunk_size, min(end, self.num_prompt)
        for chunk in range(max(first // size, 1), -(-end // size)):
            if chunk <= len(self.found) and (state := self.found[chunk - 1].state) is not None:
                begin = max(first, chunk * size)
                yield begin, state[begin - chunk * size : end - chunk * size]

    def read(self, first: int, end: int) -> tuple[int, int]:
        """Of positions ``first`` to ``end - 1``, the first and the end of those that a thought is
        yet to be made of; none where they are equal."""
        begin = max(first, self.known)
        return begin, max(begin, min(end, self.end))
