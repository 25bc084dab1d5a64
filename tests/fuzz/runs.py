"""One run of the fuzzer: requests alone, on fresh engines, against the same requests in a crowd
while something outside changes.

The rule: the same fingerprint, the same bits. A change that would give others must change the
fingerprint, be refused, or be noticed. What the promise leaves out is never compared: plain
requests, writes that cannot be seen.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tinyspec
from tests.fuzz import ambient
from tests.fuzz.crowds import Outputs, alone, crowd
from tests.fuzz.draws import RunDraw
from tests.fuzz.influences import Influence
from tests.fuzz.ledger import Ledger, failure, noticed
from tests.fuzz.worker import outputs_of
from tinyspec import DeterminismError, UnsupportedModelError
from tinyspec.errors import UnsupportedEnvironmentError

PACKAGE = Path(tinyspec.__file__).parent
REFUSALS = (DeterminismError, UnsupportedModelError, UnsupportedEnvironmentError)


def refused(error: Exception) -> bool:
    """Whether an error is an answer: one of the package's own, or a ValueError that it raises."""
    if not isinstance(error, ValueError):
        return isinstance(error, REFUSALS)
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised).is_relative_to(PACKAGE)


@dataclass
class Result:
    """What a run came to. findings: broken promises. counts: what it has compared; refusals:
    why it was refused."""

    draw: RunDraw
    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Run:
    """Carries a run out and judges it."""

    def __init__(self, draw: RunDraw):
        self.draw = draw
        self.result = Result(draw)
        self.ledger = Ledger()
        self.truths: list[list[int]] = []

    def carry_out(self) -> Result:
        """Alone undisturbed, alone disturbed, and in the crowd."""
        draw, before = self.draw, ambient.state()
        with threads(draw.threads):
            self._attempt(lambda: self._alone(None), disturbed=False)
            if draw.influence is not None:
                if draw.influence.environment:
                    self._attempt(self._elsewhere, disturbed=True)
                else:
                    self._attempt(lambda: self._alone(draw.influence), disturbed=True)
            disturbed = draw.influence is not None and not draw.influence.environment
            self._attempt(self._crowd, disturbed)
        after = ambient.state()
        assert after == before, f"left behind: {after} instead of {before}"
        return self.result

    def _attempt(self, part: Callable[[], None], disturbed: bool) -> None:
        """Run a part; a refusal is an answer, but not where nothing disturbs; nothing else is."""
        try:
            part()
        except Exception as error:
            if not refused(error):
                line = traceback.extract_tb(error.__traceback__)[-1]
                self.find(f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})")
                return
            self.result.counts["refused"] += 1
            self.result.refusals.append(str(error))
            if not disturbed:
                self.find(f"refused though nothing disturbs: {error}")

    def find(self, what: str) -> None:
        self.result.findings.append(what)

    def _alone(self, influence: Influence | None) -> None:
        where = "alone" if influence is None else "alone and disturbed"
        outputs = alone(self.draw, influence)
        if influence is None:
            needles = self.draw.needles
            self.truths = [
                [*needles[n].prompt, *output.completions[0].token_ids] for n, output in outputs
            ]
        self.judge(outputs, where)

    def _crowd(self) -> None:
        found: list[tuple[str, Outputs]] = []
        try:
            crowd(self.draw, self.truths, found)
        finally:
            for where, outputs in found:
                self.judge(outputs, where)

    def _elsewhere(self) -> None:
        """The same in a process with other variables."""
        assert self.draw.influence is not None
        for where, outputs in outputs_of(self.draw):
            self.judge(outputs, f"{where} with {self.draw.influence.name}")

    def judge(self, outputs: Outputs, where: str) -> None:
        """Compare outputs with those known under their fingerprint."""
        counts = self.result.counts
        for number, output in outputs:
            counts["outputs"] += 1
            if failed := failure(output):
                self.find(f"request {number} failed {where}: {failed}")
                continue
            counts["noticed"] += noticed(output)
            counts["compared"] += self.ledger.knows(number, output)
            if found := self.ledger.add(number, output, where):
                self.find(found)


def run(draw: RunDraw) -> Result:
    """Carry out one run."""
    return Run(draw).carry_out()


def command(draw: RunDraw) -> str:
    """What to type to have this run again."""
    only = f" --influences '{','.join(draw.classes)}'" if draw.classes else ""
    return f"pytest tests/fuzz/test_fuzz.py -m slow --seed {draw.seed} --number {draw.number}{only}"
