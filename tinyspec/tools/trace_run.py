"""A saved trace, read back: its passes, the rows of each completion in them, texts of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyspec.engine.trace import (
    COMPLETIONS,
    FORMAT,
    PASSES,
    TracedPass,
    TracedWork,
    chrome_trace,
)

Lane = tuple[str, int]


@dataclass
class RunPass:
    """One pass. began, seconds: from the first pass on, and how long. rows: by kind."""

    number: int
    began: float
    seconds: float
    bucket: int
    canonical: bool
    way: str
    pages_held: int
    rows: dict[str, int]
    committed: int
    works: list[TracedWork] = field(default_factory=list)


@dataclass
class Run:
    """texts: of tokens by id; empty where the engine had no tokenizer."""

    passes: list[RunPass]
    texts: dict[int, str]

    @property
    def lanes(self) -> list[Lane]:
        """(request id, index) of each completion, in the order in which they came."""
        return list({lane_of(work): None for one in self.passes for work in one.works})

    def text(self, token: int) -> str:
        """Of one token, or its id."""
        return self.texts.get(token, "?" if token < 0 else f"#{token}")


def lane_of(work: TracedWork) -> Lane:
    """Which completion a work belongs to."""
    return work.request_id, work.index


def lane_name(lane: Lane) -> str:
    """What a completion is called."""
    return f"{lane[0]}{f' #{lane[1]}' if lane[1] else ''}"


def read(path: str | Path) -> Run:
    """The trace in a file, or on standard input for "-". Raises OSError, and ValueError for a file
    that holds none."""
    try:
        return run_of(json.loads(_text(path)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a trace that engine.trace.save wrote: {' '.join(reason.split())}"
        ) from error


def _text(path: str | Path) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def run_of(data: dict[str, Any]) -> Run:
    """Of an object of the Chrome trace format."""
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    known = data["tinyspec"]
    if known["format"] != FORMAT:
        raise ValueError(f"format {known['format']!r} instead of {FORMAT}")
    passes: dict[int, RunPass] = {}
    names = set(RunPass.__dataclass_fields__) - {"began", "works"}
    for event in _complete(data, PASSES):
        args = {name: value for name, value in event["args"].items() if name in names}
        passes[args["number"]] = RunPass(began=event["ts"] / 1e6, **args)
    for event in _complete(data, COMPLETIONS):
        args = dict(event["args"])
        passes[args.pop("pass")].works.append(TracedWork(**args))
    texts = {int(token): str(text) for token, text in known["texts"].items()}
    return Run(list(passes.values()), texts)


def run_of_passes(passes: list[TracedPass], tokenizer: Any = None) -> Run:
    """Of an engine's ``trace.passes()``."""
    return run_of(chrome_trace(passes, tokenizer))


def _complete(data: dict[str, Any], process: int) -> Iterable[dict[str, Any]]:
    return (e for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == process)
