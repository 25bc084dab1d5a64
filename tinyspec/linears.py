"""Stand-ins for a model's linears, on its own shared weights: by oneDNN, or by the linear kernel.

oneDNN is for fp32 on a CPU, where it is faster than torch's default. The operator is private (it is
what inductor emits), so it is looked for and compared before use; where it is missing or disagrees,
linears stay as they are. On an Intel CPU MKL, torch's default, is at home and quicker for few rows:
there a pass that need not be canonical runs those by MKL. The kernel is for a device whose BLAS has
no usable canonical bucket: its rows do not depend on the number of rows.

Either has bits of its own: which linears it serves is part of the fingerprint. Knows modules, and
nothing of which bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinyspec.packed import is_packed
from tinyspec.unwrap import has_hooks

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Where MKL is quicker on an Intel CPU (two cores, AMX), by elements of the weight: 42 linears of
# 131,000 to 721,000 took 1.5, 2.1, 2.6 and 3.2 ms at 1, 4, 8, 12 rows, by oneDNN 2.3, 3.7, 4.0 and
# 4.5, and from 16 rows on the same; of 2 million and more only 1 or 2 rows were quicker by MKL.
QUICK_ROWS, FEW_QUICK_ROWS = 12, 2
QUICK_ELEMENTS = 1 << 16, 1 << 20


@dataclass
class Haste:
    """Rows up to which linears may run by whatever is quickest: 0 in a canonical pass."""

    rows: int = 0


@cache
def intel_cpu() -> bool:
    """Whether this is a CPU by Intel."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "GenuineIntel" in info.read_text()


def _quick_rows(elements: int) -> int:
    """Rows up to which MKL is quicker for a weight."""
    if not intel_cpu() or not torch.backends.mkl.is_available() or elements < QUICK_ELEMENTS[0]:
        return 0
    return QUICK_ROWS if elements <= QUICK_ELEMENTS[1] else FEW_QUICK_ROWS


class OneDnnLinear(nn.Module):
    """An ``nn.Linear`` by oneDNN; shares the parameters of the module that it stands in for.

    quick_rows: up to so many run by torch's default while ``haste`` allows it.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, haste: Haste | None = None):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.quick_rows = 0 if haste is None else _quick_rows(linear.weight.numel())
        self._haste = haste or Haste()
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], fp32."""
        if x.shape[-2] <= self.quick_rows and x.shape[-2] <= self._haste.rows:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def _works() -> bool:
    """Whether the operator is there and agrees with ``F.linear``."""
    x, weight, bias = torch.ones(4, 64), torch.linspace(-1, 1, 64 * 8).view(8, 64), torch.ones(8)
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias), atol=1e-4)


def by_onednn(
    model: nn.Module, haste: Haste | None = None
) -> list[tuple[nn.Module, str, OneDnnLinear]]:
    """(parent, name, stand-in) for every plain fp32 ``nn.Linear`` of ``model`` on a CPU."""
    found: list[tuple[nn.Module, str, OneDnnLinear]] = []
    with torch.inference_mode():
        if not _works():
            return found
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_plain(child) and type(child) is nn.Linear:
                weight = child.weight
                if weight.device.type == "cpu" and weight.dtype == torch.float32:
                    found.append((parent, name, OneDnnLinear(child, haste)))
    return found


class KernelLinear(nn.Module):
    """A linear layer by the ``linear`` kernel; shares the parameters of the module it stands for.

    Sizes go by the names that the module has for them: ``in_features`` and ``out_features``, or
    ``nx`` and ``nf`` of a ``Conv1D``, whose weight lies as [in, out].
    """

    bias: Tensor | None

    def __init__(self, module: nn.Linear | OneDnnLinear | Conv1D, linear: LinearFunction):
        super().__init__()
        self.transposed = isinstance(module, Conv1D)
        if isinstance(module, Conv1D):
            self.nx, self.nf = module.nx, module.nf
        else:
            self.in_features, self.out_features = module.in_features, module.out_features
        self.weight = module.weight
        self.register_parameter("bias", cast("nn.Parameter | None", module.bias))
        self._linear = linear
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; every row by itself."""
        weight = self.weight.T if self.transposed else self.weight
        out = self._linear(x.reshape(-1, x.shape[-1]), weight, self.bias)
        return out.view(*x.shape[:-1], weight.shape[0])


def by_kernel(
    model: nn.Module, linear: LinearFunction, only: Collection[str] | None = None
) -> list[tuple[nn.Module, str, KernelLinear]]:
    """(parent, name, stand-in) for every linear of ``model`` that the ``linear`` kernel can serve.

    These are ``nn.Linear``, ``OneDnnLinear`` and ``Conv1D`` themselves, never a subclass, without
    hooks and with a plain weight of a dtype that the kernel takes. only: of these, the modules of
    these names (as in ``named_modules``); names of others are passed over.
    """
    chosen = None
    if only is not None:
        chosen = {id(module) for name, module in model.named_modules() if name in only}
    found: list[tuple[nn.Module, str, KernelLinear]] = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if chosen is not None and id(child) not in chosen:
                continue
            if is_plain(child) and child.weight.dtype in KERNEL_DTYPES:
                found.append((parent, name, KernelLinear(child, linear)))
    return found


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear | OneDnnLinear | Conv1D]:
    """Whether all that a module does is to multiply rows by a weight of its own."""
    # A subclass may do anything in its forward.
    if type(module) not in (nn.Linear, OneDnnLinear, Conv1D):
        return False
    # A packed weight is no matrix, whatever dtype it claims.
    packed = is_packed(module.weight)
    # Hooks and a forward of its own (accelerate's) would be lost with the module.
    hooked = has_hooks(module) or "forward" in vars(module)
    return not packed and not hooked
