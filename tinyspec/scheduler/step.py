"""One pass from its schedule to its commit: a record that each stage fills in. Host only; what
others put on a device it carries and does not look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinyspec.scheduler.passes import DECODE, DRAFT, KINDS, PROMPT, VERIFY, PassRecord
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable

DIRECT, PADDED, DRAFTING = "direct", "padded", "draft"


@dataclass(eq=False)
class Step:
    """Consecutive rows of n sequences, one work each, that share one forward pass: positions
    ``starts`` to ``ends - 1``, padded up to ``bucket`` rows in all.

    **Scheduled** (``scheduler.py``). rows: of the sequence table. kinds: prompt (all committed
    tokens, for a preempted sequence), decode (the newest token), draft (a deterministic request's
    newest token on the fast path), verify (the newest token and drafts). yields: how many of the
    last positions yield a token. All [n] int64. way: "direct" (canonical, in the smallest bucket
    that fits), "padded" (canonical, in a larger bucket), "draft" (deterministic rows are drafts to
    verify later), "" (plain rows only).

    Of these: generation_ids [n]: of the rows now; a row that has another later holds another
    sequence, or the same one computed anew. counts, firsts [n]: rows of each, and where its tokens
    are among all. cu_rows [n]: rows up to the end of each. num_rows, num_tokens: of all. single:
    whether each is one row, which yields a token, as while all sequences decode.

    **Packed** (``runner/packing.py``, ``runner/batch.py``). record: what is kept of it. verifies
    [n] bool: whose drafts are compared with what is sampled. unscored: (work, position, next token)
    of prompt rows whose logits give a log-probability that is missing; they come first among
    ``num_logits`` rows. before: a pass whose results were not in, until this one has run, which
    takes tokens where they lie. error: why it could not be packed. moves, copies: of recurrent
    states, as of ``Checkpoints``. embeds: (first row, [r, hidden]) of rows that enter the model as
    embeddings. shape: a ``PassShape``. values [m] int64, page_table [n, P] int32: as ``PassMemory``
    lays them out. On the device: samples, a ``SampleBatch``; compared, what ``decisions`` reads of
    drafts; targets [P]: the next tokens of unscored; thinking: rows of prompts that are thought
    about, or None.

    **Launched** (``engine/core.py``). pending: a ``Sampled``. settled: whether it was launched as
    all later ones of its shape will be. moved: a setting of torch's that another thread has set
    since it was pinned for it. began: wall and process time at its begin.

    **Fetched**, [t] for all tokens: tokens int64, -1 where there is none; logprobs fp32, or None.
    prompt_logprobs [P] fp32; decisions [5, v] int32 of ``accept_truncate``; special: what special
    rows have besides, by their places. raised: what it raised. good_ends [n]: up to where positions
    are good, given what was thought about those before. thoughts: whose prompts were thought about,
    and how many thoughts each had. failed: sequences without a thought, and why.
    """

    table: SequenceTable
    rows: Array
    kinds: Array
    starts: Array
    ends: Array
    yields: Array
    canonical: bool
    bucket: int = 0
    way: str = ""

    record: PassRecord = field(init=False)
    verifies: Array = field(init=False)
    unscored: list[tuple[int, int, int]] = field(default_factory=list)
    before: Step | None = None
    error: Exception | None = None
    moves: Array | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)
    embeds: list[tuple[int, Any]] = field(default_factory=list)
    shape: Any = None
    values: Array = field(init=False)
    page_table: Array = field(init=False)
    num_logits: int = 0
    samples: Any = None
    compared: Any = None
    targets: Any = None
    thinking: Any = None

    pending: Any = None
    settled: bool = True
    moved: str | None = None
    began: tuple[float, float] = (0.0, 0.0)

    tokens: Any = None
    logprobs: Array | None = None
    prompt_logprobs: Array | None = None
    decisions: Array | None = None
    special: dict[int, Any] = field(default_factory=dict)
    raised: Exception | None = None
    thoughts: list[tuple[Request, int]] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation_ids: Array = self.table.generation_id[self.rows]
        self.good_ends = self.ends
        self.counts: Array = self.ends - self.starts
        self.cu_rows: Array = self.counts.cumsum()
        cu_tokens = self.yields.cumsum()
        self.firsts: Array = cu_tokens - self.yields
        some = len(self) > 0
        self.num_rows = int(self.cu_rows[-1]) if some else 0
        self.num_tokens = int(cu_tokens[-1]) if some else 0
        self.single = self.num_rows == self.num_tokens == len(self)

    @classmethod
    def of(cls, table: SequenceTable, rows: Array, counts: Array, canonical: bool) -> Step:
        """``counts`` [n] positions of each, from the first on that is not computed. In a pass that
        is not ``canonical`` deterministic sequences draft: from their last token or draft on, which
        yields one more."""
        newest, starts = table.length[rows] - 1, table.computed[rows]
        drafts = table.num_drafts[rows]
        kinds = np.where(drafts > 0, VERIFY, DECODE)
        kinds[starts < newest] = PROMPT
        if table.any("thinking"):  # a last token alone may wait for a thought
            kinds[table.unthought[rows] > 0] = PROMPT
        if drafting := not canonical and table.any("deterministic"):
            which = table.deterministic[rows]
            kinds[which] = DRAFT
            starts = np.where(which, newest + drafts, starts)
        ends = starts + counts
        yields = np.maximum(ends - newest, 0)
        if drafting:
            yields[which] = 1
        return cls(table, rows, kinds, starts, ends, yields, canonical)

    def only(self, which: Array) -> Step:
        """Its works where ``which`` [n] is True."""
        names = ("rows", "kinds", "starts", "ends", "yields")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each work."""
        return [self.table.sequences[row] for row in self.rows.tolist()]

    @property
    def alive(self) -> Array:
        """[n] bool: whose sequences are still those that it was scheduled for."""
        found: Array = self.table.generation_id[self.rows] == self.generation_ids
        return found

    @property
    def predictable(self) -> bool:
        """Whether all but the ids of its tokens is known: each of its sequences gets one token or
        one draft, and nothing is thought about."""
        thinks = self.thinking is not None and bool(self.thinking.spans)
        return not (np.count_nonzero(self.verifies) or self.pending.failed or thinks)

    def begin_record(self, waiting: int, pages_held: int) -> None:
        """Of what is about to run; its number follows."""
        running = len(self.table)
        sequences = rows = np.bincount(self.kinds, minlength=len(KINDS)).tolist()
        if not self.single:
            rows = np.bincount(self.kinds, self.counts, len(KINDS)).astype(int).tolist()
        self.record = PassRecord(
            number=0,
            bucket=self.bucket,
            canonical=self.canonical,
            rows=dict(zip(KINDS, rows, strict=True)),
            sequences={kind: n for kind, n in zip(KINDS, sequences, strict=True) if n},
            running=running,
            waiting=waiting,
            left_out=running - len(self),
            pages_held=pages_held,
            way=self.way,
        )

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """A block in which the sequence table is as it will be once this is committed, but for the
        ids of its tokens; behind it the table is what it was. No sequence may enter or leave in
        it."""
        table, drafting = self.table, self.kinds == DRAFT
        final, grown = ~drafting, self.rows[~drafting & (self.yields > 0)]
        columns = (table.length, table.computed, table.canonical, table.num_drafts)
        before = [column.copy() for column in columns]
        table.is_ahead = True
        try:
            table.advance(self.rows[final], self.ends[final], self.canonical)
            table.length[grown] += 1
            table.mark_final(grown)
            table.num_drafts[self.rows[drafting]] += 1
            yield
        finally:
            table.is_ahead = False
            for column, values in zip(columns, before, strict=True):
                column[:] = values

    def sources(self, rows: Array) -> Array:
        """[m]: where among its tokens the newest one of each of ``rows`` [m] is; -1: elsewhere."""
        places, some = np.full(len(self.table.sequences), -1), self.yields > 0
        places[self.rows[some]] = self.firsts[some]
        found: Array = places[rows]
        return found


def spread(firsts: Array, counts: Array) -> Array:
    """``firsts[n]`` and the numbers after it, ``counts[n]`` in all, for every n in turn."""
    return np.arange(counts.sum()) + (firsts - counts.cumsum() + counts).repeat(counts)
