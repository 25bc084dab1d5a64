"""What of the process and the machine is in force and may change bits, by the libraries' reports.

Not what is set: a variable of the environment that nothing follows leaves it as it is. What the
libraries do not tell shows in ``canary.py``.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tinyspec.determinism import cublas
from tinyspec.determinism.fingerprint_parts import DIGEST
from tinyspec.model import openmp

_C: Any = torch._C


def device_parts(device: torch.device) -> list[str]:
    """Name, instruction set, and number of multiprocessors or threads."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        arch = getattr(found, "gcnArchName", f"sm_{found.major}{found.minor}")
        return [found.name, arch, str(found.multi_processor_count)]
    return [_cpu_name(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]


def ambient(device: torch.device) -> tuple[object, ...]:
    """What may change while the process runs and is not pinned: threads that torch asks for and
    that run, quantized engine; on a GPU libraries and workspaces."""
    found = [
        torch.get_num_threads(),
        openmp.settle(),
        _C._get_qengine(),
    ]
    if device.type == "cuda":
        found += [str(_C._get_blas_preferred_backend()), *_cublas_workspaces()]
    return tuple(found)


def environment(device: torch.device) -> dict[str, object]:
    """The parts of the fingerprint that come from process and machine, readable."""
    threads, running, engine, *blas = ambient(device)
    name, instructions, count = device_parts(device)
    gpu = {"multiprocessors": count, "blas": blas, "cublas": cublas.fixed()}
    return {
        "device": name,
        "instruction set": instructions,
        "threads": threads,
        "threads running": running,
        "quantized engine": engine,
        "build": f"{DIGEST}{_build()}",
        **(gpu if device.type == "cuda" else {}),
    }


def _cublas_workspaces() -> list[int]:
    """Bytes, where torch tells (since 2.13)."""
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    asked: list[Callable[[], int] | None] = [getattr(_C, name, None) for name in names]
    return [ask() for ask in asked if ask is not None]


@cache
def _build() -> str:
    """Digest of what torch says of its build: versions of MKL and oneDNN, compiler, flags."""
    return hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
