"""``tinyspec audit``: finished outputs against what this engine produces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tinyspec.cli.common import add_model, add_report, make_engine
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput
from tinyspec.tools.audit import audit


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="does this engine produce what `tinyspec generate --json` wrote, bit for bit?",
        epilog="Exit status 0 if every completion is the same, 1 if one differs or cannot be "
        "compared: other weights, device, versions, dtype or reference rows.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="one output a line")
    add_model(parser, dtype="auto")
    add_report(parser)
    parser.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    lines = options.file.read_text().splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    outputs = [_output(line, number) for number, line in numbered]
    if not outputs:
        raise refuse("file", str(options.file), "a file with at least one output")
    with make_engine(options, EngineConfig(reference_rows=options.reference_rows)) as engine:
        report = audit(engine, outputs)
    print(report.to_json() if options.json else report)
    return 0 if report else 1


def _output(line: str, number: int) -> RequestOutput:
    try:
        return RequestOutput.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"line {number} is not an output of tinyspec: {error}") from error
