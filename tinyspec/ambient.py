"""The ambient state of every pass, the same whatever the caller has set; the caller's comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tinyspec.errors import DeterminismError


def refuse_tunable_op() -> None:
    """TunableOp picks GEMMs by timing, which no contract survives."""
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        raise DeterminismError(
            "TunableOp chooses GEMM kernels by timing; switch it off (torch.cuda.tunable.enable"
            "(False)) to use deterministic=True"
        )


def _pinned(device_type: str) -> list[tuple[Any, str, object]]:
    """Settings that change bits: (owner, attribute, value of every pass)."""
    if device_type != "cuda":
        return [(torch.backends.mkldnn.matmul, "fp32_precision", "ieee")]
    matmul = torch.backends.cuda.matmul
    return [
        (matmul, "fp32_precision", "ieee"),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
    ]


@contextmanager
def ambient(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no autocast, full-precision matmuls; all restored afterwards."""
    device_type = next(model.parameters()).device.type
    training = [module for module in model.modules() if module.training]
    pinned = [(o, a, v, getattr(o, a)) for o, a, v in _pinned(device_type)]
    for module in training:
        module.training = False
    for owner, name, value, before in pinned:
        if before != value:
            setattr(owner, name, value)
    try:
        with torch.inference_mode(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True
        for owner, name, value, before in pinned:
            if before != value:
                setattr(owner, name, before)
