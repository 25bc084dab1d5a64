"""What a canonical forward costs, with gradients and without, over transformers' own.

Both sides in turns in one process, on one model, with the same tokens and labels; a ratio is that
of medians. The backward of both goes to the same Parameters. ``--memory`` runs each side in a
process of its own, and compares their peaks of resident memory. Run with

    python benchmarks/bench_exact.py [--preset small] [--rounds N] [--memory] [--smoke]
        [--json FILE]

Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.presets import build
from benchmarks.render import table
from tinyspec import canonical

SHAPES = ((4, 256), (16, 128), (1, 2048))
DTYPES = ("float32", "bfloat16")
SIDES: dict[str, Callable[[Any], Any]] = {"plain": nullcontext, "exact": canonical}


def step(model: Any, forward: Callable[..., Any], ids: torch.Tensor, backward: bool) -> float:
    """Seconds of a ``forward`` of the model, and of a backward of the loss."""
    begun = time.perf_counter()
    with torch.set_grad_enabled(backward):
        loss = forward(ids, labels=ids, use_cache=False).loss
    if backward:
        loss.backward()
    taken = time.perf_counter() - begun
    model.zero_grad()
    return taken


def compared(model: Any, ids: torch.Tensor, backward: bool, rounds: int) -> dict[str, float]:
    """Median seconds of each side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with canonical(model):
        forwards = {"plain": model.forward.original, "exact": model.forward}
        for number in range(rounds + 1):
            for side, forward in forwards.items():
                taken = step(model, forward, ids, backward)
                if number:  # the first warms up, and proves what is not known yet
                    seconds[side].append(taken)
    return {side: median(each) for side, each in seconds.items()}


def peak(side: str, preset: str, dtype: str, shape: tuple[int, int]) -> None:
    """Print the bytes that this process had in memory at most."""
    model: Any = build(preset, getattr(torch, dtype), "cpu", positions=shape[1])
    ids = torch.randint(3, model.config.vocab_size, shape)
    with SIDES[side](model):
        for _ in range(2):
            step(model, model, ids, backward=True)
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main(arguments: list[str] | None = None) -> None:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory", action="store_true", help="compare peaks of memory instead")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; reports nothing")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.side:
        side, dtype, *shape = options.side
        return peak(side, options.preset, dtype, (int(shape[0]), int(shape[1])))
    shapes = SHAPES
    if options.smoke:
        options.preset, options.rounds, shapes = "tiny", 1, ((2, 16),)
    rows: list[list[Any]] = []
    for dtype in DTYPES:
        for shape in shapes:
            name = f"{shape[0]} x {shape[1]}"
            if options.memory:
                sides = [_peak_of(side, options.preset, dtype, shape) for side in SIDES]
                rows.append([dtype, name, "peak, MB", *(s / 1e6 for s in sides)])
                continue
            model: Any = build(options.preset, getattr(torch, dtype), "cpu", positions=shape[1])
            ids = torch.randint(3, model.config.vocab_size, shape)
            for backward, kind in ((True, "forward and backward, ms"), (False, "forward, ms")):
                found = compared(model, ids, backward, options.rounds)
                rows.append([dtype, name, kind, *(1e3 * s for s in found.values())])
    if options.smoke:
        return
    rows = [[*row, row[4] / row[3]] for row in rows]
    cells = [[*row[:3], f"{row[3]:.0f}", f"{row[4]:.0f}", f"{row[5]:.2f}"] for row in rows]
    print(table(["dtype", "tokens", "", *SIDES, "exact over plain"], cells))
    for kind in dict.fromkeys(row[2] for row in rows):
        ratios = [row[5] for row in rows if row[2] == kind]
        print(f"\n{kind}: {prod(ratios) ** (1 / len(ratios)):.3f} in geometric mean")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _peak_of(side: str, preset: str, dtype: str, shape: tuple[int, int]) -> float:
    given = ["--preset", preset, "--side", side, dtype, *map(str, shape)]
    command = [sys.executable, "-m", "benchmarks.bench_exact", *given]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
