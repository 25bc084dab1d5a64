"""``tinyspec audit``, ``diff`` and ``doctor``: a report, and the verdict as exit status."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from tinyspec.cli import common
from tinyspec.errors import TinyspecError, refuse


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
    """The first token and bit in which two files of outputs differ, and why.

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
    names = ("reference_rows", "max_rows", "kv_dtype", "json")
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
