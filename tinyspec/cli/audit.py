"""``tinyspec audit``: finished outputs against what this engine produces."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from tinyspec.cli.common import add_model, add_report, make_engine, print_report, read_outputs
from tinyspec.cli.progress import summed_up
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse

SUMMARY = "does this engine produce what `tinyspec generate --json` wrote, bit for bit?"
EXAMPLE = "tinyspec audit outputs.jsonl --model Qwen/Qwen3-0.6B"
NOTES = (
    "Exit status 0 if every completion is the same; 1 if one differs, is verified in part (it was "
    "aborted) or cannot be compared (a plain request; other weights, device, versions, dtype or "
    "reference rows); 2 if a line is no output: the others are audited."
)


def add(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="one output a line; - is standard input")
    add_model(parser)
    add_report(parser)


def run(options: Namespace) -> int:
    outputs, complaints = read_outputs(options.file)
    if not outputs:
        allowed = "; ".join(complaints) or "a file with at least one output"
        raise refuse("file", options.file, allowed)
    with make_engine(options, EngineConfig(reference_rows=options.reference_rows)) as engine:
        from tinyspec.tools.audit import audit

        count = sum(len(output.completions) for output in outputs)
        with summed_up(engine, sys.stderr, count):
            report = audit(engine, outputs, progress=sys.stderr.isatty())
    return print_report(report, options.json, complaints)
