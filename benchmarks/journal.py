"""Results that are kept as they come: one JSON object a line, whole lines only.

    python -m benchmarks.journal FILE         # as tables, beside benchmarks/predictions.json

Who writes them knows until when it has time. Knows neither torch nor what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.render import table

ROOT = Path(__file__).resolve().parents[1]
PREDICTIONS = Path(__file__).with_name("predictions.json")
ERROR_CHARACTERS = 1500
# Columns that every line has.
OWN = ("section", "case", "at")


class Journal:
    """Appends lines to a file; several processes may, in turns.

    deadline: seconds since the epoch after which nothing is begun. failed: whether anything did, or
    was wrong. Paths of this checkout and of the interpreter are written as "." and "PYTHON".
    """

    def __init__(self, path: Path, deadline: float = float("inf")):
        self.path, self.deadline = path, deadline
        self.failed = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Journal:
        """As the options of ``add_options`` say; this process ends with the one that began it."""
        die_with_parent()
        return cls(options.journal, options.deadline)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def add(self, section: str, case: str, **found: Any) -> None:
        """One line, in one write."""
        line = {"section": section, "case": case, "at": round(time.time(), 1), **found}
        with self.path.open("ab", buffering=0) as file:
            file.write(scrubbed(json.dumps(line) + "\n").encode())

    def run(
        self, section: str, case: str, function: Callable[[], dict[str, Any]], least: float = 1.0
    ) -> None:
        """One line of what ``function`` returns, of what it raised, or that fewer than ``least``
        seconds were left."""
        if self.left() < least:
            self.add(section, case, result="no time")
            return
        began = time.perf_counter()
        try:
            found = function()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
            found = {"result": "failed", "error": text}
        self.failed |= found.get("result") in ("failed", "wrong")
        self.add(section, case, **found, took_s=round(time.perf_counter() - began, 2))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where results go and until when; of every command that a run of everything begins."""
    parser.add_argument("--journal", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), help="seconds since the epoch"
    )


def scrubbed(text: str) -> str:
    """``text`` without the paths of this machine."""
    for path, name in ((str(ROOT), "."), (sys.prefix, "PYTHON"), (sys.base_prefix, "PYTHON")):
        text = text.replace(path, name)
    return text


def die_with_parent() -> None:
    """On Linux: this process is killed when the one that began it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; a last one that was cut is left out."""
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def report(path: Path) -> str:
    """A table a section, in the order in which they began; beside what was measured what had been
    predicted."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for line in read(path):
        sections.setdefault(line["section"], []).append(line)
    known = predictions()
    parts = []
    for name, lines in sections.items():
        columns = list(dict.fromkeys(key for line in lines for key in line if key not in OWN))
        rows = []
        for line in lines:
            predicted = [p for p in known if (p["section"], p["case"]) == (name, line["case"])]
            cells = [_cell(line.get(column, "")) for column in columns]
            rows.append([line["case"], *cells, "; ".join(_verdict(line, p) for p in predicted)])
        parts += [f"### {name}", table(["case", *columns, "predicted"], rows)]
    return "\n\n".join(parts) + "\n"


def predictions() -> list[dict[str, Any]]:
    """What is expected: of a section's case a column from low to high."""
    return json.loads(PREDICTIONS.read_text())["predictions"]


def _verdict(line: dict[str, Any], predicted: dict[str, Any]) -> str:
    low, high, found = predicted["low"], predicted["high"], line.get(predicted["column"])
    verdict = "" if found is None else ": yes" if low <= found <= high else ": no"
    return f"{predicted['column']} {low} to {high}{verdict}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (dict, list)):
        return f"({len(value)} entries)"
    return str(value).replace("|", "/").replace("\n", " ")[:200]


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal")
    parser.add_argument("file", type=Path)
    print(report(parser.parse_args(arguments).file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
