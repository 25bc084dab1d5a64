"""What a terminal shows: colours, signs, tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TextIO

CODES = {
    "bold": "1",
    "faint": "2",
    "canonical": "34",
    "draft": "33",
    "accepted": "32",
    "rejected": "31",
    "bonus": "35",
    "differs": "1;30;43",
}
# What a terminal that is not Unicode's shows instead.
PLAIN_SIGNS = str.maketrans(
    {
        "\N{CHECK MARK}": "+",
        "\N{BALLOT X}": "x",
        "\N{NOT EQUAL TO}": "#",
        "\N{FULL BLOCK}": "#",
        "\N{MEDIUM SHADE}": ":",
        "\N{LIGHT SHADE}": ".",
        "\N{RIGHTWARDS ARROW}": ">",
        "\N{MIDDLE DOT}": " ",
        "\N{HORIZONTAL ELLIPSIS}": "~",
    }
)


class Style:
    """How a stream is written to: in colour on a terminal, in its encoding."""

    def __init__(self, file: TextIO):
        self.colour = file.isatty()
        self._encoding = file.encoding or "utf-8"

    def __call__(self, name: str, text: str) -> str:
        """``text`` in the colour of a name of CODES."""
        return f"\033[{CODES[name]}m{text}\033[0m" if self.colour else text

    def signs(self, text: str) -> str:
        """``text`` as the stream can show it."""
        try:
            text.encode(self._encoding)
        except UnicodeEncodeError:
            text = text.translate(PLAIN_SIGNS)
            text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        return text


def table(rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> list[str]:
    """Lines of aligned columns, one for each of ``rows``; the first is the header.

    right: the columns, by number, that are aligned right.
    """
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        padded = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return list(map(line, cells))
