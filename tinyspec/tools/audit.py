"""Audit: does this engine produce the same outputs, token for token and bit for bit?

An output is replayed along its own tokens, in a few canonical passes, with its parameters and its
seed, without the prefix cache. Knows outputs and an engine's ``replay``, not how passes run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.tools.table import table

SAME, DIFFERS, NOT_COMPARABLE = "same", "differs", "not comparable"


@dataclass(frozen=True)
class AuditEntry:
    """The verdict on one completion.

    verdict: "same", "differs" or "not comparable". position: of the first generated token that
    differs, None if none does. reason: what differs there, or why nothing was compared. tokens: how
    many were compared.
    """

    request_id: str
    index: int
    verdict: str
    tokens: int = 0
    position: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class AuditReport:
    """Verdicts on every completion, in the order of the outputs; truthy when all are the same.

    fingerprint: of the engine that replayed them.
    """

    fingerprint: str
    entries: list[AuditEntry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return all(entry.verdict == SAME for entry in self.entries)

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [
            ("request", "index", "tokens", "verdict", "first difference")
        ]
        for entry in self.entries:
            place = "" if entry.position is None else f"token {entry.position}: "
            row = (entry.request_id, entry.index, entry.tokens, entry.verdict)
            rows.append((*row, place + entry.reason))
        counts = Counter(entry.verdict for entry in self.entries)
        total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        return "\n".join([*table(rows), "", f"{total}; engine {self.fingerprint}"])

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def audit(engine: Engine, outputs: Iterable[RequestOutput]) -> AuditReport:
    """Replay finished ``outputs``, sampling included, and compare every token and every bit of the
    log-probabilities that they carry.

    Outputs with another fingerprint, or with functions that JSON did not keep, are reported as not
    comparable. Raises DeterminismError if the engine cannot serve ``deterministic=True``,
    ValueError if ``outputs`` are not RequestOutputs or do not fit the engine.
    """
    outputs = list(outputs)
    for output in outputs:
        if not isinstance(output, RequestOutput):
            raise refuse("outputs", output, "RequestOutputs")
    fingerprint = engine.fingerprint
    reasons = [_not_comparable(output, fingerprint) for output in outputs]
    sound = [output for output, reason in zip(outputs, reasons, strict=True) if not reason]
    replayed = iter(engine.replay(sound) if sound else [])
    entries: list[AuditEntry] = []
    for output, reason in zip(outputs, reasons, strict=True):
        again = None if reason else next(replayed)
        for index in range(len(output.completions)):
            if again is None:
                entries.append(AuditEntry(output.request_id, index, NOT_COMPARABLE, reason=reason))
            else:
                entries.append(_compare(output, again, index))
    return AuditReport(fingerprint, entries)


def _not_comparable(output: RequestOutput, fingerprint: str) -> str:
    """Why an output cannot be replayed here; empty if it can."""
    if output.fingerprint is None:
        return "it has no fingerprint"
    if output.fingerprint != fingerprint:
        return f"its fingerprint is {output.fingerprint}"
    params = output.params
    for function in (*params.logits_processors, *params.stopping_criteria):
        if not callable(function):
            return f"only the name of the function {function} is known"
    if len(output.completions) != params.num_return_sequences:
        return f"it has {len(output.completions)} of {params.num_return_sequences} completions"
    return ""


def _compare(output: RequestOutput, again: RequestOutput, index: int) -> AuditEntry:
    theirs, mine = output.completions[index], again.completions[index]
    place, reason = _first_difference(theirs, mine)
    if not reason and repr(output.prompt_logprobs) != repr(again.prompt_logprobs):
        place, reason = 0, "the prompt's log-probabilities are not the engine's"
    verdict = DIFFERS if reason else SAME
    if mine.error is not None:
        verdict, place, reason = NOT_COMPARABLE, None, mine.error
    return AuditEntry(output.request_id, index, verdict, len(theirs.token_ids), place, reason)


def _first_difference(theirs: Completion, mine: Completion) -> tuple[int | None, str]:
    """Position and reason. ``mine`` follows the tokens of ``theirs`` and ends at the first that
    differs, or one token later."""

    def at(values: Any, place: int) -> Any:
        return values[place] if values is not None and place < len(values) else None

    for place, token in enumerate(theirs.token_ids):
        if place >= len(mine.token_ids):
            return place, f"token {token}, but the engine ends before it: {mine.finish_reason!r}"
        own = mine.token_ids[place]
        if token != own:
            return place, f"token {token}, but the engine has {own}"
        for name in ("logprobs", "top_logprobs"):
            if getattr(theirs, name) is not None:
                # As text, which keeps every bit: -0.0 == 0.0.
                found = repr(at(getattr(theirs, name), place))
                expected = repr(at(getattr(mine, name), place))
                if found != expected:
                    return place, f"{name} {found}, but the engine has {expected}"
    end = len(theirs.token_ids)
    if theirs.finish_reason == "abort":  # the user ended it: any length is right
        return None, ""
    if len(mine.token_ids) > end:
        return end, f"it ends, but the engine continues with token {mine.token_ids[end]}"
    if theirs.finish_reason != mine.finish_reason:
        reason = f"it ends with {theirs.finish_reason!r}, but the engine"
        return end, f"{reason} with {mine.finish_reason!r}"
    return None, ""
