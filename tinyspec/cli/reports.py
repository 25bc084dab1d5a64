"""``tinyspec audit``, ``diff``, ``doctor``, ``probe``: a report, and the verdict as exit status."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tinyspec.cli import common
from tinyspec.errors import TinyspecError, refuse

ENDPOINTS, CROWDS = ("chat", "completions"), (4, 16, 64)
FIELDS = """of every request, such as '{"deterministic": true}'"""


def add_audit(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="one output a line; - is standard input")
    common.add_options(parser, *common.MODEL, "reference_rows", "json")


def audit(options: Namespace) -> int:
    """Does this engine produce what `tinyspec generate --json` wrote, bit for bit?

    Exit status 0 if every completion is the same; 1 if one differs, is
    verified in part (it was aborted) or cannot be compared (a plain request;
    other weights, device, versions, dtype or reference rows); 2 if a line is
    no output: the others are audited.

    example:
      tinyspec audit outputs.jsonl --model Qwen/Qwen3-0.6B
    """
    outputs, complaints = common.read_outputs(options.file)
    if not outputs:
        allowed = "; ".join(complaints) or "a file with at least one output"
        raise refuse("file", options.file, allowed)
    with common.engine_of(options) as engine:
        from tinyspec.tools import audit as tool

        report = tool.audit(engine, outputs, progress=sys.stderr.isatty())
    return common.print_report(report, options.json, complaints)


def add_diff(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="FILE", help="one output a line; - is standard input")
    parser.add_argument("second", metavar="FILE", help="what it is compared with")
    common.add_options(parser, "json")


def diff(options: Namespace) -> int:
    """The first token in which two files of outputs differ, and why.

    Requests are matched by prompt and parameters, whatever their order. Where
    fingerprints differ the parts that do are named. Exit status 0 if every
    completion is the same in every bit; 1 if one differs, cannot be compared,
    or is in one file only; 2 if a line is no output.

    example:
      tinyspec diff monday.jsonl tuesday.jsonl
    """
    from tinyspec.tools import diff as tool

    if options.first == options.second == common.STANDARD_INPUT:
        raise refuse("second", options.second, "a file; standard input can be read once")
    first, complaints = common.read_outputs(options.first)
    second, others = common.read_outputs(options.second)
    return common.print_report(tool.diff(first, second), options.json, complaints + others)


def add_doctor(parser: ArgumentParser) -> None:
    names = ("drafter", "reference_rows", "max_rows", "kv_dtype", "json")
    common.add_options(parser, *common.MODEL, *names)
    fresh = "probe again, without the results on disk"
    parser.add_argument("--fresh", action="store_true", help=fresh)


def doctor(options: Namespace) -> int:
    """Which buckets are canonical here, what breaks the others, and what each costs.

    Exit status 0 if deterministic=True can be served, 1 if not. Results are
    kept on disk.

    example:
      tinyspec doctor --model Qwen/Qwen3-0.6B --dtype bfloat16
    """
    common.load_libraries()
    from tinyspec.tools import doctor as tool

    try:
        with common.engine_of(options) as engine:
            report = tool.doctor(engine, fresh=options.fresh)
    except TinyspecError as error:
        given = common.model_name(options), options.dtype, options.device
        report = tool.DoctorReport(*given, (str(error),))
    return common.print_report(report, options.json)


def add_probe(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT, or with the path of the API")
    add("--model", metavar="NAME", help="default: the first that it lists")
    add("--api-key", metavar="KEY", help="default: the variable OPENAI_API_KEY")
    add("--endpoints", nargs="+", default=ENDPOINTS, choices=ENDPOINTS, help="default: both")
    add("--crowds", nargs="+", type=int, default=CROWDS, metavar="N", help="default: 4 16 64")
    add("--max-tokens", type=int, default=32, metavar="N", help="of an answer (default: 32)")
    add("--timeout", type=float, default=60, metavar="S", help="for one request (default: 60 s)")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help=FIELDS)
    add("--json", metavar="FILE", help="write all that was found into FILE")


def probe(options: Namespace) -> int:
    """Is a server of OpenAI's API deterministic? One request alone and in crowds.

    Asks one request alone, again, streamed, and in crowds: of itself, of other
    requests, of others that begin like it; at once and one after the other,
    with a cold and a warm prefix, greedy and seeded. Text, token ids and the
    digits of log-probabilities must be those that it has alone; other prompts
    and seeds must give others. What the server refuses is left out. Some 2,000
    requests of 32 tokens; fewer with --crowds and --endpoints. Exit status 0 if
    all are equal, 1 if not, 2 if that could not be found out.

    example:
      tinyspec probe http://localhost:8000
    """
    from tinyspec.serve.probe import Probe

    if not isinstance(options.extra_body, dict):
        raise refuse("--extra-body", options.extra_body, "a JSON object")
    if options.json is not None:
        open(options.json, "ab").close()  # where it cannot be written, nothing runs
    names = ("url", "model", "endpoints", "crowds", "max_tokens", "timeout", "extra_body")
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    run = Probe(**{name: getattr(options, name) for name in names}, api_key=key)
    try:
        asyncio.run(run.run())
    finally:  # after Ctrl-C too
        print(run.report)
        if options.json is not None:
            Path(options.json).write_text(run.report.to_json() + "\n")
    return run.report.verdict[0]
