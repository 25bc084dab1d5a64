"""What one pass runs: rows of sequences in a bucket, and the small record it leaves. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyspec.scheduler.request import Sequence

PROMPT, DECODE, DRAFT, VERIFY = "prompt", "decode", "draft", "verify"
KINDS = (PROMPT, DECODE, DRAFT, VERIFY)
DIRECT, PADDED, DRAFTED = "direct", "padded", "draft"


@dataclass
class Work:
    """Consecutive rows of one sequence: positions ``start`` to ``start + count``.

    The kinds are names for what the rows are doing and nothing more: prompt (of a preempted
    sequence: all it had), decode (the newest token, in a canonical pass if the request is
    deterministic), draft (a deterministic request's newest token on the fast path), verify
    (rows over the newest token and drafts, canonical ones if the request is deterministic).
    yields: how many of the rows, counted from the last, yield a token that is wanted.
    """

    sequence: Sequence
    kind: str
    start: int
    count: int
    end: int = field(init=False)
    yields: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.count
        newest = len(self.sequence.tokens) - 1
        self.yields = 1 if self.kind == DRAFT else max(0, self.end - newest)

    @property
    def token_ids(self) -> list[int]:
        sequence = self.sequence
        committed = sequence.tokens[self.start : self.end]
        behind = self.start - len(sequence.tokens)
        drafts = sequence.drafts[max(behind, 0) : self.end - len(sequence.tokens)]
        return committed + drafts if self.end > len(sequence.tokens) else committed


@dataclass
class Pass:
    """Works that share one forward pass, padded up to ``bucket`` rows.

    way: how deterministic requests come to canonical tokens: "direct" (the bucket that the rows
    need is canonical), "padded" (a larger one had to be taken), "draft" (their rows are drafts, to
    be verified later), "" where none has a row.
    """

    works: list[Work]
    bucket: int
    canonical: bool
    way: str = ""

    @property
    def rows(self) -> int:
        return sum(work.count for work in self.works)


@dataclass
class PassRecord:
    """What a pass did: rows by kind, its bucket and way, and what its verifies decided.

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
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0
    seconds: float = 0.0

    @property
    def padding(self) -> int:
        return self.bucket - sum(self.rows.values())


@dataclass
class EngineStats:
    """Sums over all passes since the engine began; ``rows`` by kind, ``passes`` by bucket.

    ways: canonical and drafting passes by way. cached_prompt_tokens: prompt tokens that the prefix
    cache or another completion of the prompt had already.
    """

    passes: dict[int, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    canonical_passes: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    padding: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    seconds: float = 0.0

    def add(self, record: PassRecord) -> None:
        """Take one more pass into the sums."""
        self.passes[record.bucket] = self.passes.get(record.bucket, 0) + 1
        self.canonical_passes += record.canonical
        if record.way:
            self.ways[record.way] = self.ways.get(record.way, 0) + 1
        for kind, rows in record.rows.items():
            self.rows[kind] += rows
        self.padding += record.padding
        for name in ("committed", "drafted", "accepted", "rolled_back", "rollbacks", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
