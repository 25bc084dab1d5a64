"""The report of an audit: a verdict on every completion, and how much of it was verified."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

from tinyspec.tools.comparison import SAME
from tinyspec.tools.terminal import table


@dataclass(frozen=True)
class AuditEntry:
    """The verdict on one completion.

    verdict: "same"; "differs"; "partial" if all that can be compared is the same, but not all can
    (an aborted request's end, text without a tokenizer); "not comparable" if this engine cannot
    repeat the request. tokens: leading tokens that are the same, as are their log-probabilities.
    position: of the first generated token that differs (0 also for the prompt's log-probabilities),
    None if none does. reason: what differs there, or what was not compared and why. verified: the
    fields that were compared as a whole and are the same.
    """

    request_id: str
    index: int
    verdict: str
    tokens: int = 0
    position: int | None = None
    reason: str = ""
    verified: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditReport:
    """Verdicts on every completion, in the order of the outputs; truthy when there are some and all
    are the same.

    fingerprint: of the engine that replayed them.
    """

    fingerprint: str
    entries: list[AuditEntry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.entries) and all(entry.verdict == SAME for entry in self.entries)

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [
            ("request", "index", "tokens", "verdict", "verified", "first difference")
        ]
        for entry in self.entries:
            place = "" if entry.position is None else f"token {entry.position}: "
            verified = ", ".join(entry.verified) or "nothing"
            row = (entry.request_id, entry.index, entry.tokens, entry.verdict, verified)
            rows.append((*row, place + entry.reason))
        counts = Counter(entry.verdict for entry in self.entries)
        total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) or "no outputs"
        return "\n".join([*table(rows), "", f"{total}; engine {self.fingerprint}"])

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))
