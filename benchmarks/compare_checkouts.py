"""Speed of two checkouts, before and after a change: in alternating processes, medians of rounds.

    python benchmarks/compare_checkouts.py BEFORE AFTER [--rounds 7] [--quick] [--json FILE]

Suites: ``generate`` (the workloads of ``bench_generate.py`` through a patched model's ``generate``,
plain), ``share`` (those of ``bench_share.py`` with none and with all requests deterministic) and
``host`` (the checkout's own ``bench_host.py``, thread time). Every process imports the package and
``benchmarks/`` of its checkout; this file itself is run for both, so it uses only what old and new
checkouts have: the public API, ``benchmarks/presets.py`` and ``benchmarks/workloads.py``. What a
process probes it probes itself; nothing is kept on disk.

``ratio``: seconds of AFTER over seconds of BEFORE; above 1, AFTER is slower. The exit status is 1
if a workload is more than 5 % slower or the geometric mean of a suite more than 2 %. ``--quick``
takes shorter outputs and fewer requests, and runs ``host`` in the first three rounds only;
``--smoke`` takes a tiny model and shows only that it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

SUITES = ("generate", "share", "host")
DTYPES = ("float32", "bfloat16")
SHARES = (0, 100)
WORKLOAD_LIMIT, SUITE_LIMIT = 1.05, 1.02
QUICK_HOST_ROUNDS = 3
QUICK_REQUESTS = 12
# A workload is run until so many seconds are timed, but not more often than ``MOST_RUNS``.
SECONDS, MOST_RUNS = 0.5, 5
# By workload: median seconds of a process, and a digest of the tokens.
Found = dict[str, tuple[float, str]]


def main(arguments: list[str] | None = None) -> int:
    """Compare, or with ``--worker`` measure one checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", default="full")
    sizes.add_argument("--smoke", dest="size", action="store_const", const="smoke")
    parser.add_argument("--suites", default=",".join(SUITES), help="of these, separated by commas")
    parser.add_argument("--json", type=Path, help="save the seconds of every round")
    options = parser.parse_args(arguments)
    suites = options.suites.split(",")
    if not set(suites) <= set(SUITES):
        parser.error(f"--suites: {options.suites} is not of {', '.join(SUITES)}")
    sides = [options.before.resolve(), options.after.resolve()]
    rounds: list[list[Found]] = [[], []]
    for number in range(options.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.perf_counter()
            with_host = options.size == "full" or number < QUICK_HOST_ROUNDS
            asked = [suite for suite in suites if suite != "host" or with_host]
            rounds[side].append(measure(sides[side], asked, options.size))
            took = time.perf_counter() - began
            name = ("before", "after")[side]
            print(f"round {number + 1} of {options.rounds}, {name}: {took:.0f} s", file=sys.stderr)
    if options.json:
        saved = {"before": rounds[0], "after": rounds[1], "size": options.size}
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return report(*rounds)


def measure(checkout: Path, suites: list[str], size: str) -> Found:
    """One process of a checkout for ``generate`` and ``share``, and one for ``host``."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"PYTHONPATH": str(checkout), "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        settings |= {"PYTHONDONTWRITEBYTECODE": "1"}
        if workers := [suite for suite in suites if suite != "host"]:
            command = [sys.executable, str(Path(__file__).resolve())]
            command += ["--worker", str(checkout), ",".join(workers), size]
            output = run(command, checkout, settings)
            found |= json.loads(output.splitlines()[-1])
        if "host" in suites:
            saved = Path(folder) / "host.json"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-p", "no:randomly", "benchmarks/bench_host.py", "--benchmark-enable"]
            command += ["--rounds", "3" if size == "full" else "1", f"--benchmark-json={saved}"]
            command += [] if size == "smoke" else ["--full"]
            run(command, checkout, settings)
            for one in json.loads(saved.read_text())["benchmarks"]:
                found[f"host {one['param']}"] = one["stats"]["median"], ""
    return found


def run(command: list[str], checkout: Path, settings: dict[str, str]) -> str:
    """What a command prints, in the checkout. Raises RuntimeError, with its output, if it fails."""
    done = subprocess.run(
        command, cwd=checkout, env=os.environ | settings, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def report(before: list[Found], after: list[Found]) -> int:
    """Print the table, the geometric means and what exceeds the limits; whether anything does."""
    exceeded = []
    suites: dict[str, list[float]] = {}
    print("| workload | before, ms (range) | after, ms (range) | ratio | tokens |")
    print("| --- | --- | --- | --- | --- |")
    for name in before[0]:
        if name not in after[0]:
            print(f"| {name} | only before | | | |")
            continue
        sides = [[found[name] for found in side if name in found] for side in (before, after)]
        seconds = [[one for one, _ in side] for side in sides]
        ratio = median(seconds[1]) / median(seconds[0])
        tokens = {digest for side in sides for _, digest in side}
        said = ("equal" if len(tokens) == 1 else "differ") if tokens != {""} else ""
        cells = [
            f"{1e3 * median(s):.4g} ({1e3 * min(s):.4g} to {1e3 * max(s):.4g})" for s in seconds
        ]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.3f} | {said} |")
        suites.setdefault(name.split()[0], []).append(ratio)
        if ratio > WORKLOAD_LIMIT:
            exceeded.append(f"{name}: {ratio - 1:.1%} slower, more than {WORKLOAD_LIMIT - 1:.0%}")
    print("\n| suite | workloads | geometric mean | lowest | highest |")
    print("| --- | --- | --- | --- | --- |")
    for suite, ratios in suites.items():
        mean = geometric_mean(ratios)
        print(f"| {suite} | {len(ratios)} | {mean:.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
        if mean > SUITE_LIMIT:
            exceeded.append(f"{suite}: {mean - 1:.1%} slower, more than {SUITE_LIMIT - 1:.0%}")
    print("\n" + ("\n".join(exceeded) or "within the limits: 5 % a workload, 2 % a suite"))
    return 1 if exceeded else 0


def work_in(checkout: str, suites: list[str], size: str) -> None:
    """In a process of the checkout: run suites and print what was found as JSON."""
    # Not this file's folder, whose modules have the same names.
    sys.path.remove(str(Path(__file__).resolve().parent))
    import tinyspec

    assert Path(tinyspec.__file__).is_relative_to(checkout), tinyspec.__file__
    found: Found = {}
    for dtype in DTYPES:
        if "generate" in suites:
            found |= generate_suite(dtype, size)
        if "share" in suites:
            found |= share_suite(dtype, size)
    print(json.dumps(found))


def shapes_of(size: str) -> dict[str, list[tuple[int, int]]]:
    """By workload, (tokens in, tokens out) of every request, as in ``bench_generate.py``."""
    out = 40 if size == "full" else 12
    found = {f"equal-{batch}": [(64, out)] * batch for batch in (1, 4, 16, 64)}
    found["long"] = [(512, 32)] * 32 if size == "full" else [(512, 8)] * 12
    rng = random.Random(1)
    requests, longest, most = (64, 512, 256) if size == "full" else (24, 256, 64)
    found["ragged"] = [(rng.randint(8, longest), rng.randint(8, most)) for _ in range(requests)]
    if size == "smoke":
        return {name: [(8, 4)] * min(4, len(shapes)) for name, shapes in found.items()}
    return found


def generate_suite(dtype: str, size: str) -> Found:
    """Plain greedy requests through ``generate`` of a patched model."""
    import torch

    from benchmarks.presets import build
    from benchmarks.workloads import DEVICE, of_shapes
    from tinyspec import EngineConfig, patch, unpatch

    model: Any = build("tiny" if size == "smoke" else "small", getattr(torch, dtype), DEVICE).eval()
    model.generation_config.eos_token_id = None
    patch(model, EngineConfig(prefix_cache=False))
    found = {}
    for name, shapes in shapes_of(size).items():
        work = of_shapes(name, shapes, model.config.vocab_size)
        prompts, lengths = [list(prompt) for prompt in work.prompts], list(work.lengths)

        def call(prompts: Any = prompts, lengths: Any = lengths) -> list[list[int]]:
            out = model.generate(prompts, max_new_tokens=lengths, do_sample=False, pad_token_id=0)
            return out.tolist()

        found[f"generate {name} {dtype}"] = timed(call)
    unpatch(model)
    return found


def share_suite(dtype: str, size: str) -> Found:
    """Requests that arrive over time, none and all of them deterministic."""
    from benchmarks.workloads import ARRIVING, Workload, arriving, open_engine, serve

    found = {}
    smoke = size == "smoke"
    with open_engine(dtype, smoke) as engine:
        for name in ARRIVING:
            work = arriving(name, engine.model.config.vocab_size, smoke)
            if size == "quick":
                few = slice(QUICK_REQUESTS)
                lengths = tuple(max(1, length // 2) for length in work.lengths[few])
                work = Workload(name, work.prompts[few], lengths, work.arrivals[few])
            for share in SHARES:
                params = work.params(work.chosen(share))

                def call(work: Any = work, params: Any = params) -> list[list[int]]:
                    engine.release()
                    return serve(engine, work, params).tokens

                found[f"share {name} {share} % {dtype}"] = timed(call)
    return found


def timed(call: Callable[[], Any]) -> tuple[float, str]:
    """Median seconds of some calls after one that is not timed, and a digest of its result."""
    digest = hashlib.sha256(repr(call()).encode()).hexdigest()[:16]
    seconds: list[float] = []
    while sum(seconds) < SECONDS and len(seconds) < MOST_RUNS:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return median(seconds), digest


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work_in(sys.argv[2], sys.argv[3].split(","), sys.argv[4])
        raise SystemExit(0)
    raise SystemExit(main())
