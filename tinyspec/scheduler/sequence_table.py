"""What every pass needs to know of the running sequences, in arrays. Host only.

Each running sequence has a row, from its start to its end or preemption; whatever draws up, packs
or commits a pass reads and writes columns of many rows at once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# What a column holds, by the name of its type.
Flags = np.ndarray[Any, Any]
Reals = np.ndarray[Any, Any]
Counts = np.ndarray[Any, Any]
KINDS = {"Flags": np.bool_, "Reals": np.float64, "Counts": np.int64}
NO_STOP = -1


class Fixed:
    """One number of each running sequence, [R] each: what it is, which stays as it is.

    generation_id: a number of its own whenever a sequence gets a row, 0 in a free one. priority:
    the lowest starts first, then the lowest order, of arrival. deterministic. most: tokens at which
    it ends. window: most drafts that may wait. temperature: 0 for greedy. key: of the noise. top_k,
    top_p, min_p: filters, 0, 1 and 0 where they are off. logprobs_wanted. special_sampling: the
    sampler needs its parameters and history. special_commit: tokens are committed one by one.
    given: its continuation is. drafter: a number of what proposes drafts for it, 0: nothing.
    has_embeds, scores_prompt: parts of the prompt enter as embeddings, or its log-probabilities are
    wanted. thinking: states are added to its prompt. supplied: its tokens come from outside.
    """

    generation_id: Counts
    priority: Counts
    order: Counts
    deterministic: Flags
    most: Counts
    window: Counts
    temperature: Reals
    key: Counts
    top_k: Counts
    top_p: Reals
    min_p: Reals
    logprobs_wanted: Flags
    special_sampling: Flags
    special_commit: Flags
    given: Flags
    drafter: Counts
    has_embeds: Flags
    scores_prompt: Flags
    thinking: Flags
    supplied: Flags


class Columns(Fixed):
    """And what changes: length: committed tokens. computed: leading positions whose KV is final.
    canonical: those of them whose KV is canonical. frozen: leading positions in shared pages, which
    must not be written. indexed: leading pages that the prefix cache has seen. num_pages.
    num_drafts. draft_free: none may wait. proposed: the id of the drafter that its drafts are of,
    GIVEN for given tokens, which have no KV either; 0: the fast path. draft_ended: the last draft
    is a stop token or failed. drafted, accepted, rolled_back, rollbacks, verify_passes: counts
    since they were last added to its statistics. seen: leading positions that an assistant has KV
    of, drafts included while they wait. unthought: chunks of the prompt without a thought. reach:
    positions that may run before more are thought about.
    state_at, state_kept: tokens after which its recurrent state is, and its last one that the
    prefix cache keeps was.
    """

    length: Counts
    computed: Counts
    canonical: Counts
    frozen: Counts
    indexed: Counts
    num_pages: Counts
    num_drafts: Counts
    proposed: Counts
    draft_ended: Flags
    draft_free: Flags
    drafted: Counts
    accepted: Counts
    rolled_back: Counts
    rollbacks: Counts
    verify_passes: Counts
    seen: Counts
    unthought: Counts
    reach: Counts
    state_at: Counts
    state_kept: Counts

    STATS = ("drafted", "accepted", "rolled_back", "rollbacks", "verify_passes")


class SequenceTable(Columns):
    """The running sequences, a row for each.

    ids [R, W] int64: committed tokens, then drafts. logprobs [R, W] fp32: of the token in its
    place. pages [R, P] int32: the page table, 0 after the last page. stops [R, K] int64: stop
    tokens, filled up with -1. sequences: of each row, None where it is free.
    """

    def __init__(self, max_sequences: int = 16) -> None:
        self.sequences: list[Any] = [None] * max_sequences
        self._free = list(range(max_sequences))
        self._rows: Array | None = None
        self._any: dict[str, bool] = {}
        self.generations = 0
        self.is_ahead = False  # in a block of ``Step.ahead``
        annotated = {**Fixed.__annotations__, **Columns.__annotations__}
        self._columns = {name: KINDS[kind] for name, kind in annotated.items()}
        for name, kind in self._columns.items():
            setattr(self, name, np.zeros(max_sequences, kind))
        self.ids: Array = np.zeros((max_sequences, 0), np.int64)
        self.logprobs: Array = np.zeros((max_sequences, 0), np.float32)
        self.pages: Array = np.zeros((max_sequences, 0), np.int32)
        self.stops: Array = np.zeros((max_sequences, 1), np.int64)

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def rows(self) -> Array:
        """The rows in use, in the order in which they would start."""
        if self._rows is None:
            used = self.generation_id.nonzero()[0]
            self._rows = used[np.lexsort((self.order[used], self.priority[used]))]
        return self._rows

    def any(self, name: str) -> bool:
        """Whether ``name``, a column of what a sequence is, is not 0 for some of them."""
        if name not in self._any:
            assert name in Fixed.__annotations__, name
            self._any[name] = bool(getattr(self, name)[self.rows].any())
        return self._any[name]

    def places(self, name: str, rows: Array) -> list[int]:
        """Places of those of ``rows`` [n] where the column ``name`` of ``any`` is not 0."""
        if not self.any(name):
            return []
        found: list[int] = getattr(self, name)[rows].nonzero()[0].tolist()
        return found

    def add(self, sequence: Any, tokens: list[int], stops: tuple[int, ...], **columns: Any) -> int:
        """A row for a sequence with these ``tokens``, stop tokens and ``columns``, zero in every
        other and without pages."""
        assert columns.keys() <= self._columns.keys(), columns
        row = heappop(self._free)
        self._widen(columns["most"])
        self.generations += 1
        columns |= {"generation_id": self.generations, "length": len(tokens)}
        self.sequences[row] = sequence
        for name in self._columns:
            getattr(self, name)[row] = columns.get(name, 0)
        self.set_ids(row, 0, tokens)
        self.pages[row] = 0
        if len(stops) > self.stops.shape[1]:
            self.stops = _wider(self.stops, len(stops), NO_STOP)
        self.stops[row] = NO_STOP
        self.stops[row, : len(stops)] = stops
        self._changed()
        return row

    def _widen(self, tokens: int) -> None:
        """Room for so many tokens in every row: all that a sequence may have, when it enters."""
        if tokens <= self.ids.shape[1]:
            return
        shape = len(self.sequences), max(tokens, 2 * self.ids.shape[1])
        ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for row in self.rows:  # what is never written takes no memory
            end = self.length[row] + self.num_drafts[row]
            ids[row, :end] = self.ids[row, :end]
            logprobs[row, :end] = self.logprobs[row, :end]
        self.ids, self.logprobs = ids, logprobs

    def remove(self, row: int) -> None:
        """Free a row."""
        self.sequences[row], self.generation_id[row] = None, 0
        heappush(self._free, row)
        self._changed()

    def _changed(self) -> None:
        """Other rows are in use."""
        self._rows = None
        self._any = {}

    def set_ids(self, row: int, first: int, ids: list[int]) -> None:
        """Write tokens from place ``first`` on."""
        self.ids[row, first : first + len(ids)] = ids

    def set_pages(self, row: int, pages: list[int]) -> None:
        """Write a sequence's page table, after its pages changed."""
        if len(pages) > self.pages.shape[1]:
            self.pages = _wider(self.pages, len(pages), 0)
        before, count = int(self.num_pages[row]), len(pages)
        self.pages[row, :count] = pages
        self.pages[row, count:before] = 0
        self.num_pages[row] = count

    def pending(self, rows: Array) -> Array:
        """[n]: committed tokens whose KV is not final: 1 while decoding, more during the prompt."""
        return self.length[rows] - self.computed[rows]

    def runnable(self, rows: Array) -> Array:
        """[n]: positions that may be in the next pass, drafts included: of a prompt that is thought
        about not those behind the chunks that wait for a thought."""
        counts: Array = self.length[rows] + self.num_drafts[rows] - self.computed[rows]
        if self.any("thinking"):
            held = self.unthought[rows] > 0
            counts[held] = np.minimum(counts, self.reach[rows] - self.computed[rows])[held]
        return counts

    def draft_limits(self, rows: Array) -> Array:
        """[n]: drafts that a sequence may have before a verify."""
        limits = np.minimum(self.window[rows], self.most[rows] - self.length[rows] - 1)
        return np.where(self.draft_free[rows], 0, limits)

    def commit(self, rows: Array, counts: Array, tokens: Array) -> None:
        """Append the first ``counts`` [n] of ``tokens`` [n, W] to each of ``rows`` [n].

        A draft in the place of a token is replaced by it; those behind stay in their places.
        """
        starts = self.length[rows]
        _write(self.ids, rows, starts, counts, tokens)
        self.length[rows] = starts + counts

    def write_logprobs(self, rows: Array, starts: Array, counts: Array, values: Array) -> None:
        """The first ``counts`` [n] of ``values`` [n, W] for the tokens from ``starts`` [n] on."""
        wanted = self.logprobs_wanted[rows]
        _write(self.logprobs, *(x[wanted] for x in (rows, starts, counts, values)))

    def stops_at(self, rows: Array, tokens: Array) -> Array:
        """[n] bool: which of ``tokens`` [n] end their sequences."""
        equal = self.stops[rows] == tokens[:, None]
        return equal[:, 0] if equal.shape[1] == 1 else equal.any(1)

    def draft(self, rows: Array, tokens: Array) -> None:
        """One more draft for each of ``rows`` [n]; none where the token is negative, which ends
        its drafts as a stop token does."""
        places = self.length[rows] + self.num_drafts[rows]
        self.draft_ended[rows] = (tokens < 0) | self.stops_at(rows, tokens)
        found = tokens >= 0
        rows = rows[found]
        self.ids[rows, places[found]] = tokens[found]
        self.num_drafts[rows] += 1
        self.drafted[rows] += 1

    def mark_final(self, rows: Array) -> None:
        """After a commit: all KV before the newest token is final."""
        computed = self.length[rows] - 1
        self.computed[rows] = computed
        canonical = np.minimum(self.canonical[rows], computed)
        if self.any("deterministic"):
            canonical = np.where(self.deterministic[rows], computed, canonical)
        self.canonical[rows] = canonical
        if self.any("drafter"):  # what was read behind it was a draft, and is none
            self.seen[rows] = np.minimum(self.seen[rows], computed)

    def advance(self, rows: Array, ends: Array, canonical: bool) -> None:
        """Positions up to ``ends`` [n] have run; drafts among them are not final."""
        before = self.computed[rows]
        computed = np.minimum(ends, self.length[rows])
        self.computed[rows] = computed
        if canonical:
            whole = self.canonical[rows] >= before
            self.canonical[rows] = np.where(whole, computed, self.canonical[rows])


def _write(matrix: Array, rows: Array, starts: Array, counts: Array, values: Array) -> None:
    """The first ``counts`` [n] of ``values`` [n, W] into ``rows`` [n], from ``starts`` [n] on."""
    if values.shape[1] == 1:
        matrix[rows, starts] = values[:, 0]
        return
    row, column = np.nonzero(np.arange(values.shape[1]) < counts[:, None])
    matrix[rows[row], starts[row] + column] = values[row, column]


def _wider(before: Array, width: int, fill: int) -> Array:
    """``before`` with at least ``width`` columns."""
    after = np.full((len(before), max(width, 2 * before.shape[1])), fill, before.dtype)
    after[:, : before.shape[1]] = before
    return after


def column(name: str) -> Any:
    """A property of a sequence that its row of the table keeps: 0 for one that does not run, of
    which nothing is computed."""

    def get(self: Any) -> Any:
        return getattr(self.table, name)[self.row].item() if self.table is not None else 0

    def set(self: Any, value: Any) -> None:
        assert self.table is not None
        getattr(self.table, name)[self.row] = value

    return property(get, set)
