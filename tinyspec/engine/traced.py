"""A traced pass to read: its works by kind, with the tokens that each drafted and committed.

Draws up what ``trace`` keeps. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tinyspec.scheduler.passes import KINDS, VERIFY, PassRecord, ScheduledRows
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


PROMPT, CANONICAL, PLAIN, DRAFT, VERIFIED = "prompt", "canonical", "plain", "draft", "verify"
# Completions that get a token without rows, from another one's prompt or when all have theirs, or
# that end without any.
NO_ROWS = "no rows"


@dataclass
class TracedWork:
    """One sequence's rows in a pass.

    kind: "prompt", "canonical" (a deterministic request's newest token in a canonical pass),
    "plain" (the same of a plain one), "draft", "verify" or "no rows". start: position of its first
    row. tokens: ids committed. newest: the token committed before these, -1: unknown. drafts: ids
    drafted by this pass, or verified by it; -1: unknown. targets: of a verify, all that the rows
    yielded. accepted, rejected: drafts. proposed: drafts that a drafter added before the pass. kv:
    tokens whose KV is final after the pass. kv_drafts: tokens behind them whose KV is a draft's.
    pages: held after it. end: finish reason.
    """

    request_id: str
    index: int
    prompt_tokens: int
    deterministic: bool
    kind: str
    start: int = 0
    rows: int = 0
    tokens: list[int] = field(default_factory=list)
    newest: int = -1
    drafts: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0
    proposed: int = 0
    kv: int = 0
    kv_drafts: int = 0
    pages: int = 0
    end: str | None = None


@dataclass
class TracedPass:
    """One pass. began: seconds of ``time.perf_counter``, of the step that committed it; its length
    is ``record.seconds``. surplus: rows of sequences that had gone when it was committed."""

    record: PassRecord
    began: float
    works: list[TracedWork]
    surplus: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows by kind, padding included."""
        found = dict.fromkeys((PROMPT, CANONICAL, PLAIN, DRAFT, VERIFIED), 0)
        for work in self.works:
            if work.rows:
                found[work.kind] += work.rows
        return {**found, "surplus": self.surplus, "padding": self.record.padding}


class Replay:
    """Draws up passes in their order: what waits from pass to pass are drafts, and the newest token
    of each completion."""

    def __init__(self) -> None:
        self._drafts: dict[int, list[int]] = {}  # by stay in the table
        self._newest: dict[Name, int] = {}
        self._proposed: list[tuple[Name, list[int]]] = []

    def drawn_up(self, kept: Kept) -> TracedPass:
        """A pass that a trace has kept."""
        surplus, ended = 0, {name for name, _ in kept.ended}
        by_row: dict[int, tuple[int, TracedWork]] = {}
        works: dict[int, TracedWork] = {}
        rows, kinds = kept.works.rows.tolist(), kept.works.kinds.tolist()
        starts, ends = kept.works.starts.tolist(), kept.works.ends.tolist()
        computed, pages = kept.computed.tolist(), kept.pages.tolist()
        for n, (entry, after) in enumerate(
            zip(kept.entries.tolist(), kept.after.tolist(), strict=True)
        ):
            name = kept.names[entry]
            if entry != after and name not in ended:
                surplus += ends[n] - starts[n]
                continue
            work = TracedWork(*name, _kind(kinds[n], name.deterministic), starts[n])
            work.rows = ends[n] - starts[n]
            if entry == after:
                work.kv, work.pages = computed[n], pages[n]
                work.kv_drafts = ends[n] - computed[n] if work.kind == DRAFT else 0
            works[entry] = work
            by_row[rows[n]] = entry, work
        self._add_drafts(kept, works, by_row)
        self._add_tokens(kept, works)
        found = list(works.values())
        known = {(work.request_id, work.index): work for work in found}
        for name, reason in kept.ended:
            if name[:2] in known:
                known[name[:2]].end = reason
            else:  # before it had rows
                found.append(TracedWork(*name, NO_ROWS, end=reason))
        return TracedPass(kept.record, kept.began, found, surplus)

    def _add_drafts(
        self, kept: Kept, works: dict[int, TracedWork], by_row: dict[int, tuple[int, TracedWork]]
    ) -> None:
        self._proposed += kept.proposed
        # What was proposed for those that a pass had no room for counts when they have rows.
        stays = {kept.names[entry]: entry for entry in works}
        for name, drafts in self._proposed:
            if name in stays:
                works[stays[name]].proposed += len(drafts)
                self._drafts[stays[name]] = list(drafts)
        self._proposed = [one for one in self._proposed if one[0] not in stays]
        for rows, tokens in kept.drafts:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                entry, work = by_row[row]
                if token >= 0:
                    work.drafts.append(token)
                    self._drafts.setdefault(entry, []).append(token)
        for rows, counts, decisions in kept.verified:
            committed, agreed, left = decisions[:3].tolist()
            for n, row in enumerate(rows.tolist()):
                entry, work = by_row[row]
                count = int(counts[n])
                known = self._drafts.get(entry, [])[-count:]
                work.kind, work.accepted = KINDS[VERIFY], agreed[n]
                work.drafts = [-1] * (count - len(known)) + known
                work.rejected = count - agreed[n] if agreed[n] < min(committed[n], count) else 0
                self._drafts[entry] = known[len(known) - left[n] :] if left[n] else []

    def _add_tokens(self, kept: Kept, works: dict[int, TracedWork]) -> None:
        for entries, counts, tokens in kept.committed:
            for n, entry in enumerate(entries.tolist()):
                name = kept.names[entry]
                work = works.setdefault(entry, TracedWork(*name, NO_ROWS))
                work.newest = self._newest.get(name, -1)
                work.tokens = tokens[n, : counts[n]].tolist()
                self._newest[name] = work.tokens[-1]
                if work.kind == VERIFIED:
                    work.targets = [token for token in tokens[n].tolist() if token >= 0]
                    work.accepted = min(work.accepted, len(work.tokens))


def _kind(kind: int, deterministic: bool) -> str:
    name = KINDS[kind]
    return name if name != "decode" else CANONICAL if deterministic else PLAIN
