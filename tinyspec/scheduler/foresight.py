"""The sequence table as it will be once a pass that is under way is committed. Host only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tinyspec.scheduler.sequence_table import Array, SequenceTable


@contextmanager
def foresight(
    table: SequenceTable, rows: Array, ends: Array, canonical: bool, grown: Array, drafted: Array
) -> Iterator[None]:
    """A block in which ``table`` is as if a pass were committed that is not: ``rows`` have run
    (``advance``), ``grown`` have a token and ``drafted`` a draft more, ids not written. No sequence
    may enter or leave in it."""
    touched = np.concatenate([rows, drafted])
    table.make_room(int((table.length[touched] + table.num_drafts[touched]).max(initial=0)) + 1)
    columns = (table.length, table.computed, table.canonical, table.num_drafts)
    before = [column[touched] for column in columns]
    table.foresees = True
    try:
        table.advance(rows, ends, canonical)
        table.length[grown] += 1
        table.settle(grown)
        table.num_drafts[drafted] += 1
        yield
    finally:
        table.foresees = False
        for column, values in zip(columns, before, strict=True):
            column[touched] = values
