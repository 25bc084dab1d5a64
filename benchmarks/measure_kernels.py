"""Ceilings of the device, then every kernel against its floor.

    python -m benchmarks.measure_kernels ceilings kernels --journal FILE [--smoke]

A kernel is checked before it is timed. Appends a line a case; knows no model and no engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import journal, roofline
from benchmarks.device_time import timed
from benchmarks.environment import environment
from benchmarks.kernel_cases import (
    DEVICE,
    Case,
    cases,
    normal,
)
from benchmarks.roofline import Device

CEILINGS = ("copy", "product of 8192 x 8192, bf16", "a launch in a graph")


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
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE).view(torch.int32)
        target = torch.empty_like(source)
        # By a kernel: a copy node of a graph reaches 0.6 of what kernels do on an H200.
        run = partial(torch.bitwise_not, source, out=target)
        rates["copy"] = 2 * size / timed([run]).seconds
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
    parser.add_argument("sections", nargs="+", choices=("ceilings", "kernels", "small"))
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
        if "ceilings" in options.sections:
            device = ceilings(lines, options.smoke)
        if "kernels" in options.sections:
            kernels(lines, options.smoke, device)
    return int(lines.failed)


if __name__ == "__main__":
    raise SystemExit(main())
