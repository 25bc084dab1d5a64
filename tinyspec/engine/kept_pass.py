"""One pass as a trace keeps it: references to arrays, and whose the stays in the table are."""

from __future__ import annotations

from typing import NamedTuple

from tinyspec.scheduler.passes import PassRecord, ScheduledRows
from tinyspec.scheduler.sequence_table import Array


class Name(NamedTuple):
    """Whose a stay in the table is."""

    request_id: str
    completion: int
    prompt_tokens: int
    deterministic: bool


class Kept(NamedTuple):
    """One pass as it is kept, in arrays that nobody writes to any more.

    began: seconds of ``time.perf_counter``. names: of stays in the table. entries: of the works'
    rows when the pass was launched, and after it was committed. computed, pages: of these rows,
    after it. proposed: (sequence, drafts) of a drafter. drafts: (rows, tokens) of the fast path.
    verified: (rows, drafts, decisions). committed: (entries, counts, tokens). ended: sequences.
    """

    record: PassRecord
    began: float
    works: ScheduledRows
    names: dict[int, Name]
    entries: Array
    after: Array
    computed: Array
    pages: Array
    proposed: list[tuple[Name, list[int]]]
    drafts: list[tuple[Array, Array]]
    verified: list[tuple[Array, Array, Array]]
    committed: list[tuple[Array, Array, Array]]
    ended: list[tuple[Name, str | None]]
