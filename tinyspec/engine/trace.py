"""Records of passes, kept while an engine runs: what every row was for, and what became of it.

While a pass runs only references to its arrays are kept, so that the host does hardly more than
without; ``traced.py`` draws up tokens, names and counts when somebody asks. Knows no pictures.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

from tinyspec.engine.in_flight import InFlightPass
from tinyspec.engine.traced import Kept, Name, Replay, TracedPass
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable

# Passes that are kept where the setting names no number.
PASSES_KEPT = 10_000
# Stays in the table whose names are held before those that have ended are left out.
NAMES_HELD = 4096


class Trace:
    """Records of the latest ``size`` passes of one engine.

    A pass of n sequences takes about 2 KB + 0.1 KB n of memory, and host time of 10 microseconds at
    most and 0.5 for each of its rows. Changes no bit and no fingerprint.
    """

    def __init__(self, size: int, table: SequenceTable, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self._table = table
        self._kept: deque[Kept] = deque(maxlen=size)
        self._names: dict[int, Name] = {}
        self._named = 0
        self._clear()

    def __len__(self) -> int:
        return len(self._kept)

    def _clear(self) -> None:
        self._proposed: list[tuple[Name, list[int]]] = []
        self._drafts: list[tuple[Array, Array]] = []
        self._verified: list[tuple[Array, Array, Array]] = []
        self._committed: list[tuple[Array, Array, Array]] = []

    def begin(self, *launched: InFlightPass | None) -> None:
        """``launched``, of which the first is about to be committed: to call while the sequences
        that it ends are there."""
        if self._named == self._table.generations:
            return
        if len(self._names) > NAMES_HELD:  # passes that are kept hold theirs
            passes = [one.generation_ids for one in launched if one is not None]
            held = chain.from_iterable([self._table.generation_id[self._table.rows], *passes])
            self._names = {n: self._names[n] for n in map(int, held) if n in self._names}
        self._learn_names()

    def _learn_names(self) -> None:
        """Of stays that have begun since the last call."""
        table = self._table
        if self._named == table.generations:
            return
        for sequence in table.sequences:
            if (
                sequence is not None
                and (entry := int(table.generation_id[sequence.row])) > self._named
            ):
                self._names[entry] = name_of(sequence)
        self._named = table.generations

    def proposed(self, sequence: Sequence, drafts: list[int]) -> None:
        """A drafter's proposal."""
        self._proposed.append((name_of(sequence), drafts))

    def drafted(self, rows: Array, tokens: Array) -> None:
        """One draft for each of ``rows``, negative where there is none."""
        self._drafts.append((rows, tokens))

    def verified(self, rows: Array, drafts: Array, decisions: Array) -> None:
        """``decisions`` [5, n] on the ``drafts`` [n] drafts of ``rows`` [n]."""
        self._verified.append((rows, drafts, decisions))

    def committed(self, rows: Array, counts: Array, tokens: Array) -> None:
        """``counts`` [n] of ``tokens`` [n, W] for each of ``rows`` [n], which still run."""
        self._learn_names()  # completions may have started from another one's prompt
        self._committed.append((self._table.generation_id[rows], counts, tokens))

    def close(self, launched: InFlightPass, began: float, ended: list[Sequence]) -> None:
        """The pass is committed, or has failed; ``ended`` sequences have finished."""
        table, works = self._table, launched.works
        rows = works.rows
        self._kept.append(
            Kept(
                launched.record,
                began,
                works,
                self._names,
                launched.generation_ids,
                table.generation_id[rows],
                table.computed[rows],
                table.num_pages[rows],
                self._proposed,
                self._drafts,
                self._verified,
                self._committed,
                [(name_of(sequence), sequence.finish_reason) for sequence in ended],
            )
        )
        self._clear()

    def supplied(self, ended: list[Sequence]) -> None:
        """Tokens from outside were committed after a pass, and ``ended`` sequences have
        finished."""
        if self._kept:
            self._kept[-1].committed.extend(self._committed)
            self._kept[-1].ended.extend((name_of(s), s.finish_reason) for s in ended)
        self._committed = []

    def passes(self) -> list[TracedPass]:
        """The passes that are kept, in order; drafts of before the first of them are -1."""
        replay = Replay()
        return [replay.drawn_up(kept) for kept in list(self._kept)]

    def save(self, path: str | Path) -> None:
        """Write what is kept as a Chrome trace: for https://ui.perfetto.dev and ``tinyspec trace``.

        Raises OSError where the file cannot be written.
        """
        from tinyspec.engine.trace_events import write

        write(Path(path), self.passes(), self.tokenizer)


def name_of(sequence: Sequence) -> Name:
    request = sequence.request
    prompt = len(request.prompt)
    return Name(request.request_id, sequence.index, prompt, request.params.deterministic)
