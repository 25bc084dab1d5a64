"""The sequences whose rows share the passes of a probe, end to end. Knows rows and pages only."""

from __future__ import annotations

from dataclasses import dataclass

# Sequences: rows that each has in the probe, and position of the first. 120 + 17 crosses a tile.
SEGMENTS = ((1, 7), (5, 0), (1, 64), (1, 30), (17, 120), (1, 127), (5, 21), (1, 128), (96, 3))
# Rows of the sequence whose context goes beyond a split, and its place among them: there every
# bucket's second pass begins.
BEYOND, PLACE = 9, 4


@dataclass(frozen=True)
class Segment:
    """Rows ``first`` to ``end`` of the probe: of one sequence, on its own pages."""

    first: int
    end: int
    position: int
    pages: list[int]


def segments(rows: int, page_size: int, max_model_len: int, split: int = 0) -> list[Segment]:
    """Sequences with ``rows`` rows together. split: one of them has as many tokens before its
    first row; 0: none has."""
    kinds = list(SEGMENTS)
    if split:
        kinds.insert(PLACE, (BEYOND, split))
    found: list[Segment] = []
    first = page = 0
    while first < rows:
        cycle, kind = divmod(len(found), len(kinds))
        count, position = kinds[kind]
        count = min(count, max_model_len, rows - first)
        if position == split < max_model_len:  # shorter rather than elsewhere
            count = min(count, max_model_len - split)
        position = (position + 5 * cycle) % (max_model_len - count + 1)
        pages = -(-(position + count) // page_size)
        found.append(Segment(first, first + count, position, list(range(page, page + pages))))
        first, page = first + count, page + pages
    return found
