"""What the entries compile to: registers, shared memory and copies in flight, by triton's version.

``compiled.json`` holds what was found (``python -m tests.kernels.test_compile --record`` compiles
all entries, minutes, and writes it); the table in ``tinyspec/kernels/README.md`` is made of it
(``python -m tests.kernels.compiled``). Knows neither how entries are compiled nor what they are.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from unittest import mock

import torch

from tinyspec.kernels import launch

# By "entry kernel", then target: registers, bytes of shared memory of a program, and on NVIDIA's
# the most copies that are in flight while others are waited for.
Table = dict[str, dict[str, list[int]]]
TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "gfx942": 0}
FILE = Path(__file__).with_name("compiled.json")
README = Path(launch.__file__).with_name("README.md")
BEGIN, END = "<!-- by python -m tests.kernels.compiled -->\n", "<!-- end -->\n"
WHAT = "registers", "bytes of shared memory", "copies in flight"
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)
KINDS = {"16-bit": torch.bfloat16, "fp32": torch.float32}
CODED = " e4m3"  # behind the names of entries over a cache of codes
OTHERS = (
    *("sample", "sample_merge", "linear", "add_rms_norm", "gated"),
    *("kv_write", "accept", "work", "merge"),
)


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


def readme_table() -> str:
    """Of the newest triton: attention in bf16 and fp32, over a cache of codes as well, and the most
    of the other kernels."""
    known = versions()
    newest = max(known, key=lambda number: [int(part) for part in number.split(".")])
    table = known[newest]
    names = " | ".join(TARGETS)
    lines = [f"| attention, head size (triton {newest}) | {names} |", "| --- |" + " --- |" * 4]
    for (kind, dtype), coded, dim in product(KINDS.items(), ("", CODED), HEAD_DIMS):
        row = table[f"attention {dtype} {dim} extras=False{coded} attention_kernel"]
        cells = [f"{_tile(dtype, dim, t, bool(coded))}: {_shown(row[t])}" for t in TARGETS]
        lines.append(f"| {kind}{coded}, {dim} | {' | '.join(cells)} |")
    lines += ["", f"| other kernels, at most | {names} |", "| --- |" + " --- |" * 4]
    for kernel in OTHERS:
        rows = [row for key, row in table.items() if key.endswith(f" {kernel}_kernel")]
        cells = [_shown([*map(max, zip(*(r[t] for r in rows), strict=True))]) for t in TARGETS]
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tile(dtype: torch.dtype, dim: int, target: str, codes: bool) -> str:
    is_hip, capability = target == "gfx942", TARGETS[target]
    with mock.patch.multiple(launch, capability=lambda device: capability, IS_HIP=is_hip):
        entry = launch.attention(dtype, dim, torch.device("cuda"), codes)
        stages = entry.options()["num_stages"]
    return f"{entry.block_m} x {entry.block_n}, {entry.num_warps}, {stages}"


def _shown(numbers: list[int]) -> str:
    registers, shared, *copies = numbers
    return ", ".join(map(str, (registers, -(-shared // 1024), *copies)))


def readme_parts() -> tuple[str, str, str]:
    """The README before its table, the table, and what follows."""
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table, END + after


def write_readme() -> None:
    before, _, after = readme_parts()
    README.write_text(before + readme_table() + after)


if __name__ == "__main__":
    write_readme()
