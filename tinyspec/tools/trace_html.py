"""The views of a trace, and a page of them with a table of every pass. It loads nothing."""

from __future__ import annotations

from html import escape

from tinyspec.errors import refuse
from tinyspec.tools.close_up import close_up, picture
from tinyspec.tools.timeline import timeline
from tinyspec.tools.trace_run import Run
from tinyspec.tools.trace_svg import STYLE, Drawing, printable, svg


def views(run: Run, view: str, most_cells: int | None = None) -> list[Drawing]:
    """ "timeline", "verify", or "both", where a trace without a verify has the first alone.

    Raises ValueError for "verify" where nothing was verified.
    """
    found = [timeline(run, most_cells)] if view != "verify" else []
    one = close_up(run) if view != "timeline" else None
    if one is not None:
        found.append(picture(one))
    elif view == "verify":
        raise refuse("view", view, "timeline: no pass of this trace verified drafts")
    return found


def stacked(drawings: list[Drawing]) -> Drawing:
    """One below the other."""
    whole = Drawing()
    for drawing in drawings:
        whole.add(drawing, 0, whole.height + (16 if whole.height else 0))
    return whole


PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<style>{style}
body{{font-family:system-ui,'DejaVu Sans',sans-serif;margin:1.5rem;background:#fff;color:#1d2127}}
.wide{{overflow-x:auto;margin:0 0 1.5rem}} table{{border-collapse:collapse;font-size:.8rem}}
th,td{{text-align:right;padding:.15rem .6rem;border-bottom:1px solid #d4d9df}}
@media(prefers-color-scheme:dark){{body{{background:#14161a;color:#e4e7ec}}
th,td{{border-color:#363c45}}}}
</style></head><body><h1>{title}</h1>
<p>Rest the pointer on a cell or on the head of a column to read what it is.</p>
{pictures}
<details><summary>Every pass</summary><div class="wide"><table>{table}</table></div></details>
</body></html>
"""
MOST_ROWS = 5000


def html(run: Run, drawings: list[Drawing], title: str) -> str:
    """The page."""
    pictures = "\n".join(f'<div class="wide">{svg(one, style=False)}</div>' for one in drawings)
    return PAGE.format(
        title=escape(printable(title)), style=STYLE, pictures=pictures, table=_table(run)
    )


def _table(run: Run) -> str:
    """A row for each pass."""
    kinds = list(run.passes[0].rows) if run.passes else []
    head = ["pass", "ms", "bucket", "canonical", "way", *kinds, "committed", "pages"]
    rows = ["".join(f"<th>{escape(printable(name))}</th>" for name in head)]
    for one in run.passes[:MOST_ROWS]:
        values = [one.number, f"{1e3 * one.seconds:.2f}", one.bucket]
        values += ["yes" if one.canonical else "no", one.way]
        values += [one.rows[kind] for kind in kinds] + [one.committed, one.pages_held]
        rows.append("".join(f"<td>{escape(printable(str(value)))}</td>" for value in values))
    return "".join(f"<tr>{row}</tr>" for row in rows)
