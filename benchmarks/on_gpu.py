"""Everything that needs a GPU, the most telling first; cut at any second, all before it is kept.

    python3 benchmarks/on_gpu.py [RESULTS] [--seconds 570] [--only STEP ...]
    python3 benchmarks/on_gpu.py --smoke      # tiny sizes on a CPU, keeps nothing

Needs torch, transformers, triton, pytest and pytest-benchmark, no network and no installed
tinyspec; pytest-xdist and compute-sanitizer are used where they are. RESULTS, by default
benchmarks/results/gpu, gets results.jsonl, to which every step appends as it measures, report.md
(the same as tables, beside benchmarks/predictions.json), log.txt and traces. Every step is a
process that knows its deadline. Exit status 1 if a step failed; one that ran out of time did
not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.journal import ROOT, Journal, report, scrubbed

LEAST_S = 5.0
# After its deadline a step may finish what it has begun, for so long.
GRACE_S = 10.0
WORKERS = 12
# What of them runs on a GPU: one round, of the long sweeps one dtype.
SUITES = {
    "bench_share": ("-k", "bfloat16"),
    "bench_host": (),
}
# Files of tests, besides the kernels', that need a GPU: all others are not imported.
OF_A_GPU = (
    *("tests/test_gpu.py", "tests/determinism/test_rows.py"),
    "tests/runner/test_token_logprobs.py",
)
INTERRUPTED, NO_TESTS = 2, 5  # exit statuses of pytest


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take at most. told: it takes the options of
    ``journal.add_options``."""

    name: str
    seconds: float
    command: tuple[str, ...]
    told: bool = True


def kernels(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.measure_kernels", *arguments)


def models(preset: str, *sections: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.measure_models", *sections, "--preset", preset)


def bits(preset: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.measure_bits", "--preset", preset, *arguments)


def first_token(preset: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.first_token", "--preset", preset, *arguments)


def tests(section: str, *arguments: str, workers: int = 0) -> tuple[str, ...]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.journal_plugin", "--section", section]
    if workers and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    return (*command, *arguments)


def sanitized(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """``command`` under compute-sanitizer, where it is installed."""
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    return (found, "--error-exitcode", "9", *command) if found else None


def gpu_steps() -> Iterator[Step]:
    """In order; the limits of all sum to more than there is time, so that none of it is unused."""
    qwen, llama = "qwen3-0.6b", "llama-3.1-8b"
    moe, hybrid = "qwen3-30b-a3b, 12 layers", "qwen3.5-9b"
    yield Step("qwen: bits", 60, bits(qwen))
    yield Step("llama: bits", 60, bits(llama))
    yield Step("moe: bits", 60, bits(moe))
    yield Step("hybrid: bits", 60, bits(hybrid))
    yield Step("ceilings, kernels", 60, kernels("ceilings", "kernels"))
    yield Step("qwen: first token", 40, first_token(qwen))
    yield Step("qwen: first token, cold", 60, first_token(qwen, "--cold"))
    yield Step("llama: steps, doctor", 80, models(llama, "steps", "doctor"))
    yield Step("qwen: steps, nano-vllm", 90, models(qwen, "steps", "nano"))
    yield Step("llama: nano-vllm", 60, models(llama, "nano"))
    yield Step("moe: steps", 60, models(moe, "steps"))
    yield Step("hybrid: steps", 60, models(hybrid, "steps"))
    yield Step("llama: reference_rows", 60, models(llama, "reference"))
    yield Step("qwen: generate, generate_batch", 60, models(qwen, "compare"))
    chosen = ("tests/kernels", "-k", "not twin", "--ignore=tests/kernels/test_compile.py")
    yield Step("tests: kernels", 90, tests("tests: kernels", *chosen, workers=WORKERS))
    yield Step("tests: gpu", 200, tests("tests: gpu", *OF_A_GPU, "-m", "gpu", workers=WORKERS))
    yield Step("qwen: doctor", 50, models(qwen, "doctor"))
    if (command := sanitized(kernels("small"))) is not None:
        yield Step("sanitizer", 60, command)
    for suite, chosen in SUITES.items():
        rounds = ("--full", "--benchmark-only", "--rounds", "1", *chosen)
        yield Step(suite, 90, tests("suites", f"benchmarks/{suite}.py", *rounds))


def smoke_steps() -> Iterator[Step]:
    """The same code at tiny sizes."""
    command = kernels("ceilings", "kernels", "small", "--smoke")
    yield Step("kernels", 120, command)
    yield Step("bits", 120, bits("tiny", "--smoke"))
    yield Step("first token", 120, first_token("tiny", "--cold", "--smoke"))
    sections = ("steps", "reference", "doctor", "compare", "nano", "--smoke")
    yield Step("models", 120, models("tiny", *sections))
    suites = sorted(f"benchmarks/{path.name}" for path in ROOT.glob("benchmarks/bench_*.py"))
    yield Step("suites", 300, tests("suites", *suites))
    chosen = ("tests/test_gpu.py", "-m", "gpu", "--collect-only")
    yield Step("tests", 120, tests("tests", *chosen))


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; print one line each, then the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, help="for all of it (570; a smoke run: 3600)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="steps by name, in this order")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (3600 if options.smoke else 570)
    deadline = time.time() + seconds
    # Outside the results, which are carried away whole.
    with tempfile.TemporaryDirectory() as cache:
        kept = ROOT / "benchmarks" / "results" / "gpu"
        out = (options.results or (Path(cache) / "out" if options.smoke else kept)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        steps = list(smoke_steps() if options.smoke else gpu_steps())
        if options.only:
            steps = [step for name in options.only for step in steps if step.name == name]
        return run_all(steps, out, Path(cache), deadline)


def run_all(steps: list[Step], out: Path, cache: Path, deadline: float) -> int:
    """Exit status 1 if any failed."""
    lines = Journal(out / "results.jsonl", deadline)
    lines.add("run", "begins", seconds=round(lines.left(), 1), environment=surroundings())
    env = variables(cache)
    failed = False
    for step in steps:
        began = time.time()
        result = run(step, out, env, lines)
        failed |= result not in ("passed", "out of time", "no time", "no tests")
        took = round(time.time() - began, 1)
        lines.add("run", step.name, result=result, seconds=took)
        print(f"{step.name:34} {result:12} {took:6} s", flush=True)
        (out / "report.md").write_text(report(lines.path))
    print("\n" + (out / "report.md").read_text())
    return int(failed)


def variables(cache: Path) -> dict[str, str]:
    """The environment of all steps: nothing is written beside results and cache."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(cache),
        "HF_HOME": str(cache / "hf"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(cache / "hypothesis"),
    }


def surroundings() -> dict[str, str]:
    """What can be said without torch, at once; versions follow with the first step."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit"]
    try:
        text = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = "none"
    return {"gpu": text.strip(), "python": sys.version.partition(" ")[0]}


def run(step: Step, out: Path, env: dict[str, str], lines: Journal) -> str:
    """How a step ended; its output goes to the log as it comes."""
    if lines.left() < LEAST_S:
        return "no time"
    limit = min(step.seconds, lines.left() - LEAST_S / 2)
    command, until = step.command, time.time() + limit
    if step.told:
        command += ("--journal", str(lines.path), "--deadline", str(until))
    with (out / "log.txt").open("a") as log:
        log.write(f"\n=== {step.name}\n")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, text=True, **pipes
        )
        assert child.stdout is not None
        reader = threading.Thread(target=copy, args=(child.stdout, log), daemon=True)
        reader.start()
        try:
            status = child.wait(min(limit + GRACE_S * step.told, max(1.0, lines.left())))
        except subprocess.TimeoutExpired:
            child.kill()
            status = None
        child.wait()
        reader.join(GRACE_S)
    # Of pytest 2 is an interruption, by its deadline or an error in what it collects.
    if status is None or (status == INTERRUPTED and "pytest" in command and time.time() > until):
        return "out of time"
    if status == NO_TESTS and "pytest" in command:
        return "no tests"
    return "passed" if status == 0 else f"failed ({status})"


def copy(source: IO[str], log: IO[str]) -> None:
    """Line by line, without the paths of this machine."""
    for line in source:
        log.write(scrubbed(line))
        log.flush()


if __name__ == "__main__":
    raise SystemExit(main())
