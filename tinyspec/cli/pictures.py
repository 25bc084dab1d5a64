"""``tinyspec demo`` and ``trace``: what the engine does, to look at."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

from tinyspec.cli import common
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams

KINDS = (".svg", ".html")


def add_demo(parser: ArgumentParser) -> None:
    common.add_options(parser, *common.MODEL, dtype="bfloat16")
    thinking = "a model that reasons while it reads instead, on one prompt"
    parser.add_argument("--thinking", action="store_true", help=thinking)
    rollback = "only two verifies, one with a rollback and one without"
    parser.add_argument("--rollback", action="store_true", help=rollback)
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="default: 120")


def demo(options: Namespace) -> int:
    """One request alone and in a crowd, without and with deterministic=True.

    Exit status 0 if the deterministic request has the same bits alone and in
    the crowd, 1 if not, whatever the plain one does. Both verifies that are
    drawn are of this run; `tinyspec trace` draws whole runs.

    example:
      tinyspec demo --crowd 20
    """
    if options.crowd < 1:
        raise refuse("--crowd", options.crowd, "an integer of at least 1")
    SamplingParams(max_new_tokens=options.max_new_tokens)  # raises
    common.load_libraries()
    from tinyspec.tools import demo as tool

    with ExitStack() as stack:
        if not options.thinking:
            # The cheapest way is on a CPU hardly ever to draft and verify.
            settings = {"verify": "always", "trace": True, "draft_window": 3}
            engine = stack.enter_context(common.engine_of(options, **settings))
            sizes = options.crowd, options.max_new_tokens
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


def trace(options: Namespace) -> int:
    """A saved trace as a picture (.svg) or a page (.html).

    The file is what engine.trace.save(...) wrote with
    EngineConfig(trace=True), or `generate --trace`; https://ui.perfetto.dev
    opens it as well. The timeline has a column for each pass, a lane for each
    completion and a cell for each token; below it stand a verify with a
    rollback and one without, or, of a single request without any, its prefill
    and decode. .html scrolls, and loads nothing.

    example:
      tinyspec trace run.json -o run.html
    """
    path = Path(options.output)
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise refuse("--output", options.output, f"a name that ends with {', '.join(KINDS)}")
    from tinyspec.tools.drawing import html, svg, timeline
    from tinyspec.tools.terminal import laid_out
    from tinyspec.tools.trace import diagrams, read

    run = read(options.file)
    if not run.passes:
        raise refuse("file", options.file, "a trace with at least one pass")
    drawings = [timeline(run), *map(laid_out, diagrams(run))]
    title = f"tinyspec: {Path(options.file).name}"
    text = html(drawings, title) if kind == ".html" else svg(drawings)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(run.passes)} passes, {len(run.lanes)} completions")
    return 0
