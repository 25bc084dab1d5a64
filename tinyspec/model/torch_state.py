"""torch's settings during every pass, whatever the caller has set; the caller's come back."""

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
    """Raise DeterminismError while TunableOp is on: it chooses GEMM kernels by timing."""
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        raise DeterminismError(
            "TunableOp chooses GEMM kernels by timing; switch it off (torch.cuda.tunable.enable"
            "(False)) to use deterministic=True"
        )


# Owner, attribute and value of settings.
Settings = list[tuple[Any, str, object]]


def _pinned(device_type: str) -> Settings:
    """Settings that change bits, with their values during passes."""
    if device_type != "cuda":
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        return [(matmul, "fp32_precision", "ieee"), (torch.backends.mkldnn, "enabled", True)]
    matmul = torch.backends.cuda.matmul
    return [
        (matmul, "fp32_precision", "ieee"),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
    ]


def _apply(settings: Settings) -> None:
    """Set what is not as in ``settings``."""
    for owner, name, value in settings:
        if getattr(owner, name) != value:
            setattr(owner, name, value)


class _PinnedSettings:
    """Settings of the process for one kind of device, pinned while any thread runs a pass; when
    the last pass ends they are as before."""

    def __init__(self, device_type: str):
        self._wanted = _pinned(device_type)
        self._before: Settings = []
        self._holders = 0
        self._lock = Lock()

    def acquire(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = [(o, name, getattr(o, name)) for o, name, _ in self._wanted]
            self._holders += 1
            self.apply()

    def apply(self) -> None:
        """Set again what was changed meanwhile."""
        _apply(self._wanted)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _apply(self._before)


_settings_of = cache(_PinnedSettings)


class TorchState:
    """Eval mode, no gradients, no autocast, full-precision matmuls, for one model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._device = next(model.parameters()).device
        self._settings = _settings_of(self._device.type)
        self._thread: int | None = None
        self._trained: list[nn.Module] = []
        self.refresh_modules()

    def refresh_modules(self) -> None:
        """List the model's modules again; to walk the tree at every pass would take longer."""
        self._modules = list(self._model.modules())

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The state while the block runs. A block within a block of the same thread only sets again
        what was changed in between."""
        if self._thread == get_ident():
            self._settings.apply()
            self._evaluate()
            yield
            return
        self._settings.acquire()
        try:
            self._evaluate()
            self._thread = get_ident()
            with (
                self._on_device(),
                torch.inference_mode(),
                torch.autocast(self._device.type, enabled=False),
            ):
                yield
        finally:
            self._thread = None
            for module in self._trained:
                module.training = True
            self._trained = []
            self._settings.release()

    def _evaluate(self) -> None:
        """Set eval mode, module by module; remember the modules that were in training mode."""
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        self._trained += training
