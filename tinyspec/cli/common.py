"""What the commands share: parsers, the engine asked for, lines in, reports and errors out.

Knows no command, and imports torch when an engine is made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from tinyspec.config import EngineConfig
from tinyspec.engine.lock import in_main_thread
from tinyspec.errors import TinyspecError
from tinyspec.outputs import RequestOutput, no_name_twice

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

DTYPES = ("auto", "float32", "bfloat16", "float16")
STANDARD_INPUT = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# As shells report a process that Ctrl-C has ended.
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Errors are one line on standard error, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_command(commands: Any, command: ModuleType) -> None:
    """The parser of one command: SUMMARY, NOTES and EXAMPLE of its module, and the options that
    ``add`` adds; ``run`` runs it."""
    notes = "\n".join(textwrap.wrap(command.NOTES, 79, break_on_hyphens=False))
    parser = commands.add_parser(
        command.__name__.rpartition(".")[2],
        help=command.SUMMARY,
        description=command.SUMMARY,
        epilog=f"{notes}\n\nexample:\n{textwrap.indent(command.EXAMPLE, '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=command.run)
    command.add(parser)


def add_model(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """Options that choose the model, and where and in which dtype it runs."""
    parser.add_argument(
        "--model", metavar="NAME", help="hub name or folder (default: the bundled model)"
    )
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that print a report."""
    parser.add_argument("--reference-rows", type=int, metavar="N", help="default: CPU 32, GPU 128")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def print_report(report: Any, as_json: bool, complaints: Collection[str] = ()) -> int:
    """Print a report, and what is wrong with its input; the exit status."""
    print(report.to_json() if as_json else report)
    for complaint in complaints:
        say(complaint)
    if complaints:
        return 2
    return 0 if report else 1


def make_engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    """The engine that the options ask for; bars of what is loaded are for terminals only."""
    load_libraries()
    from transformers.utils import logging

    from tinyspec.engine.engine import Engine

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return Engine.from_pretrained(model_name(options), options.dtype, options.device, config)


def model_name(options: argparse.Namespace) -> str:
    """The model asked for; without one, that in the package."""
    from tinyspec.tools.demo import BUNDLED

    return str(BUNDLED if options.model is None else options.model)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A block that holds nothing worth saving, and in which Ctrl-C must raise no exception: code in
    C++ that runs while torch is imported ends the process with a message of its own."""
    before = signal.getsignal(signal.SIGINT)
    if not in_main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: Any) -> None:
    start = "\n" if sys.stderr.isatty() else ""
    os.write(2, f"{start}tinyspec: interrupted\n".encode())
    os._exit(INTERRUPTED)


def load_libraries() -> None:
    """Import what every engine needs."""
    with ends_at_once():
        import torch  # noqa: F401
        import transformers  # noqa: F401

        import tinyspec.engine.engine  # noqa: F401


def say(message: str) -> None:
    """One line on standard error."""
    print(f"tinyspec: {' '.join(message.split())}", file=sys.stderr)


def told(error: Exception) -> str:
    """What an error says, with its type where it was not raised for users to read."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, TinyspecError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows the traceback)"


@dataclass(frozen=True)
class Line:
    """One line that is not blank. place: file and number, for messages."""

    number: int
    place: str
    text: str


def read_lines(path: str) -> list[Line]:
    """Of a file, or of standard input for "-". Raises as ``lines_of``, and OSError for what cannot
    be read."""
    if path == STANDARD_INPUT:
        return lines_of("standard input", sys.stdin.buffer.read())
    return lines_of(path, Path(path).read_bytes())


def lines_of(name: str, data: bytes) -> list[Line]:
    """Only line feeds end a line. Raises ValueError naming file and line for what is not UTF-8."""
    lines = []
    for number, raw in enumerate(data.removeprefix(BYTE_ORDER_MARK).split(b"\n"), start=1):
        place = f"{name}, line {number}"
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8: {error.reason}") from error
        if text.strip():
            lines.append(Line(number, place, text.removesuffix("\r")))
    return lines


def json_object(line: Line, required: Collection[str]) -> dict[str, Any]:
    """The object of a line, which has the names ``required``. Raises ValueError naming the line."""
    try:
        value = json.loads(line.text, object_pairs_hook=no_name_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"{line.place} is not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{line.place}: {error}") from error
    for name in required:
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f'{line.place} is not allowed: a JSON object with a "{name}"')
    return dict(value)


def output_of_line(line: Line) -> RequestOutput:
    """The output of a line. Raises ValueError naming the line for one that is none."""
    try:
        return RequestOutput.from_json(line.text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{line.place} is not an output of tinyspec: {reason}") from error


def read_outputs(path: str) -> tuple[list[RequestOutput], list[str]]:
    """The outputs in a file, and what is wrong with each line that is none."""
    outputs, complaints = [], []
    for line in read_lines(path):
        try:
            outputs.append(output_of_line(line))
        except ValueError as error:
            complaints.append(str(error))
    return outputs, complaints
