"""The engine's kernels: Triton on a GPU, their plain-torch twins on a CPU, one set of signatures.

Which of the two runs is decided once per engine, by ``load``. All that the package reads of the
environment is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# What cuBLAS, and torch where it calls cuBLAS, look at once and tell by no function. What only
# logs, no product depends on.
PREFIXES = ("CUBLAS", "TORCH_CUBLAS", "NVIDIA_TF32_OVERRIDE", "DISABLE_ADDMM_CUDA_LT")
LOGS = "_LOG"
# Sizes of workspaces, which torch tells since 2.13.
WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


@dataclass(frozen=True)
class Kernels:
    """One implementation of every kernel; the docstrings of the twins define what each does."""

    backend: str
    fused_kv_write: Callable[..., Any]
    paged_attention: Callable[..., Any]
    accept_truncate: Callable[..., Any]
    sample: Callable[..., Any]
    log_softmax: Callable[..., Any]
    softmax: Callable[..., Any]
    chosen_logprobs: Callable[..., Any]
    linear: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    gated: Callable[..., Any]


def interprets_triton() -> bool:
    """Whether Triton's kernels run interpreted, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def of_cublas() -> dict[str, str]:
    """What is set of the variables that cuBLAS's products may depend on."""
    found = (name for name in os.environ if name.startswith(PREFIXES) and LOGS not in name)
    return {name: os.environ[name] for name in sorted(found)}


def refusal(backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run on a device, or None."""
    if backend == "torch" and device_type != "cpu":
        return "the twins run on a CPU only"
    if backend == "triton" and device_type == "cpu" and not interprets_triton():
        return "on a CPU Triton runs interpreted only: set TRITON_INTERPRET=1 first"
    return None


def load(backend: str) -> Kernels:
    """The kernels of ``backend``: "triton" or "torch" (the twins).

    Triton is imported here and not before: TRITON_INTERPRET must be set before it is imported, and
    on a CPU it need not be installed.
    """
    assert backend in ("triton", "torch"), backend
    package = __package__ if backend == "triton" else f"{__package__}.twins"
    modules = {
        "fused_kv_write": "kv_write",
        "paged_attention": "paged_attention",
        "accept_truncate": "accept",
        **dict.fromkeys(("sample", "log_softmax", "softmax", "chosen_logprobs"), "sample"),
        "linear": "linear",
        **dict.fromkeys(("add_rms_norm", "gated"), "hidden_states"),
    }
    kernels = {
        name: getattr(import_module(f"{package}.{module}"), name)
        for name, module in modules.items()
    }
    return Kernels(backend, **kernels)
