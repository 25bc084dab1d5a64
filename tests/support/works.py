"""The works of a pass, one object each."""

from __future__ import annotations

from typing import NamedTuple

from tinyspec.scheduler.passes import Pass
from tinyspec.scheduler.request import Sequence


class Work(NamedTuple):
    """Positions ``start`` to ``end - 1`` of one sequence; see ``passes.ScheduledRows``."""

    sequence: Sequence
    kind: int
    start: int
    end: int
    yields: int

    @property
    def count(self) -> int:
        return self.end - self.start


def works_of(drawn: Pass) -> list[Work]:
    """To be called before any of its sequences ends."""
    works = drawn.works
    columns = (works.kinds, works.starts, works.ends, works.yields)
    return [Work(*one) for one in zip(drawn.sequences, *(c.tolist() for c in columns), strict=True)]
