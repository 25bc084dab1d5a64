"""Whether a forward can be captured as a graph: what its operators ask of the host.

A graph repeats launches with the arguments they had. So no operator may wait for what the device
has computed, nor return a shape that depends on it. Knows operators and modules, no pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MASKS = (torch.bool, torch.uint8)
_ATEN = torch.ops.aten
INDEXING = (_ATEN.index, _ATEN._unsafe_index, _ATEN.index_put_, _ATEN.index_put)


class GraphSafety(TorchDispatchMode):
    """Runs operators; ``refusal``: the first that a graph cannot hold, and the module that called
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.refusal is None and (why := _asks_the_host(func, (*args, kwargs), out)):
            self.refusal = f"{func.overloadpacket} {why}{_calling_module()}"
        return out


def _asks_the_host(func: Any, given: tuple[Any, ...], out: Any) -> str | None:
    """Why a graph cannot hold an operator, or None."""
    if torch.Tag.data_dependent_output in func.tags:
        return "reads what the device has computed"
    # Indexing has a shape that depends on data only with masks.
    indexes = func.overloadpacket in INDEXING
    if indexes and any(x.dtype in MASKS for x in _tensors(given[1])):
        return "takes or writes what a mask says"
    if torch.Tag.dynamic_output_shape in func.tags and not indexes:
        return "returns a shape that depends on what the device has computed"
    devices = {x.device for x in _tensors((given, out)) if x.dim()}
    return "copies between devices" if len(devices) > 1 else None


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _calling_module() -> str:
    """ " in X" for the innermost module that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        for owner in (frame.f_locals.get("self"), frame.f_locals.get("module")):
            if isinstance(owner, nn.Module):
                return f" in {type(owner).__name__}"
        frame = frame.f_back
    return ""
