"""Saved measurements as Markdown tables.

    python benchmarks/render.py results/*.json [--scrub]

Reads what `probe.py --json` and `pytest --benchmark-json` save; benchmarks of one group share a
table; where several files have one benchmark, a column names the file. Knows the two formats, and
measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

SHOWN_ROWS = (1, 8, 32, 128, 256)
LLM_42 = (
    "For comparison, as published and not measured here: LLM-42 (arXiv 2601.17768) reaches 0.84 to "
    "0.58 of non-deterministic throughput when all traffic is deterministic, on GPUs and with "
    "models and workloads of its own."
)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of all files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--scrub", action="store_true", help="take the host's name out of the files"
    )
    options = parser.parse_args(arguments)
    benchmarks: list[dict[str, Any]] = []
    for path in options.files:
        report = json.loads(path.read_text())
        if options.scrub and report.get("machine_info", {}).pop("node", None):
            path.write_text(json.dumps(report, indent=1) + "\n")
        if "environment" in report:
            print(probe_table(report))
        benchmarks += [{**found, "file": path.stem} for found in report.get("benchmarks", [])]
    if benchmarks:
        print(benchmark_table(benchmarks))
    return 0


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def ranges(members: Sequence[int], tried: Sequence[int]) -> str:
    """`members` of the sorted `tried`, runs of three and more as `first–last` (of those tried)."""
    places = sorted(tried.index(member) for member in members)
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    texts = []
    for run in runs:
        numbers = [str(tried[place]) for place in run]
        texts += [f"{numbers[0]}–{numbers[-1]}"] if len(run) > 2 else numbers  # noqa: RUF001 range dash
    return ", ".join(texts)


def classes_text(measured: dict[str, Any]) -> str:
    """Classes as ranges: the reference's in bold, then the others, then classes of one together.

    Left out are row counts whose results depend on the row index: they agree with no other.
    """
    reference, moved = measured["reference"], measured.get("position_dependent", ())
    tried = _tried(measured)
    classes = [[n for n in members if n not in moved] for members in measured["classes"]]
    if sorted(classes[0]) == tried:
        return f"**all: {ranges(tried, tried)}**"
    texts, singles = [], []
    for members in sorted(filter(None, classes), key=lambda some: (reference not in some, some)):
        if reference in members:
            texts.append(f"**{ranges(members, tried)}**")
        elif len(members) > 1:
            texts.append(ranges(members, tried))
        else:
            singles += members
    if singles:
        texts.append(("each alone: " if len(singles) > 1 else "") + ranges(singles, tried))
    return "; ".join(texts)


def _tried(measured: dict[str, Any]) -> list[int]:
    return sorted(n for members in measured["classes"] for n in members)


def _moved(measured: dict[str, Any]) -> str:
    return ranges(measured.get("position_dependent", ()), _tried(measured)) or "none"


def probe_table(report: dict[str, Any]) -> str:
    """All tables of a saved probe."""
    model = report["model"]
    title = f"### {model['name']}, {model['layers']} layers, {model['dtype']}"
    notes = f"Weights: {model['weights']}; reference {model['reference']} rows (bold)"
    notes += "; split-K off." if model["split_k"] == "off" else "."
    settings = "; ".join(f"{key} {value}" for key, value in report["environment"].items())
    parts = [title, settings + ".", notes]
    if passes := _passes(report):
        shown = [n for n in SHOWN_ROWS if str(n) in passes[0][-1]["ms"]]
        header = ["rows through", "by", "row counts that agree bit for bit"]
        header += [
            "index matters at",
            "differ at 1 row",
            f"ms at {' / '.join(map(str, shown))} rows",
        ]
        parts.append(table(header, [_pass_row(name, way, m, shown) for name, way, m in passes]))
    if "elementwise" in report:
        parts.append(_elementwise(report["elementwise"]))
    if "attention" in report:
        header = ["attention", "what varies", "agree bit for bit", "index matters at"]
        parts.append(table(header, [_attention_row(check) for check in report["attention"]]))
    if found := report.get("agreement"):
        share = 1 - found["other_token"] / found["compared"]
        parts.append(
            f"Fact 4: from the same state, passes of 1 and of {model['reference']} rows gave the "
            f"same greedy token in {share:.2%} of {found['compared']} cases (other bits in the "
            f"logits in {found['other_bits']})."
        )
    return "\n\n".join(parts) + "\n"


def _passes(report: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    found = [
        (f"{m['name'].split('.')[-1]} {m['in']} → {m['out']}", m["way"], m)
        for m in report.get("linears", [])
    ]
    return found + (
        [("whole model", "torch", report["model_pass"])] if "model_pass" in report else []
    )


def _pass_row(name: str, way: str, measured: dict[str, Any], shown: Sequence[int]) -> list[str]:
    one = measured["differing"].get("1")
    return [
        name,
        way,
        classes_text(measured),
        _moved(measured),
        "" if one is None else f"{one} of {measured['pool']}",
        " / ".join(f"{measured['ms'][str(n)]:.3g}" for n in shown),
    ]


def _elementwise(checks: list[dict[str, Any]]) -> str:
    """One line for the ops that always agree, a table of the others."""
    widths = sorted({check["width"] for check in checks})
    verdicts: dict[str, dict[int, str]] = {}
    for check in checks:
        words = ["index"] * bool(check["position_dependent"])
        words += ["row count"] * (len(check["classes"]) > 1)
        verdicts.setdefault(check["op"], {})[check["width"]] = " and ".join(words) or "nothing"
    fine = [op for op, found in verdicts.items() if set(found.values()) == {"nothing"}]
    text = f"Depend on neither index nor row count at widths {', '.join(map(str, widths))}: "
    text += (", ".join(fine) or "none") + "."
    rows = [
        [op, *(found[width] for width in widths)]
        for op, found in verdicts.items()
        if op not in fine
    ]
    header = ["a row's result depends on, at width", *map(str, widths)]
    return text + ("\n\n" + table(header, rows) if rows else "")


def _attention_row(check: dict[str, Any]) -> list[str]:
    if "skipped" in check:
        result, moved = f"skipped: {check['skipped']}", ""
    elif "equal" in check:
        result, moved = f"{check['equal']} of {check['of']}", ""
    else:
        result, moved = classes_text(check), _moved(check)
    return [check["kernel"], check["varies"], result, moved]


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
        if all("way" in member["extra_info"] for member in members):
            parts += [f"### {group}", _way_table([member["extra_info"] for member in members])]
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
    header = ["share asked", "deterministic", "of all tokens", "throughput ratio", "tokens/s"]
    header += ["seconds (range)", "plain p50", "plain p99", "plain slowest", "drafted"]
    header += ["rolled back of drafted", "recomputed of committed", "padding of rows"]
    header += ["passes by way", "passes", "cached prompt tokens"]
    parts = []
    for sweep in sweeps:
        parts += [
            f"### {group}: {sweep['workload']}, {sweep['dtype']}",
            f"{sweep['requests']} requests; mean entropy {sweep['entropy']:.2f} nats a token; "
            f"{len(sweep['sweep'][0]['seconds'])} rounds. plain: latency over that of the same "
            "requests when none is deterministic.",
            table(header, [_share_row(entry) for entry in sweep["sweep"]]),
        ]
    return [*parts, f"### {group}: throughput over the workloads", *_share_means(sweeps)]


def _share_row(entry: dict[str, Any]) -> list[str]:
    seconds = sorted(entry["seconds"])
    latencies = (entry.get(f"{name}_ratio") for name in ("p50", "p99", "slowest"))
    return [
        f"{entry['share']} %",
        str(entry["deterministic"]),
        f"{entry['token_share']:.1%}",
        f"{entry['ratio']:.3f}",
        f"{entry['tokens_per_second']:.0f}",
        f"{median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})",
        *("" if ratio is None else f"{ratio:.3f}" for ratio in latencies),
        str(entry["drafted"]),
        f"{entry['rolled_back_share']:.2%}" if entry["drafted"] else "",
        f"{entry['recomputed_share']:.2%}",
        f"{entry['padding_share']:.1%}",
        ", ".join(f"{way} {count}" for way, count in entry["ways"].items()),
        str(entry["passes"]),
        str(entry["cached_prompt_tokens"]),
    ]


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
    return [table(header, rows), LLM_42]


def _way_table(measured: list[dict[str, Any]]) -> str:
    """A row a way and dtype: ratios by workload and their geometric mean; also that of the way."""
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    for one in measured:
        ratios.setdefault(one["way"], {})[one["dtype"], one["workload"]] = one["ratio"]
    workloads = sorted({one["workload"] for one in measured}, key=_numbers_by_value)
    rows = []
    for way, found in sorted(ratios.items()):
        for dtype in sorted({dtype for dtype, _ in found}):
            mine = [found.get((dtype, name)) for name in workloads]
            known = [ratio for ratio in mine if ratio is not None]
            cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in mine]
            rows.append([way, dtype, *cells, f"{geometric_mean(known):.3f}", ""])
        rows[-1][-1] = f"**{geometric_mean(found.values()):.3f}**"
    header = ["way", "dtype", *workloads, "geometric mean", "of the way"]
    return "Ratio: time without the way over time with it.\n\n" + table(header, rows)


def _numbers_by_value(name: str) -> list[str | int]:
    """A key to sort by: equal-4 before equal-16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
