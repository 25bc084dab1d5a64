"""The ambient state of every pass, whatever the caller has set; the caller's comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
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
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        return [(matmul, "fp32_precision", "ieee"), (torch.backends.mkldnn, "enabled", True)]
    matmul = torch.backends.cuda.matmul
    return [
        (matmul, "fp32_precision", "ieee"),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
    ]


class Ambient:
    """Eval mode, no gradients, no autocast, full-precision matmuls, for one model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._device = next(model.parameters()).device
        self._holder: int | None = None
        self.look()

    def look(self) -> None:
        """List the model's modules anew; walking the tree at every pass would take longer."""
        self._modules = list(self._model.modules())
        self._holder = None  # whose block knows nothing of new ones

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The state while the block runs; one within another of the same thread is free."""
        if self._holder == get_ident():
            yield
            return
        training = [module for module in self._modules if module.training]
        pinned = [(o, a, v, getattr(o, a)) for o, a, v in _pinned(self._device.type)]
        for module in training:
            module.training = False
        for owner, name, value, before in pinned:
            if before != value:
                setattr(owner, name, value)
        try:
            self._holder = get_ident()
            with (
                self._on_device(),
                torch.inference_mode(),
                torch.autocast(self._device.type, enabled=False),
            ):
                yield
        finally:
            self._holder = None
            for module in training:
                module.training = True
            for owner, name, value, before in pinned:
                if before != value:
                    setattr(owner, name, before)
