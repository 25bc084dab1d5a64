"""States of recurrent layers: which sequence has which, how far each has moved, and those that the
prefix cache keeps. Host only; knows numbers of states, no tensor.

A running sequence has the state of its row of the table, as it is after ``state_at`` of its tokens:
a multiple of ``STATE_TILE`` that only committed tokens move. What came since lies in its ring.
Behind the states of the rows are those that are kept, each after a multiple of ``step`` tokens that
fill pages. Copies are made by whoever runs the next pass, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyspec.config import MOST_TAPS, STATE_TILE
from tinyspec.scheduler.passes import DRAFT, PROMPT
from tinyspec.scheduler.sequence_table import Array, SequenceTable
from tinyspec.scheduler.step import Step

# As many states are kept as a part of the sequences that run, and at least so many.
KEPT_PART, LEAST_KEPT = 4, 8

# Digest of the tokens before it, and whether it is canonical.
Key = tuple[bytes, bool]


class Checkpoints:
    """on: whether there are any. window: most drafts that a sequence may have."""

    on = False

    def __init__(self, table: SequenceTable, page_size: int, window: int):
        self.table = table
        self.step = max(page_size, STATE_TILE)
        rows = len(table.sequences)
        self.count = rows + max(LEAST_KEPT, rows // KEPT_PART)
        # What a pass leaves behind the state that it moved: the rest of a tile, drafts, and what a
        # convolution reads before them.
        needed = STATE_TILE + window + 1 + MOST_TAPS
        self.ring = -(-needed // STATE_TILE) * STATE_TILE
        self._free = list(range(rows, self.count))
        self.kept: dict[Key, int] = {}
        self._copies: list[tuple[int, int]] = []

    def reaches(self, row: int, tokens: int) -> bool:
        """Whether what comes after so many tokens can run from the state of a row."""
        return not self.on or bool(self.table.state_at[row] <= tokens)

    def fork(self, source: int, row: int) -> None:
        """Let a row go on from the state of row ``source``."""
        if self.on:
            self._copies.append((source, row))
            self.table.state_at[row] = self.table.state_at[source]

    def begin(self, row: int, key: Key, tokens: int) -> None:
        """Let a row begin with a state that is kept, after so many tokens."""
        self.kept[key] = number = self.kept.pop(key)  # the latest used
        self._copies.append((number, row))
        self.table.state_at[row] = self.table.state_kept[row] = tokens

    def keep(self, row: int, key: Key) -> None:
        """Keep the state of a row; the least recently used goes if need be."""
        if key in self.kept:
            return
        if not self._free:
            self.forget(next(iter(self.kept)))
        self.kept[key] = number = self._free.pop()
        self._copies.append((row, number))

    def forget(self, key: Key) -> None:
        """A state may be wrong, or its tokens' pages are gone."""
        if key in self.kept:
            self._free.append(self.kept.pop(key))

    def clear(self) -> None:
        """Forget everything; no sequence may be running."""
        for key in list(self.kept):
            self.forget(key)
        self._copies.clear()

    def cut(self, starts: Array, counts: Array, lengths: Array) -> Array:
        """[n]: ``counts`` [n] positions of prompts from ``starts`` [n] on, fewer where a pass can
        end with a state to be kept: the last of these before the token that gives logits."""
        if not self.on:
            return counts
        ends = np.minimum(starts + counts, lengths - 1) // self.step * self.step
        return np.where(ends > starts, ends - starts, counts)

    def move(self, step: Step) -> None:
        """Fill in ``moves`` [3, n] of the works of a pass: whose state, after how many tokens it
        is, and up to where the pass moves it: over tokens that are committed, or that must be for
        the sequence to go on; not in passes whose rows are drafts. ``copies``: states (from, to) to
        be copied before it, rings included."""
        table, rows = self.table, step.rows
        at = table.state_at[rows]
        # Another completion of a prompt runs its last token again.
        lengths = table.length[rows] - (step.kinds == PROMPT)
        final = np.where(table.given[rows], step.ends, np.minimum(step.ends, lengths))
        to: Any = np.maximum(final // STATE_TILE * STATE_TILE, at)
        to = np.where(step.kinds == DRAFT, at, to)
        table.state_at[rows] = to
        step.moves = np.stack([rows, at, to])
        step.copies, self._copies = self._copies, []
