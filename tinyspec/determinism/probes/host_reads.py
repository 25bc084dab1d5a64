"""Does a forward read on the host what rows hold? Then it may branch on all of them at once.

Followed are the operators of a pass: what they make of numbers for every row of it depends on rows,
in values and shapes, and so does the memory that it is written to. Token ids, positions and lengths
are no such numbers, nor is what depends on weights alone. Sees what goes through torch's
dispatcher; reads by address are not seen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tinyspec.determinism.probe_results import Unsound
from tinyspec.model.quantized import is_packed

# What torch marks as telling the host values or a shape, and what else does: the last is what
# ``tolist`` and ``numpy`` begin with.
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
OTHERS = ("aten.is_nonzero.default", "aten.where.default", "aten.resolve_neg.default")
WHY = (
    "it reads on the host what the rows of a pass hold (a branch on a tensor, item(), tolist(), a "
    "mask as an index), so that a row may depend on the others"
)
REMEDY = "deterministic=True needs forwards without a branch or a shape that depends on rows"


@cache
def _reads(func: Any) -> bool:
    return str(func) in OTHERS or any(tag in func.tags for tag in READS)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and not is_packed(x)]


class HostReads:
    """Of one pass of ``rows`` rows. found: modules whose forward reads rows."""

    def __init__(self, rows: int):
        self.found: list[str] = []
        self._lead = (1, rows)
        self._of_rows: set[StorageWeakRef] = set()  # does not keep memory alive

    def follow(self, func: Any, given: Any, result: Any, where: str) -> None:
        """Note what an operator made of ``given`` in the module ``where``."""
        tensors = _tensors(given)
        depends = any(StorageWeakRef(x.untyped_storage()) in self._of_rows for x in tensors)
        for x in _tensors(result):
            if depends or (x.is_floating_point() and x.shape[:2] == self._lead):
                self._of_rows.add(StorageWeakRef(x.untyped_storage()))
        if depends and _reads(func) and not self._selects_alike(func, tensors):
            self.found.append(where)

    def _selects_alike(self, func: Any, tensors: list[Tensor]) -> bool:
        """Whether an index takes the same rows whatever rows hold: by number, or by a mask that
        is not made of them and takes all."""
        masks = [x for x in tensors if x.dtype in (torch.bool, torch.uint8)]
        return func is torch.ops.aten.index.Tensor and all(
            StorageWeakRef(mask.untyped_storage()) not in self._of_rows and bool(mask.all())
            for mask in masks
        )

    def unsound(self) -> list[Unsound]:
        """The first of the modules; empty if there is none."""
        names = [name or "model" for name in self.found[:1]]
        return [Unsound(name, f"{name}: {WHY}", REMEDY) for name in names]
