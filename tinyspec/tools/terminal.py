"""What a terminal shows: colours, tables, a diagram of a trace."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TextIO

FULL, ARROW = "\N{FULL BLOCK}", "\N{RIGHTWARDS ARROW}"


class Look(NamedTuple):
    """Of a cell: the code of its colour on a terminal, its colours in an SVG on a light and on a
    dark ground, and what stands before it, for those who see no colours."""

    code: str
    light: str
    dark: str
    sign: str = FULL


LOOKS = {
    "ink": Look("", "#1d2127", "#e4e7ec"),
    "bold": Look("1", "#1d2127", "#e4e7ec"),
    "faint": Look("", "#6a727d", "#98a1ad"),
    "ground": Look("", "#ffffff", "#14161a"),
    "dark": Look("", "#1d2127", "#14161a"),
    "prompt": Look("", "#a9bdd6", "#4d6482"),
    "canonical": Look("34", "#2f6fbf", "#5b9bea"),
    "draft": Look("33", "#f2b632", "#d99b1c", "\N{MEDIUM SHADE}"),
    "assistant": Look("36", "#1c97a3", "#3fbccb", "\N{DARK SHADE}"),
    "accepted": Look("32", "#2e9a62", "#3fb97a", "\N{CHECK MARK}"),
    "generated": Look("", "#2e9a62", "#3fb97a"),
    "rejected": Look("31", "#d0453f", "#ea6a62", "\N{BALLOT X}"),
    "bonus": Look("35", "#8457c7", "#ae88ee", "\N{BULLET}"),
    "riding": Look("", "#9aa3ae", "#7b8592"),
    "plain": Look("", "#c9cfd6", "#4a525d"),
}


def styled(file: TextIO, name: str, text: str) -> str:
    """``text`` in the colour of a name of LOOKS, where the stream is a terminal."""
    code = LOOKS[name].code if name and file.isatty() else ""
    return f"\033[{code}m{text}\033[0m" if code else text


def table(rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> list[str]:
    """Lines of aligned columns, one for each of ``rows``; the first is the header.

    right: the columns, by number, that are aligned right.
    """
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        pairs = enumerate(zip(row, widths, strict=True))
        padded = [cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in pairs]
        lines.append("  ".join(padded).rstrip())
    return lines


@dataclass
class Cell:
    """Text in or on a colour: a token by its name, a part of the KV cache, or words around them.
    colour: one of LOOKS, or "". title: said where a pointer rests."""

    text: str
    colour: str = ""
    title: str = ""


Row = list[Cell]


@dataclass
class Diagram:
    """stages: of each, lines of what enters it and its tokens, and of the KV cache after it.
    legend: what colours mean."""

    title: str
    stages: dict[str, list[Row]]
    legend: Row
    note: str


def lines(diagram: Diagram, file: TextIO, width: int = 100) -> list[str]:
    """A diagram in characters, a stage below the other, in lines of at most ``width``."""
    rows = laid_out(diagram, width)
    return ["".join(styled(file, cell.colour, cell.text) for cell in row).rstrip() for row in rows]


def laid_out(diagram: Diagram, width: int = 100) -> list[Row]:
    """The rows of a diagram, with signs before its cells and blanks between them."""
    indent = max(map(len, diagram.stages)) + 2
    found = _filled([Cell(diagram.title, "bold"), *diagram.legend], width)
    for stage, parts in diagram.stages.items():
        told = [row for part in parts for row in _filled(part, width - indent)]
        for name, row in zip_longest([stage], told, fillvalue=""):
            found.append([Cell(name.ljust(indent)), *row])
    return found + [[Cell(line)] for line in textwrap.wrap(diagram.note, width)]


def _filled(cells: Row, width: int) -> list[Row]:
    """Cells side by side, in as many rows as they need."""
    found, room = [list[Cell]()], width
    for cell in cells:
        sign = f"{LOOKS[cell.colour].sign} " if cell.colour not in ("", "bold") else ""
        text = sign + cell.text
        if found[-1] and len(text) > room:
            found, room = [*found, []], width
        found[-1] += [Cell(text, cell.colour), Cell("  ")]
        room -= len(text) + 2
    return found
