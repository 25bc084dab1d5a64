"""``tinyspec trace``: pictures of what an engine's passes did."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from tinyspec.errors import refuse

KINDS = (".svg", ".html")
VIEWS = ("both", "timeline", "verify")
# Cells side by side in a picture that is not scrolled.
CELLS = 110
SUMMARY = "a saved trace as a picture (.svg) or a page (.html)"
EXAMPLE = "tinyspec trace run.json -o run.html"
NOTES = (
    "The file is what engine.trace.save(...) wrote with EngineConfig(trace=True), or `generate "
    "--trace`; https://ui.perfetto.dev opens it as well. The timeline has a column for each pass, "
    "a lane for each completion and a cell for each token, over a strip of the KV cache; below it "
    "stands one verify close up. .html scrolls through all passes and loads nothing."
)


def add(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="what engine.trace.save wrote; - is standard input"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="a .svg or .html file"
    )
    parser.add_argument("--view", choices=VIEWS, default="both", help="default: %(default)s")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="begin with pass N (default: 0)"
    )
    parser.add_argument(
        "--cells", type=int, metavar="N", help=f"width in cells (default: {CELLS}; .html: all)"
    )


def run(options: Namespace) -> int:
    path = Path(options.output)
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise refuse("--output", options.output, f"a name that ends with {', '.join(KINDS)}")
    if options.cells is not None and options.cells < 1:
        raise refuse("--cells", options.cells, "an integer of at least 1")
    from tinyspec.tools.drawing import Drawing, html, svg
    from tinyspec.tools.timeline import table, views
    from tinyspec.tools.trace_run import read

    traced = read(options.file)
    if not traced.passes:
        raise refuse("file", options.file, "a trace with at least one pass")
    last = max(one.number for one in traced.passes)
    traced.passes = [one for one in traced.passes if one.number >= options.first]
    if not traced.passes:
        raise refuse("--first", options.first, f"at most {last}, the last pass in {options.file}")
    most = options.cells or (None if kind == ".html" else CELLS)
    drawings = views(traced, options.view, most)
    if kind == ".html":
        title = f"tinyspec: {Path(options.file).name}"
        path.write_text(html(drawings, title, table(traced)), encoding="utf-8")
    else:
        whole = Drawing()
        for drawing in drawings:
            whole.stack(drawing)
        path.write_text(svg(whole) + "\n", encoding="utf-8")
    print(f"{path}: {len(traced.passes)} passes, {len(traced.lanes)} completions")
    return 0
