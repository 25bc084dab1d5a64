"""``tinyspec``: parses the command line and runs one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tinyspec.cli import audit, demo, doctor, generate
from tinyspec.errors import TinyspecError

DESCRIPTION = "Deterministic continuous batching for Hugging Face models."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for bad arguments or input)."""
    parser = argparse.ArgumentParser(prog="tinyspec", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (demo, generate, audit, doctor):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TinyspecError, OSError) as error:
        print(f"tinyspec: {error}", file=sys.stderr)
        return 2
