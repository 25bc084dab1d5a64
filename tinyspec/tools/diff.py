"""Two sets of outputs against each other: field by field, in type and in every bit.

``audit`` compares what an output says with what an engine gives; ``diff`` two files. Knows outputs
alone and imports no library. An output may hold anything: it may be forged.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tinyspec.determinism.fingerprint_parts import are_parts
from tinyspec.determinism.fingerprint_parts import differences as other_parts
from tinyspec.outputs import RequestOutput, Thought
from tinyspec.tools.terminal import table

SAME, DIFFERS, NOT_COMPARABLE = "same", "differs", "not comparable"
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"
# Fields of a completion: of a value a token, or of one; fields of the whole output.
PER_TOKEN = ("token_ids", "logprobs", "top_logprobs")
WHOLE = ("finish_reason", "error", "stop_reason", "text")
OF_PROMPT = ("prompt_logprobs", "thoughts")
# What one value of a list is called.
WORDS = {
    "token_ids": "token",
    "logprobs": "log-probability",
    "top_logprobs": "top log-probabilities",
    "prompt_logprobs": "log-probability of prompt token {}:",
    "thoughts": "thought of chunk {}:",
}


@dataclass(frozen=True)
class Difference:
    """position: of the generated token. reason: what the one has -> what the other has."""

    reason: str
    position: int | None = None


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

    entries: Sequence[Entry]

    def __str__(self) -> str:
        rows: list[list[object]] = []
        for entry in self.entries:
            cells = asdict(entry)
            place, reason = cells.pop("position"), cells.pop("reason")
            rows = rows or [[*cells, "first difference"]]
            rows.append([*cells.values(), reason if place is None else f"token {place}: {reason}"])
        counts = Counter(entry.verdict for entry in self.entries)
        total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) or "no outputs"
        return "\n".join([*table(rows), "", total])

    def __bool__(self) -> bool:
        return all(entry.verdict == SAME for entry in self.entries)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]


@dataclass(frozen=True)
class DiffReport(Report):
    """Verdicts on every completion, in the order of the first file; truthy when all are the same.

    Verdicts: "same"; "differs"; "not comparable" (another request, or another fingerprint); "only
    in the first" or "second". A token differs in itself or in the bits of its log-probabilities.
    """

    entries: list[Entry]


def diff(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> DiffReport:
    """Compare outputs of the same requests, in any order.

    The same request is one of the same prompt and parameters, seed included; of what is left, those
    of the same ``request_id`` are not comparable, and what differs between them is told. Values are
    compared in type and in every bit; ``request_id`` and ``stats`` are not.
    """
    partners = _partners(first, second)
    entries: list[Entry] = []
    for place, output in enumerate(first):
        if place in partners:
            entries += _entries(output, second[partners[place]])
        else:
            entries.append(Entry(output.request_id, 0, ONLY_FIRST))
    rest = set(range(len(second))) - set(partners.values())
    entries += [Entry(second[place].request_id, 0, ONLY_SECOND) for place in sorted(rest)]
    return DiffReport(entries)


def _partners(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> dict[int, int]:
    """By place in ``first``, the place of the same request in ``second``; equal ones in order."""
    partners: dict[int, int] = {}
    for key in (_request, lambda output: str(output.request_id)):
        left: dict[str, deque[int]] = defaultdict(deque)
        taken = set(partners.values())
        for place, output in enumerate(second):
            if place not in taken:
                left[key(output)].append(place)
        for place, output in enumerate(first):
            if place not in partners and (same := left[key(output)]):
                partners[place] = same.popleft()
    return partners


def _request(output: RequestOutput) -> str:
    return json.dumps([output.prompt_token_ids, output.params.to_dict()], sort_keys=True)


def _entries(one: RequestOutput, other: RequestOutput) -> Iterator[Entry]:
    obstacles = list(_obstacles(one, other))
    count = min(len(one.completions), len(other.completions))
    for index in range(count):
        position, reason = summed_up(compare(one, other, index).values())
        verdict = NOT_COMPARABLE if obstacles else DIFFERS if reason else SAME
        told = [*obstacles, reason or "the bits are the same"] if obstacles else [reason]
        yield Entry(one.request_id, index, verdict, position, "; ".join(told))
    if obstacles and not count:
        yield Entry(one.request_id, 0, NOT_COMPARABLE, None, "; ".join(obstacles))


def _obstacles(one: RequestOutput, other: RequestOutput) -> Iterator[str]:
    """What makes the second another request, or an output of another engine."""
    place = first_place(one.prompt_token_ids, other.prompt_token_ids)
    if place is not None:
        yield f"prompts differ at token {place}"
    params, others = one.params.to_dict(), other.params.to_dict()
    for name, value in params.items():
        if not identical(value, others[name]):
            yield f"{name} {shown(value)} -> {shown(others[name])}"
    if not identical(one.fingerprint, other.fingerprint):
        parts = one.fingerprint_parts, other.fingerprint_parts
        found = other_parts(*parts) if all(map(are_parts, parts)) else []  # type: ignore[arg-type]
        yield ", ".join(found) or f"fingerprint {one.fingerprint} -> {other.fingerprint}"
    counts = len(one.completions), len(other.completions)
    if counts[0] != counts[1]:
        yield f"{counts[0]} completions -> {counts[1]}"


def compare(one: RequestOutput, other: RequestOutput, index: int) -> dict[str, Difference | None]:
    """By field of one completion and of its prompt where the two differ. ``one`` may hold anything.

    Where tokens differ, what comes with those before is compared, and neither ends nor texts. Where
    ``one`` has no stop reason it says nothing of it: outputs once had none.
    """
    mine, its = one.completions[index], other.completions[index]
    end = first_place(mine.token_ids, its.token_ids)
    found = {"token_ids": _difference("token_ids", mine.token_ids, its.token_ids)}
    for name in PER_TOKEN[1:]:
        pair = getattr(mine, name), getattr(its, name)
        found[name] = _difference(name, *(v[:end] if type(v) is list else v for v in pair))
    for name in WHOLE if end is None else ():
        found[name] = _difference(name, getattr(mine, name), getattr(its, name))
    if mine.stop_reason is None:
        found.pop("stop_reason", None)
    for name in OF_PROMPT:
        found[name] = _difference(name, getattr(one, name), getattr(other, name))
    return found


def _difference(name: str, one: Any, other: Any) -> Difference | None:
    place = first_place(one, other)
    if place is None:
        return None
    word = name
    if type(one) is list and type(other) is list:
        word = WORDS[name].format(place)
        one, other = ((v[place : place + 1] or [None])[0] for v in (one, other))
    before, after = ("(absent)" if v is None else shown(v) for v in (one, other))
    reason = f"{word} {before} -> {after}"
    return Difference(reason, place if name in PER_TOKEN else None)


def summed_up(differences: Collection[Difference | None]) -> tuple[int | None, str]:
    """The first position, and what differs there and at the next one; (None, "") without any."""
    found = [one for one in differences if one is not None]
    if not found:
        return None, ""
    found.sort(key=lambda one: math.inf if one.position is None else one.position)
    first, *others = found
    later = [
        f"{o.reason} at {o.position}" for o in others if o.position not in (None, first.position)
    ]
    return first.position, ", ".join([first.reason, *later[:1]])


def identical(found: Any, own: Any) -> bool:
    """The same type and the same bits: True is not 1, 3.0 is not 3, -0.0 is not 0.0."""
    if type(found) is not type(own):
        return False
    if isinstance(own, Thought):
        found, own = list(vars(found).values()), list(vars(own).values())
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
