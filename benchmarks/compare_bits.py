"""Whether two versions of the package give the same bits: write a fixed set of requests, compare.

    python -m benchmarks.compare_bits write FILE [--threads N]
    python -m benchmarks.compare_bits compare FILE_A FILE_B [--plain-too]

`write` serves the requests of `bits_requests.py` with the package that is imported and stores, for
each, the token ids, every bit of every log-probability, and the finish reason; not the fingerprint,
which names the package's code. Write both files on one machine. `compare` exits 1 where a
deterministic request differs or is missing; plain ones count only with `--plain-too`. Knows the
files; which requests there are is decided in `bits_requests.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
SHOWN = 10
# What of the environment may differ between two files without being printed.
IGNORED = ("load_average",)
Entry = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if written, or if all that counts is equal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="serve the requests and store their bits")
    writer.add_argument("file", type=Path)
    writer.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    comparer = commands.add_parser("compare", help="compare two files")
    comparer.add_argument("files", type=Path, nargs=2, metavar="FILE")
    comparer.add_argument(
        "--plain-too", action="store_true", help="plain requests have to be equal as well"
    )
    options = parser.parse_args(arguments)
    if options.command == "write":
        return write(options.file, options.threads)
    return compare(*map(load, options.files), plain_too=options.plain_too)


def write(path: Path, threads: int) -> int:
    """Serve all requests and store the results."""
    with tempfile.TemporaryDirectory() as folder:
        # Probe results are kept under HF_HOME; those of another version must not be read, so it is
        # set before anything imports huggingface_hub.
        os.environ["HF_HOME"] = folder
        import torch
        import transformers

        from benchmarks.bits_requests import write_requests
        from benchmarks.environment import environment

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        began = time.perf_counter()
        requests, seen = write_requests()
        report = {"format": FORMAT, "environment": environment(), "seen": seen}
    lines = ",\n".join(map(json.dumps, requests))
    path.write_text(f'{json.dumps(report)[:-1]}, "requests": [\n{lines}\n]}}\n')
    deterministic = sum(entry["deterministic"] for entry in requests)
    print(
        f"{len(requests)} requests ({deterministic} deterministic) in "
        f"{time.perf_counter() - began:.0f} s; {seen}"
    )
    return 0


def load(path: Path) -> dict[str, Any]:
    """A file that ``write`` made."""
    report = json.loads(path.read_text())
    if report["format"] != FORMAT:
        raise SystemExit(f"{path} has format {report['format']}, this script reads {FORMAT}")
    return report


def compare(one: dict[str, Any], other: dict[str, Any], plain_too: bool = False) -> int:
    """Print what is equal by section, and the first differences; 1 if any of them counts."""
    before, after = one["environment"], other["environment"]
    for name in dict.fromkeys([*before, *after]):
        if name not in IGNORED and before.get(name) != after.get(name):
            print(f"environments differ: {name} {before.get(name)!r}, {after.get(name)!r}")
    pairs = list(_pairs(one["requests"], other["requests"]))
    differences: dict[bool, list[str]] = {True: [], False: []}
    print(f"{'section':<44}{'requests':>9}{'tokens =':>10}{'bits =':>8}{'finish =':>10}")
    for section in dict.fromkeys(section for section, *_ in pairs):
        members = [(a, b) for found, a, b in pairs if found == section]
        counts = [0, 0, 0]
        for a, b in members:
            known = a or b
            assert known is not None
            text, equal = _difference(a, b)
            counts = [count + same for count, same in zip(counts, equal, strict=True)]
            if text:
                differences[known["deterministic"]].append(f"{section}, {known['name']}: {text}")
        tokens, bits, finish = counts
        print(f"{section:<44}{len(members):>9}{tokens:>10}{bits:>8}{finish:>10}")
    for kind, deterministic in (("deterministic", True), ("plain", False)):
        found = differences[deterministic]
        total = sum((a or b)["deterministic"] == deterministic for _, a, b in pairs)  # type: ignore[index]
        print(f"{kind}: {total - len(found)} of {total} requests equal")
        for line in found[:SHOWN]:
            print(f"  {line}")
        if len(found) > SHOWN:
            print(f"  and {len(found) - SHOWN} more")
    empty = not any(entry["deterministic"] for entry in one["requests"])
    if empty:
        print("there is no deterministic request to compare")
    return int(empty or bool(differences[True]) or (plain_too and bool(differences[False])))


def _pairs(
    one: list[Entry], other: list[Entry]
) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """(section, entry, entry) by section and name; None where a file has no such request."""

    def by_name(entries: list[Entry]) -> dict[tuple[str, str], Entry]:
        found = {(entry["section"], entry["name"]): entry for entry in entries}
        assert len(found) == len(entries), "two requests of one name"
        return found

    mine, theirs = by_name(one), by_name(other)
    for key in dict.fromkeys([*mine, *theirs]):
        yield key[0], mine.get(key), theirs.get(key)


def _difference(a: Entry | None, b: Entry | None) -> tuple[str, tuple[bool, bool, bool]]:
    """What differs first, "" for nothing, and whether tokens, bits and finish reasons are equal."""
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'} file", (False, False, False)
    texts = []
    if a["deterministic"] != b["deterministic"]:
        texts.append("deterministic in one file only")
    for name in ("tokens", "logprobs", "others"):
        x, y = a[name], b[name]
        if x != y:
            places = [n for n, (p, q) in enumerate(zip(x, y, strict=False)) if p != q]
            if places:
                at = places[0]
                texts.append(f"{name}[{at}] {x[at]} and {y[at]} ({len(places)} of {len(x)} differ)")
            else:
                texts.append(f"{len(x)} and {len(y)} {name}")
    if a["finish"] != b["finish"]:
        texts.append(f"finish {a['finish']!r} and {b['finish']!r}")
    bits = a["logprobs"] == b["logprobs"] and a["others"] == b["others"]
    return "; ".join(texts), (a["tokens"] == b["tokens"], bits, a["finish"] == b["finish"])


if __name__ == "__main__":
    raise SystemExit(main())
