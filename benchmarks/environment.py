"""What a measurement was made on: versions, device, ISA. No host names, users or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def environment(device: str = "cpu") -> dict[str, str | int | float]:
    """Versions, the CPU, and the GPU if `device` is one; flat, in the order to print."""
    found: dict[str, str | int | float] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        found[package] = _version(package)
    found |= _cpu()
    if hasattr(os, "getloadavg"):  # above the number of threads: times are upper bounds
        found["load_average"] = round(os.getloadavg()[0], 1)
    if policy := os.environ.get("OMP_WAIT_POLICY"):
        found["omp_wait_policy"] = policy
    if torch.device(device).type == "cuda":
        found |= _gpu()
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cpu() -> dict[str, str | int | float]:
    info = Path("/proc/cpuinfo")
    fields = {}
    if info.exists():
        first = info.read_text().split("\n\n")[0]
        fields = dict(re.findall(r"^([^\t:]+)\s*: (.*)$", first, re.MULTILINE))
    family = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    flags = fields.get("flags", "").split()
    config = torch.__config__.show()
    libraries = re.findall(r"(?:Math Kernel Library Version (\S+))|(?:MKL-DNN v(\S+))", config)
    return {
        "cpu": f"{fields.get('model name', platform.machine())} ({family})",
        "isa": " ".join(flag for flag in ISA_FLAGS if flag in flags),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkl": next((mkl for mkl, _ in libraries if mkl), "none"),
        "onednn": next((onednn for _, onednn in libraries if onednn), "none"),
    }


def _gpu() -> dict[str, str | int | float]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return {
        "gpu": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "cublas": _version("nvidia-cublas-cu12").replace("none", _version("nvidia-cublas")),
    }
