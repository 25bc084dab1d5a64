"""What a terminal shows: colours and signs, tables, one verify of a trace in characters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TextIO

from tinyspec.tools.close_up import CloseUp
from tinyspec.tools.trace_svg import shown

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


FULL, HALF, LIGHT = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{LIGHT SHADE}"
YES, NO, ARROW = "\N{CHECK MARK}", "\N{BALLOT X}", "\N{RIGHTWARDS ARROW}"
NOT = "\N{NOT EQUAL TO}"
# Characters for the canonical part of the KV cache, which is long, and columns of names and tokens.
LONG, NAMES, TOKENS = 12, 13, 17


def lines(one: CloseUp, style: Style) -> list[str]:
    """The picture, at most 90 columns wide."""
    count = len(one.drafts)
    others = f"with {one.others} other requests in it" if one.others else "with no other request"
    where = f"pass {one.number}, bucket {one.bucket}, {others}"
    found = [f"One verify of {one.name} ({where})", ""]
    _part(found, style, "Prefill", [f"the prompt, {one.prompt} tokens, by canonical rows"])
    if one.before > one.prompt:
        found.append(f"{'':{NAMES}}{one.before - one.prompt} tokens of output since, verified")
    _cache(found, style, "prefill", one.before)
    drafts = [f"T{n}'{shown(text)}" for n, text in enumerate(one.drafts, start=1)]
    decoded = [style("canonical", f"T0{shown(one.newest)}"), *(style("draft", d) for d in drafts)]
    _part(found, style, "Decode", [f"  {ARROW}  ".join(decoded)])
    by = "drafts of the fast path" if one.fast else "drafts of a drafter: they have no KV yet"
    found.append(f"{'':{NAMES}}{by}")
    _cache(found, style, "decode", one.before, drafts=count if one.fast else 0)
    _part(found, style, "Verify", [_row(one, style, n) for n in range(count + 1)])
    lost = count + 1 - one.committed
    _cache(found, style, "verify", one.before, new=one.committed, lost=lost)
    kept = [
        style("bonus" if n >= one.accepted else "accepted", f"T{n + 1}{shown(text)}")
        for n, text in enumerate(one.targets[: one.committed])
    ]
    _part(found, style, one.outcome, ["  ".join([f"T0{shown(one.newest)}", *kept])])
    if one.wrong:
        drafts_lost = f"{one.rolled_back} draft{'s' if one.rolled_back > 1 else ''}"
        last = f"T{one.committed}"
        told = f"{drafts_lost} dropped; sequence and KV cut behind {last}, the verifier's own token"
    else:
        told = f"all drafts are right; T{one.committed} is the verifier's own token, a bonus"
    found.append(f"{'':{NAMES}}{told}")
    _cache(found, style, one.outcome.lower(), one.before, new=one.committed)
    return [style.signs(line).rstrip() for line in found[:-1]]


def _part(found: list[str], style: Style, name: str, rows: list[str]) -> None:
    for n, row in enumerate(rows):
        title = style("bold", f"{name:{NAMES}}") if n == 0 else " " * NAMES
        found.append(title + row)


def _row(one: CloseUp, style: Style, n: int) -> str:
    """One row of the canonical pass: what goes in, what it yields, what becomes of that."""
    given = f"T{n}'{shown(one.drafts[n - 1])}" if n else f"T0{shown(one.newest)}"
    target = one.targets[n] if n < len(one.targets) else "?"
    kept, own = n < one.committed, n >= one.accepted
    colour = "rejected" if not kept else "bonus" if own else "accepted"
    yields = style(colour, f"{f'T{n + 1}{shown(target)}':{TOKENS}}")
    if n < one.accepted:
        said = f"= T{n + 1}'  {YES}"
    elif not kept:
        said = f"dropped  {NO}"
    elif one.wrong:
        said = f"{NOT} T{n + 1}'{shown(one.drafts[n])}  {NO}  the verifier's own token is kept"
    else:
        said = f"bonus  {YES}"
    return f"{given:{TOKENS}} {ARROW}  {yields} {said}"


def _cache(
    found: list[str],
    style: Style,
    after: str,
    canonical: int,
    drafts: int = 0,
    new: int = 0,
    lost: int = 0,
) -> None:
    """The KV cache as a bar: its long canonical part, then a character for each token."""
    parts = [
        ("canonical", FULL * LONG, f"{canonical} canonical"),
        ("accepted", FULL * new, f"{new} verified"),
        ("draft", HALF * drafts, f"{drafts} of drafts"),
        ("rejected", LIGHT * lost, f"{lost} dropped"),
    ]
    there = [part for part in parts if part[1]]
    bar = "".join(style(colour, cells) for colour, cells, _ in there)
    width = sum(len(cells) for _, cells, _ in there)
    words = " + ".join(words for _, _, words in there)
    label = f"KV cache after {after}"
    found.append(f"{'':{NAMES}}{label:27}{bar}{' ' * max(LONG + 8 - width, 1)}{words}")
    found.append("")
