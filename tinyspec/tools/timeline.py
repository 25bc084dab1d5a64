"""A trace as a timeline: a column for each pass, a lane for each completion, a cell for each token,
over a strip of what the KV cache holds; and the pictures of a trace together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinyspec.engine.trace import CANONICAL, DRAFT, PLAIN, PROMPT, VERIFIED, TracedWork
from tinyspec.errors import refuse
from tinyspec.tools.drawing import Drawing, shown
from tinyspec.tools.trace_run import Lane, Run, RunPass, lane_name, lane_of
from tinyspec.tools.verify_picture import describe, draw

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
MOST_ROWS = 5000


def views(run: Run, view: str, most_cells: int | None = None) -> list[Drawing]:
    """ "timeline", "verify", or "both", where a trace without a verify has the first alone.

    Raises ValueError for "verify" where nothing was verified.
    """
    found = [timeline(run, most_cells)] if view != "verify" else []
    one = describe(run) if view != "timeline" else None
    if one is not None:
        found.append(draw(one))
    elif view == "verify":
        raise refuse("view", view, "timeline: no pass of this trace verified drafts")
    return found


def table(run: Run) -> Iterator[list[object]]:
    """A row for each pass, below a head."""
    kinds = list(run.passes[0].rows) if run.passes else []
    yield ["pass", "ms", "bucket", "canonical", "way", *kinds, "committed", "pages"]
    for one in run.passes[:MOST_ROWS]:
        said = "yes" if one.canonical else "no"
        rows = [one.rows[kind] for kind in kinds]
        about = [one.number, f"{1e3 * one.seconds:.2f}", one.bucket, said, one.way]
        yield [*about, *rows, one.committed, one.pages_held]


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
    cell, space = (13.0, 7) if len(run.lanes) <= FEW_LANES else (9.0, 1)
    columns = _columns(run.passes, cell, most_cells)
    here = set().union(*(column.cells for column in columns))
    lanes = [lane for lane in run.lanes if lane in here]
    end = columns[-1].x + columns[-1].width if columns else NAMES
    places = {lane: TOP + (cell + space) * n for n, lane in enumerate(lanes)}
    bottom = TOP + (cell + space) * len(lanes)
    drawing = Drawing(max(end + 12, 640), bottom + STRIP + 38)
    _head(drawing, run, columns, len(lanes))
    for lane, y in places.items():
        name = shown(lane_name(lane), 16)
        drawing.text(NAMES - 8, y + cell - 2, name, anchor="end", size=min(11, cell))
        drawing.line(NAMES, y + cell + 0.5, end - NAMES, 0, "rule", 0.5)
    for column in columns:
        _pass(drawing, column, bottom)
        for work in column.one.works:
            _work(drawing, run, column, work, places[lane_of(work)], cell)
    _strip(drawing, columns, bottom + 14)
    return drawing


def _columns(passes: list[RunPass], cell: float, most: int | None) -> list[Column]:
    columns: list[Column] = []
    x, used = float(NAMES), 0
    for one in passes:
        cells = {lane_of(w): cells_of(w, one.canonical) for w in one.works}
        wide = max(1, *map(len, cells.values())) if cells else 1
        used += wide
        if most is not None and used > most and columns:
            break
        columns.append(Column(one, x, wide * cell, cells))
        x += wide * cell + 2
    return columns


def _head(drawing: Drawing, run: Run, columns: list[Column], lanes: int) -> None:
    of = "" if len(columns) == len(run.passes) else f" (the first of {len(run.passes)})"
    tokens = sum(column.one.committed for column in columns)
    time = sum((1e3 * (c.one.began + c.one.seconds) for c in columns[-1:]), start=0.0)
    told = f"{lanes} completions, {len(columns)} passes{of}, {tokens} tokens, {time:.0f} ms"
    drawing.text(8, 15, told, bold=True, size=12)
    x = 8.0
    for name, words in LEGEND.items():
        _cell(drawing, x, 24, 10, name)
        drawing.text(x + 14, 33, words, colour="faint")
        x += 24 + 5.6 * len(words)


def _pass(drawing: Drawing, column: Column, bottom: float) -> None:
    """The head of a column: is the pass canonical, its bucket; a stripe behind its cells."""
    one, x, width = column.one, column.x, column.width
    rows = ", ".join(f"{count} {name}" for name, count in one.rows.items() if count)
    title = (
        f"pass {one.number}: {'canonical' if one.canonical else 'fast'}, bucket {one.bucket}"
        f"{f', {one.way}' if one.way else ''}; rows: {rows}; {one.committed} committed; "
        f"{1e3 * one.seconds:.2f} ms; {one.pages_held} pages"
    )
    if one.canonical:
        drawing.rect(x - 1, TOP - 3, width + 2, bottom - TOP + 3, "fast")
    drawing.rect(x, TOP - 19, width, 13, "canonical" if one.canonical else "rule", title)
    if width >= 24:
        colour = "ground" if one.canonical else "ink"
        drawing.text(x + width / 2, TOP - 9, f"{one.bucket}", 9, colour, "middle")


def _work(
    drawing: Drawing, run: Run, column: Column, work: TracedWork, y: float, cell: float
) -> None:
    cells, x = column.cells[lane_of(work)], column.x
    title = _title(run, work)
    if work.kind == PROMPT:  # the column's whole width, but for the token that it yields
        width = column.width - cell * (len(cells) - 1)
        drawing.rect(x, y + 1, width - 1, cell - 2, PROMPT, title)
        x, cells = x + width, cells[1:]
    for n, name in enumerate(cells):
        _cell(drawing, x + n * cell, y + 0.5, cell - 1, name)
    if cells and work.kind != PROMPT:
        drawing.rect(x, y, len(cells) * cell, cell, "none", title)


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

    parts = [f"{lane_name(lane_of(work))}: {work.kind}"]
    if work.kind == VERIFIED:
        parts.append(f"drafts {words(work.drafts)}; {work.accepted} accepted")
        parts += [f"{work.rejected} rolled back"] if work.rejected else []
    elif work.kind == DRAFT:
        parts.append(f"draft {words(work.drafts)}")
    elif work.kind not in (CANONICAL, PLAIN):
        parts.append(f"{work.rows} rows from position {work.start}")
    parts += [f"committed {words(work.tokens)}"] if work.tokens else []
    drafts = f" and {work.kv_drafts} drafts" if work.kv_drafts else ""
    parts.append(f"KV: {work.kv} tokens{drafts}, {work.pages} pages")
    parts += [f"ended: {work.end}"] if work.end else []
    return "; ".join(parts)


def _strip(drawing: Drawing, columns: list[Column], y: float) -> None:
    """KV tokens of all completions after each pass: canonical, of drafts, of plain requests."""
    held: dict[Lane, tuple[int, int, int]] = {}
    after = []
    for column in columns:
        for work in column.one.works:
            kept = (work.kv, work.kv_drafts, 0) if work.deterministic else (0, 0, work.kv)
            held[lane_of(work)] = kept if work.kv else (0, 0, 0)
        after.append([sum(values) for values in zip(*held.values(), strict=True)])
    most = max(map(sum, after), default=0) or 1
    pages = max((column.one.pages_held for column in columns), default=0)
    for column, values in zip(columns, after, strict=True):
        base = y + STRIP
        for value, colour in zip(values, ("canonical", "draft", "plain"), strict=False):
            high = STRIP * value / most
            base -= high
            if value:
                drawing.rect(column.x - 1, base, column.width + 2, high, colour)
    drawing.line(NAMES, y + STRIP, drawing.width - NAMES - 12, 0, "rule")
    for n, words in enumerate(("KV cache", f"at most {most} tokens", f"in {pages} pages")):
        drawing.text(NAMES - 8, y + 14 + 14 * n, words, anchor="end", colour="faint")
    told = "final KV of deterministic requests (blue), of drafts (yellow), of plain ones (grey)"
    drawing.text(NAMES, y + STRIP + 16, told, colour="faint")
