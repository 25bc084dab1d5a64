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
    found = _filled([(diagram.title, "bold"), *_marked(diagram.legend)], width, file)
    indent = max(len(panel.name) for panel in diagram.panels) + 2
    for panel in diagram.panels:
        enters = [(f"{words} {ARROW}", "") for words in panel.enters]
        model = [(f"{ARROW} {panel.model} {ARROW}", "")] if panel.model else []
        parts = [*enters, *_marked(panel.cells), *model, *_marked(panel.outputs)]
        told = _filled(parts, width - indent, file)
        if panel.kv:
            told += _filled([(f"{panel.cache}:", ""), *_marked(panel.kv)], width - indent, file)
        for name, line in zip_longest([panel.name], told, fillvalue=""):
            found.append(name.ljust(indent) + line)
    return found + textwrap.wrap(diagram.note, width)


def _filled(parts: Sequence[tuple[str, str]], width: int, file: TextIO) -> list[str]:
    """Texts with their colours side by side, in as many lines as they need."""
    found, room = [""], width
    for text, colour in parts:
        if found[-1] and len(text) > room:
            found, room = [*found, ""], width
        found[-1] += styled(file, colour, text) + "  "
        room -= len(text) + 2
    return [line.rstrip() for line in found]


def _marked(cells: list[Cell]) -> list[tuple[str, str]]:
    """Texts behind their signs, with their colours."""
    return [(f"{SIGNS.get(cell.colour, FULL)} {cell.text}", cell.colour) for cell in cells]
