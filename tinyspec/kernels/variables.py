"""Variables of the environment: all that the package reads of it. Knows no libraries."""

from __future__ import annotations

import os

# What cuBLAS, and torch where it calls cuBLAS, look at once and tell by no function. What only
# logs, no product depends on.
PREFIXES = ("CUBLAS", "TORCH_CUBLAS", "NVIDIA_TF32_OVERRIDE", "DISABLE_ADDMM_CUDA_LT")
LOGS = "_LOG"
# Sizes of workspaces, which torch tells since 2.13.
WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def interprets_triton() -> bool:
    """Whether Triton's kernels run interpreted, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def of_cublas() -> dict[str, str]:
    """What is set of the variables that cuBLAS's products may depend on."""
    found = (name for name in os.environ if name.startswith(PREFIXES) and LOGS not in name)
    return {name: os.environ[name] for name in sorted(found)}
