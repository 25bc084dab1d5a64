"""What an output says against what its replay gives: field by field, in type and in every bit.

Knows outputs and a tokenizer, not engines. An output may hold anything: it may be forged. Imports
no library, nor makes ``diff`` import one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tinyspec.outputs import Completion, RequestOutput, Thought
from tinyspec.tools.terminal import table

# From the least to the gravest.
VERDICTS = SAME, PARTIAL, NOT_COMPARABLE, DIFFERS = "same", "partial", "not comparable", "differs"
PER_TOKEN = ("token_ids", "logprobs", "top_logprobs")


@dataclass(frozen=True)
class Entry:
    """The verdict on one completion. position: of the first generated token that differs, None if
    none does. reason: what differs, or was not compared and why."""

    request_id: str
    index: int
    verdict: str
    position: int | None = None
    reason: str = ""


class Report:
    """Verdicts on completions: a table, and how many there are of each."""

    entries: list[Any]
    # Of an entry, and what the table calls them.
    columns: tuple[tuple[str, str], ...] = (
        ("request", "request_id"),
        ("index", "index"),
        ("verdict", "verdict"),
    )

    def __str__(self) -> str:
        rows: list[list[object]] = [[*(name for name, _ in self.columns), "first difference"]]
        for entry in self.entries:
            place = "" if entry.position is None else f"token {entry.position}: "
            cells = [getattr(entry, field) for _, field in self.columns]
            told = [", ".join(cell) or "nothing" if type(cell) is tuple else cell for cell in cells]
            rows.append([*told, place + entry.reason])
        counts = Counter(entry.verdict for entry in self.entries)
        total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) or "no outputs"
        return "\n".join([*table(rows), "", total])

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Finding:
    """What the comparison of one field came to.

    verdict: "partial" if the field cannot be compared, or not as a whole. position: of the first
    generated token at which it differs.
    """

    field: str
    verdict: str
    reason: str = ""
    position: int | None = None


def wrong(field: str, said: str, position: int | None = None) -> Finding:
    """A field that differs, with what is said of it behind its name."""
    return Finding(field, DIFFERS, f"{field} {said}", position)


def compare(
    output: RequestOutput, again: RequestOutput, index: int, tokenizer: Any
) -> list[Finding]:
    """Findings on every field that one completion of ``output`` states.

    again: its replay, which follows the output's tokens and ends at the first that differs, or one
    token later. tokenizer: of the engine, or None.
    """
    theirs, mine = output.completions[index], again.completions[index]
    tokens = _tokens(theirs.token_ids, mine)
    end = _end(theirs, mine) if tokens.verdict == SAME else None
    findings: list[Finding | None] = [tokens, end, _error(theirs, end)]
    findings += [_per_token(name, theirs, mine, tokens) for name in PER_TOKEN[1:]]
    if tokens.verdict == SAME:
        findings.append(_text(theirs, tokenizer))
    findings += [_thoughts(output, again, mine), _prompt(output, again, mine)]
    return [finding for finding in findings if finding is not None]


def identical(found: Any, own: Any) -> bool:
    """The same type and the same bits: True is not 1, 3.0 is not 3, -0.0 is not 0.0."""
    if type(found) is not type(own):
        return False
    if isinstance(own, (list, tuple)):
        return len(found) == len(own) and all(map(identical, found, own))
    return bool(found.hex() == own.hex() if isinstance(own, float) else found == own)


def first_place(one: Any, other: Any) -> int | None:
    """Where two lists differ first, in type, bits or length; 0 where one is no list and the other
    is not the same; None where they do not differ."""
    if type(one) is not list or type(other) is not list:
        return None if identical(one, other) else 0
    for place, pair in enumerate(zip(one, other, strict=False)):
        if not identical(*pair):
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def shown(value: Any) -> str:
    """A value as text of at most 80 characters, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, an object of any kind
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _tokens(found: Any, mine: Completion) -> Finding:
    name, own = PER_TOKEN[0], mine.token_ids
    if type(found) is not list:
        return wrong(name, f"is {shown(found)}, not a list", 0)
    place = first_place(found, own[: len(found)])
    if place is None:
        return Finding(name, SAME)
    if place < len(own):
        reason = f"token {shown(found[place])}, but the engine has {own[place]}"
    elif mine.error is not None:
        return Finding(name, NOT_COMPARABLE, mine.error, place)
    else:
        ends = f"the engine ends before it: {mine.finish_reason!r}"
        reason = f"token {shown(found[place])}, but {ends}"
    return Finding(name, DIFFERS, reason, place)


def _per_token(name: str, theirs: Completion, mine: Completion, tokens: Finding) -> Finding | None:
    """On a list of one value a token, as far as the tokens are the same."""
    found, own = getattr(theirs, name), getattr(mine, name)
    if found is None and own is None:
        return None
    if (malformed := _malformed(name, found, own)) is not None:
        return malformed
    whole = tokens.verdict == SAME
    count = len(theirs.token_ids) if whole else tokens.position or 0
    known = min(len(found), count, len(own))
    if (place := first_place(found[:known], own[:known])) is not None:
        said = f"{shown(found[place])}, but the engine has {shown(own[place])}"
        return wrong(name, said, place)
    if len(found) < count or (whole and len(found) > count):
        reason = f"{len(found)} {name} for {len(theirs.token_ids)} tokens"
        return Finding(name, DIFFERS, reason, min(len(found), count))
    return Finding(name, SAME if whole else PARTIAL)


def _malformed(name: str, found: Any, own: list[Any] | None) -> Finding | None:
    """Missing, not asked for, or no list. ``own``: None if the parameters do not ask for it."""
    if type(found) is type(own):
        return None
    if own is None:
        return Finding(name, DIFFERS, f"it has {name}, which its parameters do not ask for")
    if found is None:
        return Finding(name, DIFFERS, f"it has no {name}, which its parameters ask for")
    return wrong(name, f"is {shown(found)}, not a list")


def _end(theirs: Completion, mine: Completion) -> Finding:
    """On the finish reason, where all tokens are the same."""
    name, stated, end = "finish_reason", theirs.finish_reason, len(theirs.token_ids)
    continues = len(mine.token_ids) > end
    if identical(stated, "abort") and (continues or mine.error is not None):
        reason = "it was aborted: its tokens are verified, its end cannot be"
        return Finding(name, PARTIAL, reason)
    if continues:
        reason = f"it ends, but the engine continues with token {mine.token_ids[end]}"
        return Finding(name, DIFFERS, reason, end)
    if mine.error is not None:
        return Finding(name, NOT_COMPARABLE, mine.error)
    if not identical(stated, mine.finish_reason):
        reason = f"it ends with {shown(stated)}, but the engine with {mine.finish_reason!r}"
        return Finding(name, DIFFERS, reason, end)
    return Finding(name, SAME)


def _error(theirs: Completion, end: Finding | None) -> Finding | None:
    """Only what was aborted has an error, which is not verified: it may come from outside."""
    aborted = identical(theirs.finish_reason, "abort")
    if theirs.error is None or (aborted and type(theirs.error) is str):
        return Finding("error", SAME) if end is not None and end.verdict == SAME else None
    allowed = "text or nothing" if aborted else "nothing, as it was not aborted"
    return wrong("error", f"is {shown(theirs.error)} instead of {allowed}")


def _text(theirs: Completion, tokenizer: Any) -> Finding | None:
    """On the text, where all tokens are the same: as the engine makes it from them."""
    from tinyspec.engine.results import decode

    found, own = theirs.text, decode(tokenizer, theirs.token_ids)
    if own is None and type(found) is str:
        return Finding("text", PARTIAL, "its text is not verified: the engine has no tokenizer")
    if own is not None and found is None:
        return Finding("text", PARTIAL, "it has no text, and the engine's tokenizer makes some")
    if identical(found, own):
        return None if own is None else Finding("text", SAME)
    return wrong("text", f"{shown(found)}, but the engine's is {shown(own)}")


def _thoughts(output: RequestOutput, again: RequestOutput, mine: Completion) -> Finding | None:
    """On what was thought of the prompt, texts but for those of an engine without a tokenizer."""
    name, found, own = "thoughts", output.thoughts, again.thoughts
    if found is None and own is None:
        return None
    if (malformed := _malformed(name, found, own)) is not None:
        return malformed
    assert found is not None and own is not None
    for place, (thought, expected) in enumerate(zip(found, own, strict=False)):
        theirs, ours = _plain(thought), _plain(expected)
        if theirs is not None and ours is not None and None in (theirs[-1], ours[-1]):
            theirs[-1] = ours[-1] = None  # one of the two has no text
        if not identical(theirs, ours):
            reason = f"thought {shown(thought)}, but the engine has {shown(expected)}"
            return Finding(name, DIFFERS, f"of chunk {place} {reason}", 0)
    if len(own) < len(found) and mine.error is not None:
        return Finding(name, NOT_COMPARABLE, mine.error)
    aborted = all(identical(c.token_ids, []) for c in output.completions)
    if len(found) < len(own) and aborted:
        return Finding(name, PARTIAL, "it was aborted before all of its prompt was thought about")
    if len(found) != len(own):
        return Finding(name, DIFFERS, f"{len(found)} thoughts, but the engine has {len(own)}", 0)
    return Finding(name, SAME)


def _plain(thought: Any) -> list[Any] | None:
    """The fields of a thought, its text last; None for anything else."""
    if type(thought) is not Thought:
        return None
    return [thought.chunk, thought.token_ids, thought.cut, thought.text]


def _prompt(output: RequestOutput, again: RequestOutput, mine: Completion) -> Finding | None:
    """On the prompt's log-probabilities. Those of a request that was aborted before its first token
    may be missing."""
    name, found, own = "prompt_logprobs", output.prompt_logprobs, again.prompt_logprobs
    if found is None and own is None:
        return None
    if (malformed := _malformed(name, found, own)) is not None:
        return malformed
    assert found is not None and own is not None
    if None in own[1:]:
        return Finding(name, NOT_COMPARABLE, mine.error or "the replay was interrupted")
    if len(found) != len(own):
        return Finding(name, DIFFERS, f"{len(found)} {name} for {len(own)} prompt tokens", 0)
    begun = not all(identical(completion.token_ids, []) for completion in output.completions)
    for place, (value, expected) in enumerate(zip(found, own, strict=True)):
        if not identical(value, expected) and (begun or value is not None):
            reason = f"of prompt token {place} {shown(value)}, but the engine has {expected!r}"
            return Finding(name, DIFFERS, f"log-probability {reason}", 0)
    if missing := found[1:].count(None):
        reason = f"it was aborted before {missing} of its prompt's log-probabilities were known"
        return Finding(name, PARTIAL, reason)
    return Finding(name, SAME)
