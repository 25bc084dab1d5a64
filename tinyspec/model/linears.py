"""Linear layers served by the ``linear`` kernel, with the model's own weights.

The kernel is for a device whose BLAS has no usable canonical bucket: its rows do not depend on the
number of rows. Its bits differ from the BLAS's, so the fingerprint names the layers that it serves.
Knows modules, not which bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tinyspec.model.modules import children
from tinyspec.model.private_names import private_name
from tinyspec.model.quantized import is_packed
from tinyspec.model.stand_in import share
from tinyspec.model.wrappers import has_hooks

Conv1D: Any = private_name("transformers.pytorch_utils", "Conv1D")
LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# As ``nn.Linear`` and GPT-2's ``Conv1D`` call their sizes.
SIZES = ("in_features", "out_features", "nx", "nf")


class SharedLinear(nn.Module):
    """Stands in for a linear layer: the same function, parameters, hooks and names of sizes."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, module: Any):
        super().__init__()
        share(self, module)
        for name in SIZES:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))


class KernelLinear(SharedLinear):
    """A linear layer by the ``linear`` kernel; a ``Conv1D`` has its weight as [in, out]."""

    def __init__(self, module: nn.Module, linear: LinearFunction):
        super().__init__(module)
        self.transposed = isinstance(module, Conv1D)
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; every row by itself."""
        weight = self.weight.T if self.transposed else self.weight
        out = self._linear(x.reshape(-1, x.shape[-1]), weight, self.bias)
        return out.view(*x.shape[:-1], weight.shape[0])


def kernel_stand_ins(
    model: nn.Module, linear: LinearFunction, only: Collection[str] | None = None
) -> list[tuple[nn.Module, str, KernelLinear]]:
    """(parent, name, stand-in) for every plain linear layer of a dtype that the kernel takes.

    only: of these, the modules with these names (as in ``named_modules``); other names are ignored.
    """
    named = dict(model.named_modules())
    chosen = {id(module) for name, module in named.items() if only is None or name in only}
    return [
        (parent, name, KernelLinear(child, linear))
        for parent, name, child in children(model)
        if id(child) in chosen and is_plain(child) and child.weight.dtype in KERNEL_DTYPES
    ]


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear | SharedLinear]:
    """Whether a module only multiplies rows by its weight, and not by the ``linear`` kernel.

    True of ``nn.Linear``, ``Conv1D`` and their CPU stand-ins, unless the weight is packed, hooks
    are registered or ``forward`` is overridden on the module. False of other subclasses, which may
    compute anything.
    """
    shared = isinstance(module, SharedLinear) and not isinstance(module, KernelLinear)
    if not shared and type(module) not in (nn.Linear, Conv1D):
        return False
    return not (is_packed(module.weight) or has_hooks(module) or "forward" in vars(module))
