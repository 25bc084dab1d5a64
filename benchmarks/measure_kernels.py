"""Ceilings of the device, then every kernel against its floor; a sweep of attention's launches.

    python -m benchmarks.measure_kernels ceilings kernels --journal FILE [--smoke]

A kernel is checked before it is timed. Appends a line a case; knows no model and no engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import journal, roofline
from benchmarks.device_time import CUDA, timed
from benchmarks.environment import environment
from benchmarks.kernel_cases import (
    ATTENTION,
    DEVICE,
    HEADS,
    SMOKE_HEADS,
    Case,
    attention_case,
    cases,
    normal,
    small,
)
from benchmarks.roofline import Device
from tinyspec.kernels import launch

CEILINGS = ("copy", "product of 8192 x 8192, bf16", "a launch in a graph")
SWEPT = ("decode 64 x 4096", "prompt 4096")


def measured(make: Callable[[], Case], device: Device | None) -> dict[str, Any]:
    """Time of a case over its floor, and over what stands beside it."""
    torch.manual_seed(0)
    case = make()
    if (wrong := case.wrong()) is not None:
        return {"result": "wrong", "error": wrong}
    found = timed(case.calls)
    line: dict[str, Any] = {"us": round(1e6 * found.seconds, 2), "by": found.by}
    line |= roofline.over_floor(found.seconds, case.work, device)
    if case.work.operations:
        line["TFLOP_per_s"] = round(case.work.operations / found.seconds / 1e12, 3)
    for name, call in case.beside.items():
        line[f"{name}_over_this"] = round(timed([call]).seconds / found.seconds, 3)
    return line


def ceilings(lines: journal.Journal, smoke: bool) -> Device | None:
    """The bandwidth of a copy, the rate of a matrix product, what a launch costs; the device with
    these rates, None for one that is not in the table."""
    nominal = roofline.here()
    size, width, many = (1 << 20, 64, 10) if smoke else (1 << 31, 8192, 1000)
    rates: dict[str, float] = {}

    def copy() -> dict[str, Any]:
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        rates["copy"] = 2 * size / timed([lambda: target.copy_(source)]).seconds
        found = {"GB_per_s": round(rates["copy"] / 1e9, 1)}
        if nominal is not None:
            found["of_nominal"] = round(rates["copy"] / nominal.bandwidth, 3)
        return found

    def product() -> dict[str, Any]:
        a, b = normal(width, width), normal(width, width)
        rates["matrix"] = 2 * width**3 / timed([lambda: a @ b]).seconds
        return {"TFLOP_per_s": round(rates["matrix"] / 1e12, 3)}

    def launches() -> dict[str, Any]:
        x = torch.zeros(16, device=DEVICE)
        in_graph = timed([partial(x.add_, 1)] * many).seconds
        return {"us": round(1e6 * in_graph, 3)}

    for name, function in zip(CEILINGS, (copy, product, launches), strict=True):
        lines.run("ceilings", name, function)
    if nominal is None or len(rates) < 2:
        return nominal
    return nominal.with_measured(rates["copy"], rates["matrix"])


def kernels(lines: journal.Journal, smoke: bool, device: Device | None) -> None:
    for name, make in cases(smoke).items():
        lines.run("kernels", name, partial(measured, make, device))


# Of an entry of the launch table, and the page size.
SWEEP = [
    {"num_stages": stages, "num_warps": warps, "page": page}
    for stages, warps, page in product((2, 3, 4, 5), (4, 8), (16, 64, 128))
]
SMOKE_SWEEP = SWEEP[::12]


def changed(changes: dict[str, int]) -> Any:
    """Attention is launched by its entry with other stages and warps."""
    of_table = launch.attention
    entry = {key: value for key, value in changes.items() if key != "page"}
    return patch.object(launch, "attention", lambda *a, **k: of_table(*a, **k)._replace(**entry))


def compiled(changes: dict[str, int]) -> None:
    """Fill triton's cache on disk: the smallest pass has the binary of all."""
    with changed(changes):
        attention_case([(1, 2)], HEADS, changes["page"]).calls[0]()


def sweep(lines: journal.Journal, smoke: bool, device: Device | None) -> None:
    """Attention with other stages, warps and pages; compiled in parallel first."""
    chosen = SMOKE_SWEEP if smoke else SWEEP
    if CUDA:
        entries = {(c["num_stages"], c["num_warps"]): c for c in chosen}
        with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
            for _ in pool.map(_compiled_or_not, entries.values()):
                pass
    for case, changes in product(SWEPT, chosen):
        spans = small(ATTENTION[case]) if smoke else ATTENTION[case]
        heads = SMOKE_HEADS if smoke else HEADS
        make = partial(attention_case, spans, heads, changes["page"])
        with changed(changes):
            lines.run("sweep", sweep_name(case, changes), partial(measured, make, device))


def sweep_name(case: str, changes: dict[str, int]) -> str:
    return f"{case}: " + ", ".join(f"{key} {value}" for key, value in changes.items())


def _compiled_or_not(changes: dict[str, int]) -> None:
    """What does not compile is reported by the sweep itself."""
    journal.die_with_parent()
    try:
        compiled(changes)
    except Exception:
        return


def small_kernels(lines: journal.Journal) -> None:
    """Every kernel once at a tiny size, checked, for the sanitizer."""
    for name, make in cases(smoke=True).items():
        lines.run("small kernels", name, partial(checked, make))


def checked(make: Callable[[], Case]) -> dict[str, Any]:
    torch.manual_seed(0)
    wrong = make().wrong()
    return {"result": "right"} if wrong is None else {"result": "wrong", "error": wrong}


def main(arguments: list[str] | None = None) -> int:
    """Measure the sections that are named, in the order of this file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="+", choices=("ceilings", "kernels", "sweep", "small"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    journal.add_options(parser)
    options = parser.parse_args(arguments)
    lines = journal.Journal.of(options)
    device = None
    if "ceilings" in options.sections:
        lines.add("environment", DEVICE, **environment(DEVICE))
    with torch.inference_mode():
        if "small" in options.sections:
            small_kernels(lines)
        if set(options.sections) & {"ceilings", "sweep"}:
            device = ceilings(lines, options.smoke)
        if "kernels" in options.sections:
            kernels(lines, options.smoke, device)
        if "sweep" in options.sections:
            sweep(lines, options.smoke, device)
    return int(lines.failed)


if __name__ == "__main__":
    raise SystemExit(main())
