"""What a probe finds: answers, where two of them differ, and a report for a reader of one minute.

Knows no HTTP and no server. Numbers with a point stay the digits that were sent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyspec.tools.diff import first_place
from tinyspec.tools.terminal import table

# Where servers put text: completions, chat, and two names for reasoning.
TEXTS = ("text", "content", "reasoning", "reasoning_content")
COMPARED = ("text", "token_ids", "logprobs", "finish_reason")
# Characters of a text that are shown from a difference on; of a list it is one value.
FOLLOWING = 24
# Characters of an error by which failures are counted.
KIND = 60


@dataclass
class Answer:
    """text: all that was generated. token_ids, logprobs: empty where the server gave none; a
    log-probability is a token's text and the digits. error: why there is no answer. refused:
    whether that is about the request, so that another one may be answered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    fingerprint: str | None = None
    error: str | None = None
    refused: bool = False

    @classmethod
    def of(cls, texts: Iterable[str]) -> Answer:
        """The answer in the JSON of a response, or in that of all chunks of a stream.

        Raises ValueError, TypeError, LookupError or AttributeError for what is none."""
        answer, parts = cls(), dict.fromkeys(TEXTS, "")
        for text in texts:
            chunk = json.loads(text, parse_float=str)
            if chunk.get("error"):
                return cls(error=f"error in an answer: {chunk['error']}", refused=True)
            answer.fingerprint = chunk.get("system_fingerprint") or answer.fingerprint
            for choice in chunk["choices"]:
                message = choice.get("message") or choice.get("delta") or choice
                for name in TEXTS:
                    parts[name] += message.get(name) or ""
                answer.token_ids += choice.get("token_ids") or []
                answer.logprobs += _logprobs(choice.get("logprobs") or {})
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.text = "".join(parts.values())
        return answer if answer.finish_reason else cls(error="an answer without an end")


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """In the form of chat, or in that of completions."""
    if choice.get("content"):
        return [(token["token"], str(token["logprob"])) for token in choice["content"]]
    digits = map(str, choice.get("token_logprobs") or [])
    return list(zip(choice.get("tokens") or [], digits, strict=True))


def difference(alone: Answer, other: Answer) -> str | None:
    """Where the texts of a request's answer alone and of another one differ first, and whatever
    else both have, with what follows there; None where all is equal."""
    found = []
    for name in COMPARED:
        first, second = getattr(alone, name), getattr(other, name)
        if first != second and (name == "text" or (first and second)):
            place = first_place(list(first), list(second)) or 0
            end = place + (FOLLOWING if isinstance(first, str) else 1)
            rest = (one[place:end] for one in (first, second))
            found.append("{}[{}]: {!r} -> {!r}".format(name, place, *rest))
    return "\n  ".join(found) or None


@dataclass
class Report:
    """rows: what is varied -> mode (endpoint and decoding) -> numbers of answers: "compared" with
    that of the request alone, "equal" to it. differences: with request and answers. controls:
    whether answers differed that must. notes: what was left out, and why. given (fields of
    answers), fingerprints, failures: in how many answers. complete: whether it came to the end."""

    url: str
    model: str | None
    rows: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    fingerprints: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def count(self, answers: Sequence[Answer]) -> None:
        """Add what all answers have, whatever they are compared with."""
        for answer in answers:
            self.given.update(name for name in COMPARED if getattr(answer, name))
            self.fingerprints.update([answer.fingerprint] if answer.fingerprint else [])
            self.failures.update([answer.error[:KIND]] if answer.error else [])

    def compare(
        self, place: tuple[str, str, str], request: Any, alone: Answer, others: Sequence[Answer]
    ) -> None:
        """Add answers to a request, against its answer alone. place: mode, what was varied, how."""
        cell = self.rows.setdefault(place[1], {}).setdefault(place[0], Counter())
        answered = [] if alone.error else [other for other in others if not other.error]
        for other in answered:
            found = difference(alone, other)
            cell.update(compared=1, equal=found is None)
            if found is not None:
                both = {"alone": vars(alone), "other": vars(other)}
                self.differences.append({"place": place, "found": found, "request": request} | both)

    @property
    def verdict(self) -> tuple[int, str]:
        """The exit status, and why. Answers that are equal prove nothing where not all was tried,
        or where all answers are the same."""
        cells = [cell["compared"] for row in self.rows.values() for cell in row.values()]
        same = [name for name, differ in self.controls.items() if not differ]
        if found := self.differences:
            texts = sum(one["alone"]["text"] != one["other"]["text"] for one in found)
            return 1, f"DIFFERENT: {len(found)} answers are not those alone, {texts} in their text"
        if not (self.complete and cells and all(cells)):
            return 2, "NOT TRIED: not all requests could be compared"
        if same:
            return 2, f"CONTROL FAILED: no other answer to {'; '.join(same)}"
        return 0, "EQUAL: every answer is the one that the request has alone"

    def __str__(self) -> str:
        modes = list(dict.fromkeys(mode for row in self.rows.values() for mode in row))
        rows = [["equal to alone", *modes]]
        for varied, row in self.rows.items():
            cells = [row.get(mode, Counter()) for mode in modes]
            rows.append([varied, *(f"{cell['equal']} of {cell['compared']}" for cell in cells)])
        lines = [f"{self.url}, model {self.model}", *table(rows, right=range(1, len(modes) + 1))]
        for name in ("given", "fingerprints", "failures"):
            counts = (f"{key} ({number})" for key, number in getattr(self, name).items())
            lines.append(f"{name}: {', '.join(counts) or 'none'}")
        differ = sum(self.controls.values())
        lines.append(f"controls: {differ} of {len(self.controls)} have other answers, as they must")
        lines += [f"note: {note}" for note in self.notes]
        firsts = {found["place"][0]: found for found in reversed(self.differences)}
        lines += [f"{', '.join(one['place'])}: {one['found']}" for one in firsts.values()][::-1]
        return "\n".join([*lines, self.verdict[1]])

    def to_json(self) -> str:
        """All of it, in one line."""
        return json.dumps({"verdict": self.verdict, **vars(self)})
