"""What a terminal shows: colours, tables, a diagram of a trace."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tinyspec.tools.trace import Cell, Diagram

CODES = {
    "bold": "1",
    "canonical": "34",
    "draft": "33",
    "accepted": "32",
    "rejected": "31",
    "bonus": "35",
    "differs": "1;30;43",
}
# Before a cell, for those who see no colours.
SIGNS = {
    "draft": "\N{MEDIUM SHADE}",
    "accepted": "\N{CHECK MARK}",
    "rejected": "\N{BALLOT X}",
    "bonus": "\N{BULLET}",
}
# The name of a colour, and text in it.
Part = tuple[str, str]
FULL, ARROW = "\N{FULL BLOCK}", "\N{RIGHTWARDS ARROW}"


def styled(file: TextIO, name: str, text: str) -> str:
    """``text`` in the colour of a name of CODES, where the stream is a terminal."""
    return f"\033[{CODES[name]}m{text}\033[0m" if file.isatty() and name in CODES else text


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


def lines(diagram: Diagram, file: TextIO, width: int = 100) -> list[str]:
    """A diagram in characters, a stage below the other, in lines of at most ``width``."""
    rows = ["  ".join(styled(file, *part) for part in row) for row in laid_out(diagram, width)]
    return [row.rstrip() for row in rows]


def laid_out(diagram: Diagram, width: int) -> list[list[Part]]:
    """The lines of a diagram: texts with the names of their colours, two blanks between them."""
    indent = max(len(panel.name) for panel in diagram.panels)
    found = _filled([("bold", diagram.title), *_marked(diagram.legend)], width)
    for panel in diagram.panels:
        enters = [("", f"{words} {ARROW}") for words in panel.enters]
        model = [("", f"{ARROW} {panel.model} {ARROW}")] if panel.model else []
        parts = [*enters, *_marked(panel.cells), *model, *_marked(panel.outputs)]
        told = _filled(parts, width - indent - 2)
        if panel.kv:
            told += _filled([("", f"{panel.cache}:"), *_marked(panel.kv)], width - indent - 2)
        for name, row in zip_longest([panel.name], told, fillvalue=""):
            found.append([("", name.ljust(indent)), *row])
    return found + [[("", line)] for line in textwrap.wrap(diagram.note, width)]


def _filled(parts: Sequence[Part], width: int) -> list[list[Part]]:
    """Parts side by side, in as many lines as they need."""
    found, room = [list[Part]()], width
    for part in parts:
        if found[-1] and len(part[1]) > room:
            found, room = [*found, []], width
        found[-1].append(part)
        room -= len(part[1]) + 2
    return found


def _marked(cells: list[Cell]) -> list[Part]:
    """Texts behind their signs."""
    return [(cell.colour, f"{SIGNS.get(cell.colour, FULL)} {cell.text}") for cell in cells]
