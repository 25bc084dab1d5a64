"""What a probe found: for a reader of one minute, and as JSON. Knows no server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyspec.serve.answers import COMPARED, Answer, difference
from tinyspec.tools.terminal import table

# Characters of an error by which failures are counted.
KIND = 60


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
