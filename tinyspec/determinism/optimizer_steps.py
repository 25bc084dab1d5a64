"""Steps of optimizers, by the memory that they write to.

torch's version counters miss those of fused optimizers (``torch.optim.AdamW(..., fused=True)``,
which transformers' Trainer takes by default). Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class OptimizerSteps:
    """``count``: steps, since this was made, of any optimizer that has one of ``tensors``, or
    another tensor of the same memory, among its parameters."""

    _all: ClassVar[WeakSet[OptimizerSteps]] = WeakSet()
    _lock: ClassVar[Lock] = Lock()
    _listening: ClassVar[bool] = False  # whether torch calls this process's hook

    def __init__(self) -> None:
        self.count = 0
        self._storages: set[int] = set()
        with self._lock:
            if not self._listening:
                OptimizerSteps._listening = True
                register_optimizer_step_post_hook(self._stepped)
            self._all.add(self)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """From now on of these ``tensors``, which must live as long as they are followed."""
        self._storages = _storages(tensors)

    @classmethod
    def _stepped(cls, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with cls._lock:
            told = list(cls._all)
        if told:
            written = _storages(p for group in optimizer.param_groups for p in group["params"])
            for steps in told:
                steps.count += not steps._storages.isdisjoint(written)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
