"""``tinyspec demo`` and ``trace``: what the engine does, to look at."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

from tinyspec.cli import common
from tinyspec.config import VERIFY
from tinyspec.errors import refuse

KINDS, VIEWS = (".svg", ".html"), ("both", "timeline", "verify")
# Cells side by side in a picture that is not scrolled.
CELLS = 110


def add_demo(parser: ArgumentParser) -> None:
    common.add_options(parser, *common.MODEL, dtype="bfloat16")
    thinking = "a model that reasons while it reads instead, on one prompt"
    parser.add_argument("--thinking", action="store_true", help=thinking)
    rollback = "only two verifies, one with a rollback and one without"
    parser.add_argument("--rollback", action="store_true", help=rollback)
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="default: 120")
    parser.add_argument("--seed", type=int, help="of the request (default: one chosen beforehand)")
    # "auto" takes the cheapest way, on a CPU hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")


def demo(options: Namespace) -> int:
    """One request alone and in a crowd, without and with deterministic=True.

    Exit status 0 if the deterministic request has the same bits alone and in
    the crowd, 1 if not, whatever the plain one does. Both verifies that are
    drawn are of this run; `tinyspec trace` draws whole runs.

    example:
      tinyspec demo --crowd 20
    """
    for name, value in (("crowd", options.crowd), ("max-new-tokens", options.max_new_tokens)):
        if value < 1:
            raise refuse(f"--{name}", value, "an integer of at least 1")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise refuse("--seed", options.seed, "an integer in [0, 2**63)")
    common.load_libraries()
    from tinyspec.tools import demo as tool

    with ExitStack() as stack:
        if not options.thinking:
            settings = {"verify": options.verify, "trace": True, "draft_window": 3}
            engine = stack.enter_context(common.engine_of(options, **settings))
            sizes = options.crowd, options.max_new_tokens, options.seed
            return tool.demo(engine, *sizes, rollback=options.rollback)
        options.model = options.model or str(tool.THINKER)
        engines = {}
        for name, window in tool.WAYS.items():
            found = common.engine_of(options, thinking_window=window, trace=True)
            engines[name] = stack.enter_context(found)
        config = tool.ThinkingConfig.load(Path(options.model))
        return tool.demo_thinking(engines, config)


def add_trace(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a saved trace; - is standard input")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=".svg or .html file")
    parser.add_argument("--view", choices=VIEWS, default="both", help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first pass (default: 0)")
    cells = f"width in cells (default: {CELLS}; .html: all)"
    parser.add_argument("--cells", type=int, metavar="N", help=cells)


def trace(options: Namespace) -> int:
    """A saved trace as a picture (.svg) or a page (.html).

    The file is what engine.trace.save(...) wrote with
    EngineConfig(trace=True), or `generate --trace`; https://ui.perfetto.dev
    opens it as well. The timeline has a column for each pass, a lane for each
    completion and a cell for each token, over a strip of the KV cache; below
    it stand a verify with a rollback and one without, or, of a single request
    without any, its prefill and decode. .html scrolls through all passes and
    loads nothing.

    example:
      tinyspec trace run.json -o run.html
    """
    path = Path(options.output)
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise refuse("--output", options.output, f"a name that ends with {', '.join(KINDS)}")
    if options.cells is not None and options.cells < 1:
        raise refuse("--cells", options.cells, "an integer of at least 1")
    from tinyspec.tools.drawing import html, svg, timeline
    from tinyspec.tools.terminal import laid_out
    from tinyspec.tools.trace import diagrams, read

    run = read(options.file)
    if not run.passes:
        raise refuse("file", options.file, "a trace with at least one pass")
    last = run.passes[-1].record.number
    run.passes = [one for one in run.passes if one.record.number >= options.first]
    if not run.passes:
        raise refuse("--first", options.first, f"at most {last}, the last pass in {options.file}")
    most = options.cells or (None if kind == ".html" else CELLS)
    drawings = [timeline(run, most)] if options.view != "verify" else []
    drawings += map(laid_out, diagrams(run) if options.view != "timeline" else [])
    if not drawings:
        raise refuse("--view", "verify", "timeline: no pass of this trace verified drafts")
    title = f"tinyspec: {Path(options.file).name}"
    text = html(drawings, title) if kind == ".html" else svg(drawings)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(run.passes)} passes, {len(run.lanes)} completions")
    return 0
