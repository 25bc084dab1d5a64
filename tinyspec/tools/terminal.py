"""What a terminal shows: colours, tables, a diagram of a trace."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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
    "differs": Look("1;30;43", "#f2b632", "#d99b1c"),
    "prompt": Look("", "#a9bdd6", "#4d6482"),
    "canonical": Look("34", "#2f6fbf", "#5b9bea"),
    "draft": Look("33", "#f2b632", "#d99b1c", "\N{MEDIUM SHADE}"),
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
class Panel:
    """One stage. enters: what arrows bring into it. cache: what the KV cache after it is called,
    and kv its parts. model: what the cells pass through to yield outputs, the last output from the
    last cell; "" where that is not drawn."""

    name: str
    enters: list[str]
    cells: list[Cell]
    cache: str = ""
    kv: list[Cell] = field(default_factory=list)
    model: str = ""
    outputs: list[Cell] = field(default_factory=list)


@dataclass
class Diagram:
    """Stages from left to right. legend: what colours mean."""

    title: str
    panels: list[Panel]
    legend: list[Cell]
    note: str


def lines(diagram: Diagram, file: TextIO, width: int = 100) -> list[str]:
    """A diagram in characters, a stage below the other, in lines of at most ``width``."""
    rows = laid_out(diagram, width)
    return ["".join(styled(file, cell.colour, cell.text) for cell in row).rstrip() for row in rows]


def laid_out(diagram: Diagram, width: int = 100) -> list[Row]:
    """The rows of a diagram, with signs before its cells and blanks between them."""
    indent = max(len(panel.name) for panel in diagram.panels) + 2
    found = _filled([Cell(diagram.title, "bold"), *_marked(diagram.legend)], width)
    for panel in diagram.panels:
        enters = [Cell(f"{words} {ARROW}") for words in panel.enters]
        model = [Cell(f"{ARROW} {panel.model} {ARROW}")] if panel.model else []
        parts = [*enters, *_marked(panel.cells), *model, *_marked(panel.outputs)]
        told = _filled(parts, width - indent)
        if panel.kv:
            told += _filled([Cell(f"{panel.cache}:"), *_marked(panel.kv)], width - indent)
        for name, row in zip_longest([panel.name], told, fillvalue=""):
            found.append([Cell(name.ljust(indent)), *row])
    return found + [[Cell(line)] for line in textwrap.wrap(diagram.note, width)]


def _filled(cells: list[Cell], width: int) -> list[Row]:
    """Cells side by side, in as many rows as they need."""
    found, room = [list[Cell]()], width
    for cell in cells:
        if found[-1] and len(cell.text) > room:
            found, room = [*found, []], width
        found[-1] += [cell, Cell("  ")]
        room -= len(cell.text) + 2
    return found


def _marked(cells: list[Cell]) -> Row:
    """Texts behind their signs."""
    return [Cell(f"{LOOKS[cell.colour].sign} {cell.text}", cell.colour) for cell in cells]
