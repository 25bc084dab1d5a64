"""What is kept of passes: a record of each, and sums over all. Host only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

# What a sequence's rows in a pass are for.
PROMPT, DECODE, DRAFT, VERIFY = range(4)
KINDS = ("prompt", "decode", "draft", "verify")
# Whose drafts a sequence has, where they are of no drafter.
FAST_PATH, GIVEN = 0, -1


@dataclass(kw_only=True)
class TokenCounts:
    """Tokens that were committed, drafts, how often some of a sequence were verified, and how often
    some were rolled back."""

    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0
    verify_passes: int = 0


@dataclass
class PassRecord(TokenCounts):
    """What a pass ran and committed: rows and sequences by kind, its bucket and way.

    waiting, running: sequences at the time. left_out: running sequences without a row. began:
    seconds of ``time.perf_counter``, of the step that committed it, which lasted ``seconds``.
    works: where a trace is kept, what became of each sequence's rows.
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
    began: float = 0.0
    works: list[Any] = field(default_factory=list)

    @property
    def padding(self) -> int:
        return self.bucket - sum(self.rows.values())


@dataclass
class EngineStats(TokenCounts):
    """Sums over all passes since the engine began; ``rows`` by kind, ``passes`` by bucket.

    ways: canonical and drafting passes by way. cached_prompt_tokens: prompt tokens that were taken
    from the prefix cache or another completion of the prompt. drafted_by, accepted_by,
    rollbacks_by: by what proposed the drafts: "fast path", "assistant", "ngram", "drafter" (the
    user's) or "given" (tokens that are verified again). prepacked_bytes: most that copies of
    weights have taken at once (``EngineConfig.prepack``).
    """

    passes: dict[int, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    canonical_passes: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    padding: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    rollbacks_by: Counter[str] = field(default_factory=Counter)
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
        for one in fields(TokenCounts):
            setattr(self, one.name, getattr(self, one.name) + getattr(record, one.name))
