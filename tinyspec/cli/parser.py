"""The parser of the command line: one line for an error, and an example in every help."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Errors are one line on standard error, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
    notes: str = "",
) -> argparse.ArgumentParser:
    """The parser of one command: what it does in one line, an example, and further notes."""
    parts = ["example:\n" + textwrap.indent(example, "  ")]
    if notes:
        parts.insert(0, "\n".join(textwrap.wrap(notes, 79, break_on_hyphens=False)))
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="\n\n".join(parts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser
