"""``tinyspec``: parses the command line, runs one command, and says in one line what went wrong.

Commands import torch and transformers when they run, so that ``--help`` does without.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from tinyspec.cli import audit, chat, demo, diff, doctor, generate, score, trace
from tinyspec.cli.interrupts import INTERRUPTED, ignore_further
from tinyspec.cli.parser import Parser
from tinyspec.errors import TinyspecError

VERSION = "show the versions of tinyspec and of what its bits depend on"
DESCRIPTION = "Deterministic continuous batching for Hugging Face models."
COMMANDS = (demo, generate, chat, score, doctor, audit, diff, trace)
LIBRARIES = ("torch", "transformers", "triton")
# As shells report a process that a pipe which nobody reads has ended.
CLOSED_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for bad arguments or input)."""
    options = Namespace(debug=False)
    try:
        options = _parser(arguments).parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        if arguments is None:
            ignore_further()
        _say(f"interrupted{''.join(f': {what}' for what in error.args)}")
        return INTERRUPTED
    except BrokenPipeError:
        # Nor may what is left in the buffer be written when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        if options.debug:
            raise
        _say(told(error))
        return 2


def told(error: Exception) -> str:
    """What an error says, with its type where it was not raised for users to read."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, (ValueError, TinyspecError, OSError)):
        message = f"{type(error).__name__}: {message} (--debug shows the traceback)"
    return message


def _say(message: str) -> None:
    start = "\n" if sys.stderr.isatty() and message.startswith("interrupted") else ""
    print(f"{start}tinyspec: {' '.join(message.split())}", file=sys.stderr)


def _parser(arguments: Sequence[str] | None) -> Parser:
    # The version is one line, however wide the terminal.
    raw = RawDescriptionHelpFormatter
    parser = Parser(prog="tinyspec", description=DESCRIPTION, formatter_class=raw)
    wanted = "--version" in (sys.argv[1:] if arguments is None else arguments)
    parser.add_argument(
        "--version", action="version", version=_versions() if wanted else "", help=VERSION
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def _versions() -> str:
    """Of the package and of what its bits depend on, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    def found(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "(not installed)"

    python = ".".join(map(str, sys.version_info[:3]))
    others = ", ".join(f"{name} {found(name)}" for name in LIBRARIES)
    return f"tinyspec {found('tinyspec')} (Python {python}, {others})"
