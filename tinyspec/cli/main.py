"""``tinyspec``: parses the command line, runs one command, and says in one line what went wrong.

Commands import torch and transformers when they run, so that ``--help`` does without.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from io import TextIOWrapper

from tinyspec.cli import batch, chat, generate, pictures, reports, serve
from tinyspec.cli.common import INTERRUPTED, Parser, say, told

VERSION = "show the versions of tinyspec and of what its bits depend on"
DESCRIPTION = "Deterministic continuous batching for Hugging Face models."
# What adds a command's options, and what runs it; its docstring is the help.
COMMANDS = {
    "demo": (pictures.add_demo, pictures.demo),
    "generate": (generate.add_generate, generate.generate),
    "batch": (batch.add_batch, batch.batch),
    "chat": (chat.add_chat, chat.chat),
    "serve": (serve.add_serve, serve.serve),
    "probe": (reports.add_probe, reports.probe),
    "score": (generate.add_score, generate.score),
    "doctor": (reports.add_doctor, reports.doctor),
    "audit": (reports.add_audit, reports.audit),
    "diff": (reports.add_diff, reports.diff),
    "trace": (pictures.add_trace, pictures.trace),
}
# As shells report a process that a pipe which nobody reads has ended.
CLOSED_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for bad arguments or input)."""
    options = Namespace(debug=False)
    if isinstance(sys.stdout, TextIOWrapper):  # no text ends a command in another encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parser(arguments).parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        if arguments is None:  # the process ends: another Ctrl-C comes too late
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        say(": ".join(["interrupted", *map(str, error.args)]))
        return INTERRUPTED
    except BrokenPipeError:
        # Nor may what is left in the buffer be written when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        if options.debug:
            raise
        say(told(error))
        return 2


def _parser(arguments: Sequence[str] | None) -> Parser:
    # The version is one line, however wide the terminal.
    raw = RawDescriptionHelpFormatter
    parser = Parser(prog="tinyspec", description=DESCRIPTION, formatter_class=raw)
    wanted = "--version" in (sys.argv[1:] if arguments is None else arguments)
    text = _versions() if wanted else ""
    parser.add_argument("--version", action="version", version=text, help=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add, run) in COMMANDS.items():
        summary, _, notes = str(getdoc(run)).partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=summary,
            epilog=notes,
            formatter_class=raw,
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=run)
        add(command)
    return parser


def _versions() -> str:
    """Of the package and of what its bits depend on, without importing them."""

    def found(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} (not installed)"

    python = ".".join(map(str, sys.version_info[:3]))
    others = ", ".join(map(found, ("torch", "transformers", "triton")))
    return f"{found('tinyspec')} (Python {python}, {others})"
