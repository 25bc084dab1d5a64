"""A trace in SVG, light or dark as the screen is, and as a page around it. It loads nothing.

A drawing is rows of cells, as a terminal has them: a diagram, or the timeline, with a column for
each pass, a lane for each completion and a cell for each token.
"""

from __future__ import annotations

from html import escape

from tinyspec.engine.trace import PROMPT, TracedWork, lane_name, title
from tinyspec.scheduler.passes import PassRecord
from tinyspec.tools.terminal import FULL, LOOKS, Cell, Row
from tinyspec.tools.trace import Run, cells_of, printable, shown

# Colours of what is written, without a ground of its own; and of what is written on such a ground,
# where it is not that of the screen's.
WRITTEN = ("ink", "bold", "faint")
INKS = {"draft": "dark", "prompt": "ink", "plain": "ink"}
# What a cell is, and how the legend calls it.
LEGEND = {
    **{name: name for name in ("prompt", "canonical", "draft", "accepted", "rejected")},
    **{"bonus": "the verifier's own", "riding": "riding along", "plain": "plain"},
}
# Pixels: width of a letter, height of a row, around all. Letters of a token and of names.
LETTER, LINE, MARGIN = 6.1, 18.0, 8.0
TOKEN, NAMES = 2, 20


def timeline(run: Run) -> list[Row]:
    """The bucket of each pass, and the tokens of each completion in it."""
    tokens = sum(one.committed for one in run.passes)
    told = f"{len(run.lanes)} completions, {len(run.passes)} passes, {tokens} tokens"
    legend = [Cell(told, "bold")]
    for name, words in LEGEND.items():
        legend += [Cell("  "), Cell(_sign(name), name), Cell(f" {words}", "faint")]
    head = [Cell(" " * NAMES)]
    rows = {
        lane: [Cell(f"{shown(lane_name(lane), NAMES - 2):>{NAMES - 1}} ")] for lane in run.lanes
    }
    for one in run.passes:
        wide = max([1, *(len(cells_of(work, one.canonical)) for work in one.works)])
        head += [_head(one, wide), Cell(" ")]
        works = {work.lane: work for work in one.works}
        for lane, row in rows.items():
            row += _tokens(run, one, works[lane], wide) if lane in works else [_blank(wide)]
            row.append(Cell(" "))
    return [legend, head, *rows.values()]


def _sign(name: str) -> str:
    """Of a token, so that it is not told by its colour alone."""
    return LOOKS[name].sign.ljust(TOKEN)


def _blank(tokens: int) -> Cell:
    return Cell(" " * TOKEN * tokens)


def _head(record: PassRecord, wide: int) -> Cell:
    """The bucket of a pass, and whether it is canonical."""
    kind, colour = ("canonical", "canonical") if record.canonical else ("fast", "plain")
    rows = ", ".join(f"{count} {name}" for name, count in record.rows.items() if count)
    told = f"pass {record.number}: {kind}, bucket {record.bucket} {record.way}; rows: {rows}; "
    told += f"{record.committed} committed; {1e3 * record.seconds:.2f} ms"
    bucket = str(record.bucket) if len(str(record.bucket)) <= TOKEN * wide else ""
    return Cell(bucket.ljust(TOKEN * wide), colour, told)


def _tokens(run: Run, one: PassRecord, work: TracedWork, wide: int) -> Row:
    """What a completion has in a pass; its prompt takes the width that its tokens leave."""
    parts = [f"{lane_name(work.lane)}: {title(work)}, from position {work.start}"]
    parts += [f"drafts {run.text(*work.drafts)}"] if work.drafts else []
    parts += [f"committed {run.text(*work.tokens)}"] if work.tokens else []
    parts.append(f"KV: {work.kv} tokens and {work.kv_drafts} drafts, {work.pages} pages")
    told = "; ".join(parts + ([f"ended: {work.end}"] if work.end else []))
    cells = [Cell(_sign(name), name, told) for name in cells_of(work, one.canonical)]
    left = _blank(wide - len(cells))
    if work.kind == PROMPT:
        cells[0].text += left.text
        return cells
    return [*cells, left]


def svg(drawings: list[list[Row]]) -> str:
    """Drawings below one another, as a file."""
    rows = [row for drawing in drawings for row in (*drawing, [])]
    parts, right = [], 0.0
    for number, row in enumerate(rows):
        x, y = MARGIN, MARGIN + number * LINE
        for cell in row:
            text, wide, ink = cell.text, LETTER * len(cell.text), cell.colour or "ink"
            if ink not in WRITTEN:
                where = f'x="{x:.1f}" y="{y:.0f}" width="{wide - 1:.1f}" height="{LINE - 3:.0f}"'
                inside = f"<title>{_shielded(cell.title)}</title>" if cell.title else ""
                parts.append(f'<rect class="{ink}" {where} rx="1.5">{inside}</rect>')
                text, ink = text.replace(FULL, " "), INKS.get(ink, "ground")
            if text.strip():
                where = f'x="{x:.1f}" y="{y + LINE - 7:.0f}"'
                parts.append(f'<text class="{ink}" {where}>{_shielded(text.rstrip())}</text>')
            x += wide
        right = max(right, x)
    size = f'width="{right + MARGIN:.0f}" height="{len(rows) * LINE:.0f}"'
    style = "text{font:10px monospace;white-space:pre;pointer-events:none}"
    style += "text.bold{font-weight:600}"
    style += "".join(f".{name}{{fill:{look.light}}}" for name, look in LOOKS.items())
    dark = "".join(f".{name}{{fill:{look.dark}}}" for name, look in LOOKS.items())
    style += f"@media(prefers-color-scheme:dark){{{dark}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    return "".join((head, f'<rect class="ground" {size}/>', *parts, "</svg>"))


def _shielded(text: str) -> str:
    return escape(printable(text))


def html(drawings: list[list[Row]], title: str) -> str:
    """A page of drawings, which scrolls."""
    title = _shielded(title)
    return f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{title}</title></head><body><h1>{title}</h1>
<p>Rest the pointer on a cell or on the head of a column to read what it is.</p>
<div style="overflow-x:auto">{svg(drawings)}</div></body></html>
"""
