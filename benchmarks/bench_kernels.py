"""The kernels by themselves: on a GPU the Triton kernels, on a CPU their twins.

A kernel is checked before it is timed. GB/s counts every input read once and every output written
once; on a device that roofline.py knows, over_floor is the time over the least that it needs. On a
GPU a graph is replayed, which holds a call for each of several sets of inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import device_time, roofline
from benchmarks.kernel_cases import CUDA, cases

# The others last seconds on a CPU.
ON_CPU = (
    "decode 64 x 1024",
    "decode 1 x 1024",
    "KV write 64 rows",
    "sample 1 x 151936, greedy",
    "sample 1 x 151936, with noise",
    "linear 64 x 4096 x 4096",
    "residual and norm 64 x 4096",
    "gated 64 x 14336",
    "accept 64 x 17",
)


@pytest.mark.parametrize("name", cases(smoke=False) if CUDA else ON_CPU)
@pytest.mark.benchmark(group="kernels")
def bench_kernel(benchmark: Any, name: str, smoke: bool) -> None:
    torch.manual_seed(0)
    case = cases(smoke)[name]()
    assert case.wrong() is None
    run = device_time.prepared(case.calls)
    benchmark(run)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median / len(case.calls)
        benchmark.extra_info |= roofline.over_floor(seconds, case.work, roofline.here())
