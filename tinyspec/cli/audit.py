"""``tinyspec audit``: finished outputs against what this engine produces."""

from __future__ import annotations

import argparse
import sys
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
        epilog="Exit status 0 if every completion is the same; 1 if one differs, is verified in "
        "part (it was aborted) or cannot be compared (a plain request; other weights, device, "
        "versions, dtype or reference rows); 2 if a line is no output: the others are audited.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="one output a line")
    add_model(parser, dtype="auto")
    add_report(parser)
    parser.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    outputs, complaints = [], []
    for number, line in enumerate(options.file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            outputs.append(RequestOutput.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            complaints.append(f"line {number} is not an output of tinyspec: {error}")
    if not outputs:
        allowed = "; ".join(complaints) or "a file with at least one output"
        raise refuse("file", str(options.file), allowed)
    with make_engine(options, EngineConfig(reference_rows=options.reference_rows)) as engine:
        report = audit(engine, outputs)
    print(report.to_json() if options.json else report)
    for complaint in complaints:
        print(f"tinyspec: {complaint}", file=sys.stderr)
    if complaints:
        return 2
    return 0 if report else 1
