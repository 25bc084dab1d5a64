"""The ambient state of every pass, whatever the caller has set; the caller's comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock, get_ident
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


class _Pins:
    """Settings of the process for one kind of device: as passes want them while anybody holds them,
    in whatever thread; the last one gives the caller's back."""

    def __init__(self, device_type: str):
        self._wanted = _pinned(device_type)
        self._before: list[object] = []
        self._holders = 0
        self._lock = Lock()

    def hold(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = [getattr(owner, name) for owner, name, _ in self._wanted]
            self._holders += 1
            self.set()

    def set(self) -> None:
        """Set what somebody has changed since."""
        for owner, name, value in self._wanted:
            if getattr(owner, name) != value:
                setattr(owner, name, value)

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for (owner, name, value), before in zip(self._wanted, self._before, strict=True):
                    if before != value:
                        setattr(owner, name, before)


@cache
def _pins(device_type: str) -> _Pins:
    return _Pins(device_type)


class TorchState:
    """Eval mode, no gradients, no autocast, full-precision matmuls, for one model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._device = next(model.parameters()).device
        self._pins = _pins(self._device.type)
        self._holder: int | None = None
        self._trained: list[nn.Module] = []
        self.look()

    def look(self) -> None:
        """List the model's modules anew; walking the tree at every pass would take longer."""
        self._modules = list(self._model.modules())

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The state while the block runs. Within another block of the same thread only what
        somebody has changed meanwhile is set again."""
        if self._holder == get_ident():
            self._pins.set()
            self._evaluate()
            yield
            return
        self._pins.hold()
        try:
            self._evaluate()
            self._holder = get_ident()
            with (
                self._on_device(),
                torch.inference_mode(),
                torch.autocast(self._device.type, enabled=False),
            ):
                yield
        finally:
            self._holder = None
            for module in self._trained:
                module.training = True
            self._trained = []
            self._pins.give_back()

    def _evaluate(self) -> None:
        """Eval mode, module by module; remembers whose own mode is another."""
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        self._trained += training
