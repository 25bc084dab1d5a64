"""How many runs of the fuzzer there were, of what, and what they found: a file that is resumed.

Runs with another state of the code are counted by themselves. Knows neither models nor torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Whose code decides what a run is and what comes of it.
CODE = ("tinyspec", "tests/fuzz", "tests/support")


def add_options(parser: pytest.Parser) -> None:
    """``--tally``, ``--number`` and ``--influences``."""
    group = parser.getgroup("fuzzer")
    group.addoption("--tally", help="JSON file of the tally (default: in .pytest_cache)")
    group.addoption("--number", type=int, help="run only this run of --seed")
    group.addoption("--influences", help="only runs with one of these, separated by commas")


def code_digest() -> str:
    """Digest of all code that runs depend on."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = (path.read_bytes() for path in files)
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


class Tally:
    """The runs of one seed with one state of the code, in a file that may hold others."""

    def __init__(self, path: Path, seed: str):
        self._path = path
        self._key = f"{seed} {code_digest()}"
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._mine = self._all.setdefault(self._key, {"runs": 0, "seconds": 0.0, "findings": []})
        for name in ("influences", "counts"):
            self._mine[name] = Counter(self._mine.get(name, {}))

    @property
    def runs(self) -> int:
        """How many runs there were: the number of the next one."""
        return self._mine["runs"]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What was found: the run, how to repeat it, what differs."""
        return self._mine["findings"]

    def add(self, result: Any, command: str, seconds: float) -> None:
        """Count a run and keep the file up to date."""
        mine, draw = self._mine, result.draw
        mine["runs"] += 1
        mine["seconds"] = round(mine["seconds"] + seconds, 2)
        mine["influences"][draw.influence.name if draw.influence else "none"] += 1
        mine["counts"].update(result.counts)
        if result.findings:
            found = {"run": str(draw), "command": command, "found": result.findings[:5]}
            self.findings.append(found)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._all, indent=1, sort_keys=True) + "\n")

    def __str__(self) -> str:
        mine = self._mine
        influenced = mine["runs"] - mine["influences"]["none"]
        return (
            f"{mine['runs']} runs ({influenced} with an influence) in {mine['seconds']:.0f} s, "
            f"{dict(mine['counts'])}, {len(mine['findings'])} with findings ({self._path})"
        )
