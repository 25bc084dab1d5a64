"""Whether anything in a model's forward turns autocast on again inside a pass, or writes to the
model's own tensors.

Passes run without autocast, and a shadow has no wrappers of it around the forwards of modules
(``model/shadow.py``); but a forward may turn it on in its own code, and so may a hook. Modules by
themselves, as other probes call them, would not show it. Knows passes, not requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from tinyspec.errors import DeterminismError
from tinyspec.model.quantized import is_packed, trace
from tinyspec.model.scratch_weights import with_weights
from tinyspec.runner.model_runner import ModelRunner


class _Watch(TorchFunctionMode):
    """Notes the first operator that runs under autocast, and the module that calls it."""

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type
        self.found: tuple[str, nn.Module | None] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.found is None and torch.is_autocast_enabled(self._device_type):
            self.found = resolve_name(func) or str(func), _calling_module()
        return func(*args, **(kwargs or {}))


def _calling_module() -> nn.Module | None:
    """The innermost module whose forward is running."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse_autocast(runner: ModelRunner, run_pass: Callable[[], None]) -> None:
    """Raise DeterminismError if an operator of ``run_pass``, which it calls, runs under autocast,
    or writes to a parameter or buffer."""
    watch = _Watch(runner.device.type)
    failed: Exception | None = None
    written: set[str] = set()

    def run() -> None:
        before = _plain_tensors(runner.model)
        run_pass()
        after = _plain_tensors(runner.model)
        written.update(n for n in before.keys() & after.keys() if after[n] != before[n])

    try:
        with runner.torch_state(), watch:
            with_weights(runner.model, {}, run)
    except Exception as error:  # of another dtype than the next operator takes
        if watch.found is None:
            raise
        failed = error
    if watch.found is not None:
        operator, module = watch.found
        names = {id(m): name for name, m in runner.model.named_modules()}
        where = names.get(id(module)) or type(module).__name__
        raise DeterminismError(
            f"{where} turns autocast on inside the model's forward ({operator} ran under it): "
            "load the model in the dtype that it is to compute in, and remove the autocast, to use "
            "deterministic=True"
        ) from failed
    refuse_written(written)


def _plain_tensors(model: nn.Module) -> dict[str, object]:
    """What changes when a parameter or buffer is written to or replaced; packed ones are moved."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (id(x), *trace(x)) for name, x in named if not is_packed(x)}


def refuse_written(names: Collection[str]) -> None:
    """Raise DeterminismError if there are tensors that passes of the model write to."""
    if names:
        raise DeterminismError(
            f"{min(names)} is written to by the model's own passes, as by observers for "
            "quantization; use model.apply(torch.ao.quantization.disable_observer), or remove the "
            "module, to use deterministic=True"
        )
