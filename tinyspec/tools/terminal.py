"""What a terminal shows: colours, tables, one verify of a trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tinyspec.tools.trace import Cell, Verify

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
SIGNS = {"draft": "\N{MEDIUM SHADE}", "rejected": "\N{LIGHT SHADE}"}


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


def lines(verify: Verify, file: TextIO) -> list[str]:
    """A verify in characters."""
    rows = [[_text(cell) for cell in row] for row in verify.rows()]
    heads = [column.name for column in verify.columns]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(texts: Sequence[str], colours: Sequence[str]) -> str:
        parts = zip(texts, widths, colours, strict=True)
        return "  ".join(styled(file, c, text.ljust(w)) for text, w, c in parts).rstrip()

    found = [verify.title, "", line(heads, ["bold"] * len(heads))]
    for cells, texts in zip(verify.rows(), rows, strict=True):
        found.append(line(texts, ["" if cell is None else cell.colour for cell in cells]))
    notes = [f"{column.name}: {column.note}" for column in verify.columns if column.note]
    return [*found, "", *notes]


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{SIGNS.get(cell.colour, chr(0x2588))} {cell.text}  {cell.said}".rstrip()
