"""One pass: rows of sequences in a bucket, and its record. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyspec.scheduler.request import Sequence

PROMPT, DECODE, DRAFT, VERIFY = "prompt", "decode", "draft", "verify"
KINDS = (PROMPT, DECODE, DRAFT, VERIFY)
DIRECT, PADDED = "direct", "padded"


@dataclass
class Work:
    """Consecutive rows of one sequence: positions ``start`` to ``start + count``.

    kind: prompt (all committed tokens, for a preempted sequence), decode (the newest token), draft
    (a deterministic request's newest token on the fast path), verify (the newest token and drafts).
    yields: how many of the last rows yield a token.
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
        tokens, drafts = self.sequence.tokens, self.sequence.drafts
        if self.end <= len(tokens):
            return tokens[self.start : self.end]
        return (
            tokens[self.start :] + drafts[max(self.start - len(tokens), 0) : self.end - len(tokens)]
        )


@dataclass
class Pass:
    """Works that share one forward pass, padded up to ``bucket`` rows.

    way: "direct" (canonical, in the smallest bucket that fits), "padded" (canonical, in a larger
    bucket), "draft" (deterministic rows are drafts to verify later), "" (plain rows only).
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

    ways: canonical and drafting passes by way. cached_prompt_tokens: prompt tokens that were taken
    from the prefix cache or another completion of the prompt.
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
        """Add one more pass to the sums."""
        self.passes[record.bucket] = self.passes.get(record.bucket, 0) + 1
        if record.canonical:
            self.canonical_passes += 1
        if record.way:
            self.ways[record.way] = self.ways.get(record.way, 0) + 1
        for kind, rows in record.rows.items():
            self.rows[kind] += rows
        self.padding += record.padding
        for name in ("committed", "drafted", "accepted", "rolled_back", "rollbacks", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
