"""Saved measurements as Markdown tables.

    python benchmarks/render.py FILE ...

Reads what `pytest --benchmark-json` saves; benchmarks of one group share a table; where several
files have one benchmark, a column names the file. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of all files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    benchmarks: list[dict[str, Any]] = []
    for path in parser.parse_args(arguments).files:
        found = json.loads(path.read_text())["benchmarks"]
        benchmarks += [{**one, "file": path.stem} for one in found]
    print(benchmark_table(benchmarks))
    return 0


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def benchmark_table(benchmarks: Iterable[dict[str, Any]]) -> str:
    """One table a group: median, spread, and what the benchmark put into `extra_info`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for benchmark in benchmarks:
        groups.setdefault(benchmark["group"] or "benchmarks", []).append(benchmark)
    parts = []
    for group, members in groups.items():
        if all("sweep" in member["extra_info"] for member in members):
            parts += _share_tables(group, [member["extra_info"] for member in members])
            continue
        if len({member["name"] for member in members}) < len(members):
            members = [
                {**member, "extra_info": {"file": member["file"], **member["extra_info"]}}
                for member in members
            ]
        extra = sorted({key for member in members for key in member["extra_info"]})
        rows = [
            [
                member["name"],
                f"{1e3 * member['stats']['median']:.4g}",
                f"{1e3 * member['stats']['iqr']:.2g}",
                *(_number(member["extra_info"].get(key, "")) for key in extra),
            ]
            for member in members
        ]
        header = ["benchmark", "median ms", "iqr ms", *(key.replace("_", " ") for key in extra)]
        parts += [f"### {group}", table(header, rows)]
    return "\n\n".join(parts) + "\n"


def _share_tables(group: str, sweeps: list[dict[str, Any]]) -> list[str]:
    """A table a sweep over the deterministic share, then the geometric means over the workloads."""
    parts = []
    for sweep in sweeps:
        header = [name.replace("_", " ") for name in sweep["sweep"][0]]
        rows = [[_number(value) for value in entry.values()] for entry in sweep["sweep"]]
        about = f"{sweep['requests']} requests; mean entropy {sweep['entropy']:.2f} nats a token"
        parts += [f"### {group}: {sweep['workload']}, {sweep['dtype']}", about, table(header, rows)]
    return [*parts, f"### {group}: throughput over the workloads", *_share_means(sweeps)]


def _share_means(sweeps: list[dict[str, Any]]) -> list[str]:
    """Geometric means and minima of the throughput ratios, by dtype."""
    rows = []
    for dtype in dict.fromkeys(sweep["dtype"] for sweep in sweeps):
        mine = [sweep for sweep in sweeps if sweep["dtype"] == dtype]
        row = [dtype, ", ".join(sweep["workload"] for sweep in mine)]
        for share in (50, 100):
            ratios = [e["ratio"] for sweep in mine for e in sweep["sweep"] if e["share"] == share]
            row += [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"]
        rows.append(row)
    header = ["dtype", "over", "50 %: geometric mean", "lowest", "100 %: geometric mean", "lowest"]
    return [table(header, rows)]


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
