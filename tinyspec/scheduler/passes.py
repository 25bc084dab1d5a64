"""One pass: rows of sequences in a bucket, and its record. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable

# What a sequence's rows in a pass are for.
PROMPT, DECODE, DRAFT, VERIFY = range(4)
KINDS = ("prompt", "decode", "draft", "verify")
DIRECT, PADDED, DRAFTING = "direct", "padded", "draft"


@dataclass
class ScheduledRows:
    """Consecutive rows of n sequences, one work each: positions ``starts`` to ``ends - 1``.

    rows: of the sequence table. kinds: prompt (all committed tokens, for a preempted sequence),
    decode (the newest token), draft (a deterministic request's newest token on the fast path),
    verify (the newest token and drafts). yields: how many of the last positions yield a token.
    All [n] int64. cu_rows, cu_tokens [n]: rows, and tokens that are yielded, up to the end of
    each. num_rows, num_tokens: of all. single: whether each is one row, which yields a
    token, as while all sequences decode.
    """

    rows: Array
    kinds: Array
    starts: Array
    ends: Array
    yields: Array

    def __post_init__(self) -> None:
        self.counts: Array = self.ends - self.starts
        self.cu_rows: Array = self.counts.cumsum()
        self.cu_tokens: Array = self.yields.cumsum()
        some = len(self) > 0
        self.num_rows = int(self.cu_rows[-1]) if some else 0
        self.num_tokens = int(self.cu_tokens[-1]) if some else 0
        self.single = self.num_rows == self.num_tokens == len(self)

    @classmethod
    def of(cls, table: SequenceTable, rows: Array, counts: Array, canonical: bool) -> ScheduledRows:
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
        return cls(rows, kinds, starts, ends, yields)

    def only(self, which: Array) -> ScheduledRows:
        """Those at the places ``which``, or where it is True."""
        found = (self.rows, self.kinds, self.starts, self.ends, self.yields)
        return ScheduledRows(*(column[which] for column in found))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Pass:
    """ScheduledRows that share one forward pass, padded up to ``bucket`` rows.

    way: "direct" (canonical, in the smallest bucket that fits), "padded" (canonical, in a larger
    bucket), "draft" (deterministic rows are drafts to verify later), "" (plain rows only).
    """

    works: ScheduledRows
    table: SequenceTable
    bucket: int
    canonical: bool
    way: str = ""

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each work."""
        return [self.table.sequences[row] for row in self.works.rows.tolist()]


def spread(firsts: Array, counts: Array) -> Array:
    """``firsts[n]`` and the numbers after it, ``counts[n]`` in all, for every n in turn."""
    return np.arange(counts.sum()) + (firsts - counts.cumsum() + counts).repeat(counts)


@dataclass(kw_only=True)
class TokenCounts:
    """Tokens that were committed, drafts, and how often some were rolled back."""

    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0

    def count(self, more: TokenCounts) -> None:
        """Add those of ``more``."""
        for one in fields(TokenCounts):
            setattr(self, one.name, getattr(self, one.name) + getattr(more, one.name))


@dataclass
class PassRecord(TokenCounts):
    """What a pass ran and committed: rows and sequences by kind, its bucket and way.

    waiting, running: sequences at the time. left_out: running sequences without a row.
    """

    number: int
    bucket: int
    canonical: bool
    rows: dict[str, int]
    sequences: dict[str, int]
    running: int
    waiting: int
    left_out: int
    pages_held: int
    way: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, work_pass: Pass, waiting: int, pages_held: int) -> PassRecord:
        """Of a pass that is about to run; its number follows."""
        works, running = work_pass.works, len(work_pass.table)
        sequences = rows = np.bincount(works.kinds, minlength=len(KINDS)).tolist()
        if not works.single:
            rows = np.bincount(works.kinds, works.counts, len(KINDS)).astype(int).tolist()
        return cls(
            number=0,
            bucket=work_pass.bucket,
            canonical=work_pass.canonical,
            rows=dict(zip(KINDS, rows, strict=True)),
            sequences={kind: n for kind, n in zip(KINDS, sequences, strict=True) if n},
            running=running,
            waiting=waiting,
            left_out=running - len(works),
            pages_held=pages_held,
            way=work_pass.way,
        )

    @property
    def padding(self) -> int:
        return self.bucket - sum(self.rows.values())


@dataclass
class EngineStats(TokenCounts):
    """Sums over all passes since the engine began; ``rows`` by kind, ``passes`` by bucket.

    ways: canonical and drafting passes by way. cached_prompt_tokens: prompt tokens that were taken
    from the prefix cache or another completion of the prompt. prepacked_bytes: most that copies of
    weights have taken at once (``EngineConfig.prepack``).
    """

    passes: dict[int, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    canonical_passes: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    padding: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    prepacked_bytes: int = 0
    seconds: float = 0.0

    def add(self, record: PassRecord) -> None:
        """Add one more pass to the sums."""
        self.passes[record.bucket] = self.passes.get(record.bucket, 0) + 1
        if record.canonical:
            self.canonical_passes += 1
        if record.way:
            self.ways[record.way] = self.ways.get(record.way, 0) + 1
        for kind, rows in record.rows.items():
            self.rows[kind] += rows
        self.padding += record.padding
        self.seconds += record.seconds
        self.count(record)
