"""Lines of files and of standard input: text or JSON objects, with the place where each stands."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, no_name_twice

STANDARD_INPUT = "-"
JSON_LINES = (".jsonl", ".ndjson")
# What reading a line that is no output may raise.
NO_OUTPUT = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """One line that is not blank. place: where it stands, for messages."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.number}"


def read_lines(path: str) -> list[Line]:
    """Of a file, or of standard input for "-"; only line feeds end a line.

    Raises ValueError naming file and line for what is not UTF-8, OSError for what cannot be read.
    """
    if path == STANDARD_INPUT:
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        name, data = path, Path(path).read_bytes()
    lines = []
    for number, raw in enumerate(data.removeprefix(BYTE_ORDER_MARK).split(b"\n"), start=1):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number} is not UTF-8: {error.reason}") from error
        if text.strip():
            lines.append(Line(name, number, text.removesuffix("\r")))
    return lines


def are_json(path: str, lines: list[Line]) -> bool:
    """Whether lines hold JSON objects: by the name of the file, or by the first of them."""
    if Path(path).suffix in JSON_LINES:
        return True
    if not lines or not lines[0].text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(lines[0].text), dict)
    except ValueError:
        return False


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


def refuse_others(found: Collection[str], values: dict[str, Any], allowed: Collection[str]) -> None:
    """Raise ValueError for the first name of ``found`` that is not ``allowed``."""
    for name in sorted(set(found) - set(allowed)):
        close = get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise refuse(name, values[name], f"one of {', '.join(allowed)}{hint}")


def check_prompt(field: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is text, token ids or chat messages, in JSON's types."""
    if isinstance(value, str) or (isinstance(value, list) and value):
        return
    raise refuse(field, value, "text, a list of token ids, or a list of chat messages")


def read_outputs(path: str) -> tuple[list[RequestOutput], list[str]]:
    """The outputs in a file, and what is wrong with each line that is none."""
    outputs, complaints = [], []
    for line in read_lines(path):
        try:
            outputs.append(RequestOutput.from_json(line.text))
        except NO_OUTPUT as error:
            complaints.append(no_output(line.place, error))
    return outputs, complaints


def no_output(place: str, error: Exception) -> str:
    """What is wrong with a line that is no output, by what reading it raised."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return f"{place} is not an output of tinyspec: {reason}"
