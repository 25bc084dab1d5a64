"""Fact 2 as a measurement: which row counts of a function of rows agree, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tinyspec.determinism.probes.bits import RowFunction, class_of, in_passes, unequal_bits


@dataclass(frozen=True)
class RowClasses:
    """Fact 2: row counts in classes whose rows are equal bit for bit."""

    reference: int
    pool: int  # rows that every row count was compared on
    classes: tuple[tuple[int, ...], ...]
    differing: dict[int, int]  # row count -> rows of the pool unlike those of the reference

    @property
    def canonical(self) -> tuple[int, ...]:
        """The row counts that agree with the reference, which is one of them."""
        return next(members for members in self.classes if self.reference in members)


def row_classes(
    fn: RowFunction, inputs: Tensor, row_counts: Iterable[int], reference: int
) -> RowClasses:
    """Fact 2: all `inputs` `[pool, features]` through passes of each row count, grouped by bits.

    Every row of the pool goes through a pass of every row count, at a cost of pool / row count
    passes; so agreement is over all rows, and transitive.
    """
    results: list[Tensor] = []
    members: dict[int, list[int]] = {}
    differing: dict[int, int] = {}
    expected = in_passes(fn, inputs, reference)
    for rows in sorted({reference, *row_counts}):
        result = in_passes(fn, inputs, rows)
        differing[rows] = int(unequal_bits(expected, result).any(dim=1).sum())
        members.setdefault(class_of(result, results), []).append(rows)
    return RowClasses(reference, len(inputs), tuple(map(tuple, members.values())), differing)
