"""A trace as a timeline: a column for each pass, a lane for each completion, a cell for each token,
over a strip of what the KV cache holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinyspec.engine.traced import CANONICAL, DRAFT, PLAIN, PROMPT, VERIFIED, TracedWork
from tinyspec.tools.trace_run import Lane, Run, RunPass
from tinyspec.tools.trace_svg import Drawing, shown

# What a cell is, and how the legend calls it.
LEGEND = {
    "prompt": "prompt",
    "canonical": "canonical",
    "draft": "draft",
    "accepted": "accepted",
    "rejected": "rejected",
    "bonus": "bonus (the verifier's own)",
    "riding": "riding along",
    "plain": "plain",
}
NAMES, TOP, STRIP, FEW_LANES = 132, 62, 64, 16


@dataclass
class Column:
    """A pass in the picture. cells: of each lane that it has rows for."""

    one: RunPass
    x: float
    width: float
    cells: dict[Lane, list[str]]


def cells_of(work: TracedWork, canonical_pass: bool) -> list[str]:
    """What became of each of its tokens, in the order of the sequence; a prompt is one cell."""
    if work.kind == VERIFIED:
        own = ["bonus"] * (len(work.tokens) - work.accepted)
        return ["accepted"] * work.accepted + own + ["rejected"] * work.rejected
    if work.kind == DRAFT:
        return ["draft"] * len(work.drafts)
    riding = "riding" if canonical_pass else "plain"
    tokens = ["canonical" if work.deterministic else riding] * len(work.tokens)
    return [PROMPT, *tokens] if work.kind == PROMPT else tokens


def timeline(run: Run, most_cells: int | None = None) -> Drawing:
    """All passes, or the first that fit into ``most_cells`` cells side by side."""
    lanes = run.lanes
    cell = 13.0 if len(lanes) <= FEW_LANES else 9.0
    columns = _columns(run.passes, cell, most_cells)
    here = set().union(*(column.cells for column in columns)) if columns else set()
    lanes = [lane for lane in lanes if lane in here]
    high = cell + (7 if len(lanes) <= FEW_LANES else 1)
    end = columns[-1].x + columns[-1].width if columns else NAMES
    bottom = TOP + high * len(lanes)
    drawing = Drawing(max(end + 12, 640), bottom + STRIP + 38)
    _head(drawing, run, columns, len(lanes))
    places = {lane: TOP + high * n for n, lane in enumerate(lanes)}
    for (request, index), y in places.items():
        name = f"{request}{f' #{index}' if index else ''}"
        label = {"anchor": "end", "size": min(11, cell), "colour": "ink"}
        drawing.text(NAMES - 8, y + cell - 2, shown(name, 16), **label)
        drawing.line(NAMES, y + cell + 0.5, end - NAMES, 0, "rule", 0.5)
    for column in columns:
        _pass(drawing, column, bottom)
        for work in column.one.works:
            _work(drawing, run, column, work, places[work.request_id, work.index], cell)
    _strip(drawing, columns, bottom + 14)
    return drawing


def _columns(passes: Iterable[RunPass], cell: float, most: int | None) -> list[Column]:
    columns: list[Column] = []
    x, used = float(NAMES), 0
    for one in passes:
        cells = {(w.request_id, w.index): cells_of(w, one.canonical) for w in one.works}
        wide = max(1, *map(len, cells.values())) if cells else 1
        used += wide
        if most is not None and used > most and columns:
            break
        columns.append(Column(one, x, wide * cell, cells))
        x += wide * cell + 2
    return columns


def _head(drawing: Drawing, run: Run, columns: list[Column], lanes: int) -> None:
    shown_passes, all_passes = len(columns), len(run.passes)
    of = "" if shown_passes == all_passes else f" (the first of {all_passes})"
    tokens = sum(column.one.committed for column in columns)
    last = columns[-1].one if columns else None
    time = 1e3 * (last.began + last.seconds) if last else 0.0
    told = f"{lanes} completions, {shown_passes} passes{of}, {tokens} tokens, {time:.0f} ms"
    drawing.text(8, 15, told, bold=True, size=12)
    x = 8.0
    for name, words in LEGEND.items():
        _cell(drawing, x, 24, 10, name)
        drawing.text(x + 14, 33, words, size=10, colour="faint")
        x += 24 + 5.6 * len(words)


def _pass(drawing: Drawing, column: Column, bottom: float) -> None:
    """The head of a column: is the pass canonical, its bucket; a stripe behind its cells."""
    one, x, width = column.one, column.x, column.width
    kind = "canonical" if one.canonical else "fast"
    rows = ", ".join(f"{count} {name}" for name, count in one.rows.items() if count)
    way = f", {one.way}" if one.way else ""
    title = (
        f"pass {one.number}: {kind}, bucket {one.bucket}{way}; rows: {rows}; "
        f"{one.committed} committed; {1e3 * one.seconds:.2f} ms; {one.pages_held} pages"
    )
    if one.canonical:
        drawing.rect(x - 1, TOP - 3, width + 2, bottom - TOP + 3, "fast")
    drawing.rect(x, TOP - 19, width, 13, "canonical" if one.canonical else "rule", title=title)
    if width >= 24:
        colour = "ground" if one.canonical else "ink"
        drawing.text(
            x + width / 2, TOP - 9, str(one.bucket), size=9, anchor="middle", colour=colour
        )


def _work(
    drawing: Drawing, run: Run, column: Column, work: TracedWork, y: float, cell: float
) -> None:
    cells = column.cells[work.request_id, work.index]
    x = column.x
    if work.kind == PROMPT:  # the column's whole width, but for the token that it yields
        width = column.width - cell * (len(cells) - 1)
        drawing.rect(x, y + 1, width - 1, cell - 2, PROMPT, title=_title(run, work))
        x, cells = x + width, cells[1:]
    for n, name in enumerate(cells):
        _cell(drawing, x + n * cell, y + 0.5, cell - 1, name)
    if cells and work.kind != PROMPT:
        title = _title(run, work)
        drawing.rect(x, y, len(cells) * cell, cell, "none", title=title)


def _cell(drawing: Drawing, x: float, y: float, side: float, name: str) -> None:
    drawing.rect(x, y, side, side, name, round=1.5)
    if name == "rejected":  # not by colour alone
        drawing.line(x + 2, y + 2, side - 4, side - 4, "ground", 1.4)
        drawing.line(x + 2, y + side - 2, side - 4, 4 - side, "ground", 1.4)
    elif name == "bonus":
        drawing.rect(x + side / 2 - 1.5, y + side / 2 - 1.5, 3, 3, "ground")


def _title(run: Run, work: TracedWork) -> str:
    def words(tokens: list[int]) -> str:
        return " ".join(shown(run.text(token)) for token in tokens)

    parts = [f"{work.request_id}{f' #{work.index}' if work.index else ''}: {work.kind}"]
    if work.kind == VERIFIED:
        parts.append(f"drafts {words(work.drafts)}; {work.accepted} accepted")
        if work.rejected:
            parts.append(f"{work.rejected} rolled back")
    elif work.kind == DRAFT:
        parts.append(f"draft {words(work.drafts)}")
    elif work.kind not in (CANONICAL, PLAIN):
        parts.append(f"{work.rows} rows from position {work.start}")
    if work.tokens:
        parts.append(f"committed {words(work.tokens)}")
    held = f"{work.kv} tokens" + (f" and {work.kv_drafts} drafts" if work.kv_drafts else "")
    parts.append(f"KV: {held}, {work.pages} pages")
    if work.end:
        parts.append(f"ended: {work.end}")
    return "; ".join(parts)


def _strip(drawing: Drawing, columns: list[Column], y: float) -> None:
    """KV tokens of all completions after each pass: canonical, of drafts, of plain requests."""
    held: dict[Lane, tuple[int, int, int]] = {}
    after = []
    for column in columns:
        for work in column.one.works:
            kept = (work.kv, work.kv_drafts, 0) if work.deterministic else (0, 0, work.kv)
            held[work.request_id, work.index] = kept if work.kv else (0, 0, 0)
        after.append([sum(values) for values in zip(*held.values(), strict=True)] or [0, 0, 0])
    most = max((sum(values) for values in after), default=0) or 1
    pages = max((column.one.pages_held for column in columns), default=0)
    for column, values in zip(columns, after, strict=True):
        base = y + STRIP
        for value, colour in zip(values, ("canonical", "draft", "plain"), strict=True):
            high = STRIP * value / most
            base -= high
            if value:
                drawing.rect(column.x - 1, base, column.width + 2, high, colour)
    drawing.line(NAMES, y + STRIP, drawing.width - NAMES - 12, 0, "rule")
    for n, words in enumerate(("KV cache", f"at most {most} tokens", f"in {pages} pages")):
        drawing.text(NAMES - 8, y + 14 + 14 * n, words, anchor="end", size=10, colour="faint")
    told = "final KV of deterministic requests (blue), of drafts (yellow), of plain ones (grey)"
    drawing.text(NAMES, y + STRIP + 16, told, size=10, colour="faint")
