"""What is fixed of cuBLAS when a process starts, and may change the bits of its products."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tinyspec.kernels import backend

_C: Any = torch._C
# Of this process, a line for every part of a file that is mapped; it ends with the path.
MAPS = Path("/proc/self/maps")
LIBRARY = "libcublas"
# Major, minor and patch number, as cublasGetProperty counts them.
PARTS = range(3)


@cache
def fixed() -> dict[str, object]:
    """The versions of the libraries that are loaded, which need not be those that torch was built
    with, and the variables of the environment that they and torch look at once."""
    return {"versions": versions(), "variables": settings()}


def versions(maps: Path = MAPS, loader: Callable[[str], Any] = ctypes.CDLL) -> list[list[str]]:
    """(name, version) of every library; empty where none is loaded or the system does not tell."""
    lines = maps.read_text().splitlines() if maps.exists() else []
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines if LIBRARY in line}
    paths = sorted(path for path in mapped if path.name.startswith(LIBRARY) and path.exists())
    return sorted([path.name, _version(loader(str(path)))] for path in paths)


def _version(library: Any) -> str:
    """Of cuBLAS by parts, of cuBLASLt by its own function; neither needs a handle or a device. That
    of cuBLASLt is found in cuBLAS as well, which depends on it."""
    if (ask := getattr(library, "cublasGetProperty", None)) is not None:
        found = [ctypes.c_int(-1) for _ in PARTS]
        for part, value in zip(PARTS, found, strict=True):
            ask(part, ctypes.byref(value))
        return ".".join(str(value.value) for value in found)
    if (asked := getattr(library, "cublasLtGetVersion", None)) is not None:
        asked.restype = ctypes.c_size_t
        return str(asked())
    return ""


def settings() -> dict[str, str]:
    """What is set of the variables, but for those whose effect torch tells (``environment``)."""
    told = hasattr(_C, "_cuda_getCublasWorkspaceSize")
    left_out = backend.WORKSPACES if told else ()
    return {n: value for n, value in backend.of_cublas().items() if n not in left_out}
