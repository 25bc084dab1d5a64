"""What the entries compile to: registers, shared memory and copies in flight, by triton's version.

``compiled.json`` holds what was found (``python -m tests.kernels.test_compile --record`` compiles
all entries, minutes, and writes it). Knows neither how entries are compiled nor what they are.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

# By "entry kernel", then target: registers, bytes of shared memory of a program, and on NVIDIA's
# the most copies that are in flight while others are waited for.
Table = dict[str, dict[str, list[int]]]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FILE = Path(__file__).with_name("compiled.json")
WHAT = "registers", "bytes of shared memory", "copies in flight"
CODED = " e4m3"  # behind the names of entries over a cache of codes


def versions() -> dict[str, Table]:
    return json.loads(FILE.read_text())


def installed() -> str:
    """Triton's version, as tables are named."""
    return ".".join(version("triton").split(".")[:2])


def key_of(entry: str, record: dict) -> str:
    return f"{entry} {record['kernel']}"


def figures(record: dict) -> list[int]:
    """A kernel's line of the table."""
    copies = [max(record["in_flight"], default=0)] if "in_flight" in record else []
    return [record["registers"], record["shared"], *copies]


def worse(table: Table, target: str, entry: str, records: list[dict]) -> list[str]:
    """Where ``records`` take 10 % more registers or shared memory than ``table`` says, or have
    fewer copies in flight."""
    found = []
    for record in records:
        before = table[key_of(entry, record)][target]
        for what, old, new in zip(WHAT, before, figures(record), strict=False):
            if new < old if what == WHAT[2] else new > old and 10 * new >= 11 * old:
                found.append(f"{record['kernel']}: {new} {what}, {old} before")
    return found


def write(table: Table) -> None:
    """The table of this version of triton, an entry a line."""
    lines = []
    for number, known in (versions() | {installed(): table}).items():
        rows = (f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(known.items()))
        lines.append(f"{json.dumps(number)}: {{\n" + ",\n".join(rows) + "\n}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
