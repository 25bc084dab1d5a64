"""``tinyspec diff``: two files of outputs against each other."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tinyspec.cli.common import STANDARD_INPUT, print_report, read_outputs
from tinyspec.errors import refuse

SUMMARY = "the first token and bit in which two files of outputs differ, and why"
EXAMPLE = "tinyspec diff monday.jsonl tuesday.jsonl"
NOTES = (
    "Requests are matched by prompt and parameters, whatever their order. Where fingerprints "
    "differ the parts that do are named. Exit status 0 if every completion is the same in every "
    "bit; 1 if one differs, cannot be compared, or is in one file only; 2 if a line is no output."
)


def add(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="FILE", help="one output a line; - is standard input")
    parser.add_argument("second", metavar="FILE", help="what it is compared with")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def run(options: Namespace) -> int:
    from tinyspec.tools.diff import diff

    if options.first == options.second == STANDARD_INPUT:
        raise refuse("second", options.second, "a file; standard input can be read once")
    first, complaints = read_outputs(options.first)
    second, others = read_outputs(options.second)
    return print_report(diff(first, second), options.json, complaints + others)
