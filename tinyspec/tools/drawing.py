"""A trace in SVG, light or dark as the screen is, and as a page around it. It loads nothing.

The timeline has a column for each pass, a lane for each completion and a cell for each token, over
a strip of what the KV cache holds; a diagram is what a terminal shows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from tinyspec.engine.trace import PROMPT, Lane, TracedPass, TracedWork, lane_name, title
from tinyspec.tools.terminal import FULL, SIGNS, laid_out
from tinyspec.tools.trace import Diagram, Run, cells_of, printable, shown

# By name: on a light and on a dark ground.
COLOURS = {
    "ground": ("#ffffff", "#14161a"),
    "ink": ("#1d2127", "#e4e7ec"),
    "faint": ("#6a727d", "#98a1ad"),
    "rule": ("#d4d9df", "#363c45"),
    "fast": ("#e9ecef", "#272c33"),
    "prompt": ("#a9bdd6", "#4d6482"),
    "canonical": ("#2f6fbf", "#5b9bea"),
    "dark": ("#1d2127", "#14161a"),
    "draft": ("#f2b632", "#d99b1c"),
    "accepted": ("#2e9a62", "#3fb97a"),
    "generated": ("#2e9a62", "#3fb97a"),
    "rejected": ("#d0453f", "#ea6a62"),
    "bonus": ("#8457c7", "#ae88ee"),
    "riding": ("#9aa3ae", "#7b8592"),
    "plain": ("#c9cfd6", "#4a525d"),
}
# What a cell is, and how the legend calls it.
LEGEND = {
    **{name: name for name in ("prompt", "canonical", "draft", "accepted", "rejected")},
    **{"bonus": "the verifier's own", "riding": "riding along", "plain": "plain"},
}
NAMES, TOP, STRIP, FEW_LANES = 132.0, 62.0, 64.0, 16
# Of a diagram: letters in a line, width of a letter, height of a line.
LETTERS, LETTER, LINE = 100, 6.1, 19.0
# What is written on a colour, where the ground's is not seen.
INKS = {"draft": "dark", "prompt": "ink", "plain": "ink"}


@dataclass
class Drawing:
    """SVG elements from back to front; lengths in pixels, colours by name."""

    width: float
    height: float
    elements: list[str] = field(default_factory=list)

    def add(self, tag: str, colour: str, inside: str = "", **where: float | str) -> None:
        """An element and its attributes, ``_`` for ``-`` in their names; inside: what it holds."""
        sized = {n: v if isinstance(v, str) else round(v, 1) for n, v in where.items()}
        given = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in sized.items())
        self.elements.append(f'<{tag} class="{colour}" {given}>{inside}</{tag}>')

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, title: str = ""
    ) -> None:
        """x, y: top left. title: said where a pointer rests."""
        inside = f"<title>{_shielded(title)}</title>" if title else ""
        self.add("rect", colour, inside, x=x, y=y, width=width, height=height, rx=1.5)

    def text(self, x: float, y: float, text: str, colour: str = "ink", **more: float | str) -> None:
        """x, y: the baseline."""
        self.add("text", colour, _shielded(text), x=x, y=y, **more)

    def cell(self, x: float, y: float, side: float, name: str) -> None:
        """A token of a kind that the legend names."""
        self.rect(x, y, side, side, name)
        if name in SIGNS:  # not told by the colour alone
            sign, middle = SIGNS[name], x + side / 2
            self.text(middle, y + side - 2, sign, "ground", font_size=side, text_anchor="middle")


def _shielded(text: str) -> str:
    return escape(printable(text))


@dataclass
class _Column:
    """A pass in the picture."""

    one: TracedPass
    x: float
    width: float


def timeline(run: Run, most: int | None = None) -> Drawing:
    """All passes, or the first that fit into ``most`` cells side by side."""
    side = 13.0 if len(run.lanes) <= FEW_LANES else 9.0
    columns = _columns(run.passes, side, most)
    lanes = Run([column.one for column in columns], run.texts).lanes
    rows = {lane: TOP + 1.4 * side * n for n, lane in enumerate(lanes)}
    bottom = TOP + 1.4 * side * len(lanes)
    drawing = Drawing(max(columns[-1].x + columns[-1].width + 12, 640), bottom + STRIP + 38)
    _head(drawing, run, columns, len(lanes))
    for lane, y in rows.items():
        name = shown(lane_name(lane), 16)
        drawing.text(NAMES - 8, y + side - 2, name, font_size=min(11, side), text_anchor="end")
    for column in columns:
        for work in column.one.works:
            _work(drawing, column, work, rows[work.lane], side)
            drawing.rect(column.x, rows[work.lane], column.width, side, "none", _title(run, work))
    _strip(drawing, columns, bottom + 14)
    return drawing


def _columns(passes: list[TracedPass], side: float, most: int | None) -> list[_Column]:
    columns: list[_Column] = []
    x, used = NAMES, 0
    for one in passes:
        wide = max([1, *(len(cells_of(work, one.record.canonical)) for work in one.works)])
        used += wide
        if most is not None and used > most and columns:
            break
        columns.append(_Column(one, x, wide * side))
        x += wide * side + 2
    return columns


def _head(drawing: Drawing, run: Run, columns: list[_Column], lanes: int) -> None:
    """What is shown, the legend, and of each pass its bucket and whether it is canonical."""
    of = "" if len(columns) == len(run.passes) else f" (the first of {len(run.passes)})"
    tokens = sum(column.one.record.committed for column in columns)
    told = f"{lanes} completions, {len(columns)} passes{of}, {tokens} tokens"
    drawing.text(8, 15, told, font_size=12, font_weight="600")
    x = 8.0
    for name, words in LEGEND.items():
        drawing.cell(x, 24, 10, name)
        drawing.text(x + 14, 33, words, "faint")
        x += 24 + 5.6 * len(words)
    for column in columns:
        record, x = column.one.record, column.x
        kind, colour = ("canonical", "canonical") if record.canonical else ("fast", "rule")
        rows = ", ".join(f"{count} {name}" for name, count in record.rows.items() if count)
        title = f"pass {record.number}: {kind}, bucket {record.bucket} {record.way}; rows: {rows}; "
        title += f"{record.committed} committed; {1e3 * record.seconds:.2f} ms"
        if record.canonical:
            drawing.rect(x - 1, TOP - 3, column.width + 2, drawing.height - TOP - STRIP, "fast")
        drawing.rect(x, TOP - 19, column.width, 13, colour, title)
        if column.width >= 24:
            ink = "ground" if record.canonical else "ink"
            drawing.text(x + 2, TOP - 9, str(record.bucket), ink, font_size=9)


def _work(drawing: Drawing, column: _Column, work: TracedWork, y: float, side: float) -> None:
    cells, x = cells_of(work, column.one.record.canonical), column.x
    if work.kind == PROMPT:  # the column's whole width, but for the token that it yields
        width = column.width - side * (len(cells) - 1)
        drawing.rect(x, y, width - 1, side - 1, PROMPT)
        x, cells = x + width, cells[1:]
    for n, name in enumerate(cells):
        drawing.cell(x + n * side, y, side - 1, name)


def _title(run: Run, work: TracedWork) -> str:
    parts = [f"{lane_name(work.lane)}: {title(work)}, from position {work.start}"]
    parts += [f"drafts {run.text(*work.drafts)}"] if work.drafts else []
    parts += [f"committed {run.text(*work.tokens)}"] if work.tokens else []
    parts.append(f"KV: {work.kv} tokens and {work.kv_drafts} drafts, {work.pages} pages")
    return "; ".join(parts + ([f"ended: {work.end}"] if work.end else []))


def _strip(drawing: Drawing, columns: list[_Column], y: float) -> None:
    """KV tokens of all completions after each pass: canonical, of drafts, of plain requests."""
    held: dict[Lane, tuple[int, int, int]] = {}
    after = []
    for column in columns:
        for work in column.one.works:
            kept = (work.kv, work.kv_drafts, 0) if work.deterministic else (0, 0, work.kv)
            held[work.lane] = kept
        after.append([sum(values) for values in zip(*held.values(), strict=True)])
    most = max(map(sum, after), default=0) or 1
    for column, values in zip(columns, after, strict=True):
        base = y + STRIP
        for value, colour in zip(values, ("canonical", "draft", "plain"), strict=False):
            base -= STRIP * value / most
            if value:
                drawing.rect(column.x - 1, base, column.width + 2, STRIP * value / most, colour)
    drawing.text(NAMES - 8, y + STRIP, f"KV, at most {most}", "faint", text_anchor="end")
    told = "KV cache: tokens of deterministic requests (blue), drafts (yellow), plain ones (grey)"
    drawing.text(NAMES, y + STRIP + 16, told, "faint")


def picture(diagram: Diagram) -> Drawing:
    """The lines that a terminal shows, with tokens on grounds of their colours."""
    rows = laid_out(diagram, LETTERS)
    drawing = Drawing(16 + LETTERS * LETTER, 16 + LINE * len(rows))
    for number, row in enumerate(rows, 1):
        x, y = 8.0, LINE * number
        for colour, text in row:
            ink, style = "ink", "font-family:monospace"
            if colour in COLOURS:
                text, ink = text.removeprefix(f"{FULL} "), INKS.get(colour, "ground")
                drawing.rect(x - 4, y - 12, LETTER * len(text) + 8, LINE - 2, colour)
            elif colour:
                style += ";font-weight:600"
            drawing.text(x, y, text, ink, style=style)
            x += LETTER * (len(text) + 2)
    return drawing


def svg(drawings: list[Drawing]) -> str:
    """Drawings below one another, as a file."""
    y, parts = 0.0, []
    for drawing in drawings:
        parts += [f'<g transform="translate(0 {y:.0f})">', *drawing.elements, "</g>"]
        y += drawing.height
    size = f'width="{max(d.width for d in drawings):.0f}" height="{y:.0f}"'
    style = "text{font-family:system-ui,'DejaVu Sans',sans-serif;white-space:pre}"
    for column, media in enumerate(("{}", "@media(prefers-color-scheme:dark){{{}}}")):
        fills = (f".{name}{{fill:{both[column]}}}" for name, both in COLOURS.items())
        style += media.format("".join(fills))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-size="10" {size}><style>{style}'
    head += f'.none{{fill:transparent}}</style><rect class="ground" {size}/>'
    return "".join((head, *parts, "</svg>"))


def html(drawings: list[Drawing], title: str) -> str:
    """A page of drawings, which scrolls."""
    title = _shielded(title)
    return f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{title}</title></head><body><h1>{title}</h1>
<p>Rest the pointer on a cell or on the head of a column to read what it is.</p>
<div style="overflow-x:auto">{svg(drawings)}</div></body></html>
"""
