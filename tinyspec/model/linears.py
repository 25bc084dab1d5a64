"""Stand-ins for a model's linears, on its own shared weights: by oneDNN, or by the linear kernel.

oneDNN is for fp32 on a CPU, where it is faster than torch's default. The operator is private (it is
what inductor emits), so it is looked for and compared before use; where it is missing or disagrees,
linears stay as they are. In bf16 on a CPU with AMX the product is turned round, weight by rows: the
bits of a row then hardly depend on how many there are, while torch's default cuts its sums by their
number. Where both are found alike, the quicker serves. In a pass that need not be canonical torch's
default is used where it is quicker: in fp32 on an Intel CPU for few rows (MKL), in bf16 for many.
The kernel is for a device whose BLAS has no usable canonical bucket: its rows do not depend on the
number of rows.

Either has bits of its own: which linears it serves is part of the fingerprint. Knows modules, and
nothing of which bucket is canonical.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinyspec.model.quantized import is_packed
from tinyspec.model.wrappers import has_hooks

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Where MKL is quicker on an Intel CPU (two cores, AMX), by elements of the weight: 42 linears of
# 131,000 to 721,000 took 1.5, 2.1, 2.6 and 3.2 ms at 1, 4, 8, 12 rows, by oneDNN 2.3, 3.7, 4.0 and
# 4.5, and from 16 rows on the same; of 2 million and more only 1 or 2 rows were quicker by MKL.
MKL_ROWS, FEW_MKL_ROWS = 12, 2
MKL_ELEMENTS = 1 << 16, 1 << 20
# Where the turned product is quicker in bf16 with AMX, as torch's default packs the weight anew in
# every call: 43 linears of 131,000 to 4 million took 2.7, 2.9, 2.7, 2.8 and 3.1 ms at 1, 4, 8, 16,
# 24 rows, turned 2.2, 2.5, 2.6, 2.8 and 3.4; a whole model of them gained 13, 9, 8, 5 and 1 %.
TRANSPOSED_ROWS = 16
# From so many elements on oneDNN turns a matrix more quickly: 1408 by 64, 512 by 512, 8192 by 64
# and 1408 by 512 took torch 44, 123, 306 and 453 us, by oneDNN 60, 100, 163 and 237.
REORDERED_ELEMENTS = 1 << 18


@dataclass
class FastMode:
    """Whether the pass that runs may go by whatever is quickest: a canonical one may not."""

    on: bool = False


@cache
def cpu_has(name: str) -> bool:
    """Whether the system says ``name`` of this CPU: a maker's or an instruction set's."""
    info = Path("/proc/cpuinfo")
    return info.exists() and name in info.read_text()


def _mkl_rows(elements: int) -> int:
    """Rows up to which MKL is quicker for an fp32 weight."""
    mkl = cpu_has("GenuineIntel") and torch.backends.mkl.is_available()
    if not mkl or elements < MKL_ELEMENTS[0]:
        return 0
    return MKL_ROWS if elements <= MKL_ELEMENTS[1] else FEW_MKL_ROWS


class CpuLinear(nn.Module):
    """An ``nn.Linear`` by another way than torch's default; shares the parameters of the module
    that it stands in for.

    quick_rows: the row counts that go by torch's default in haste.
    """

    bias: Tensor | None
    quick_rows = range(0)

    def __init__(self, linear: nn.Linear, fast_mode: FastMode | None = None):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self._fast_mode = fast_mode or FastMode()
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if self._fast_mode.on and x.numel() // self.in_features in self.quick_rows:
            return self.quick(x)
        return self.steady(x)

    def hastens(self, rows: int) -> bool:
        """Whether ``rows`` rows go another way in haste."""
        return rows in self.quick_rows

    def steady(self, x: Tensor) -> Tensor:
        """The way of every canonical pass."""
        raise NotImplementedError

    def quick(self, x: Tensor) -> Tensor:
        """By torch's default."""
        return nn.functional.linear(x, self.weight, self.bias)


class OneDnnLinear(CpuLinear):
    """fp32: by oneDNN."""

    def __init__(self, linear: nn.Linear, fast_mode: FastMode | None = None):
        super().__init__(linear, fast_mode)
        self.quick_rows = range(_mkl_rows(linear.weight.numel()) + 1)

    def steady(self, x: Tensor) -> Tensor:
        """By oneDNN."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class TransposedLinear(CpuLinear):
    """bf16: by the weight times the rows as columns.

    straight: the row counts that go by rows times the weight all the same, as there it is quicker
    and was found to have the same bits.
    """

    quick_rows = range(TRANSPOSED_ROWS + 1, sys.maxsize)
    direct: Collection[int] = ()

    def hastens(self, rows: int) -> bool:
        same = rows in self.direct and self.bias is None
        return super().hastens(rows) and not same

    def steady(self, x: Tensor) -> Tensor:
        """By the turned product, or what has its bits."""
        rows = x.reshape(-1, self.in_features)
        out = self.by_rows(rows) if len(rows) in self.direct else self.by_columns(rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def by_columns(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, out], without the bias; turned back, as not all that follows takes
        columns."""
        if len(rows) == 1:
            return torch.mv(self.weight, rows[0])[None]
        return _transposed_back(torch.mm(self.weight, rows.t()))

    def by_rows(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, out], without the bias; bits as of ``by_columns`` where probed."""
        return torch.mm(rows, self.weight.t())


def _transposed_back(x: Tensor) -> Tensor:
    """[out, R] as [R, out], contiguous.

    oneDNN also flushes subnormal numbers to zero, as its own product has done already.
    """
    if x.numel() < REORDERED_ELEMENTS or not torch.backends.mkldnn.enabled:
        return x.t().contiguous()
    return x.to_mkldnn().transpose(0, 1).to_dense()


def _works() -> bool:
    """Whether the operator is there and agrees with ``F.linear``."""
    x, weight, bias = torch.ones(4, 64), torch.linspace(-1, 1, 64 * 8).view(8, 64), torch.ones(8)
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias), atol=1e-4)


def cpu_stand_ins(
    model: nn.Module, fast_mode: FastMode | None = None
) -> list[tuple[nn.Module, str, CpuLinear]]:
    """(parent, name, stand-in) for every plain ``nn.Linear`` of ``model`` on a CPU that has one."""
    kinds: dict[torch.dtype, type[CpuLinear]] = {}
    with torch.inference_mode():
        if _works():
            kinds[torch.float32] = OneDnnLinear
    if cpu_has("amx_bf16") and torch.backends.mkldnn.is_available():
        kinds[torch.bfloat16] = TransposedLinear
    return [
        (parent, name, kinds[child.weight.dtype](child, fast_mode))
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child) and type(child) is nn.Linear
        if child.weight.device.type == "cpu" and child.weight.dtype in kinds
    ]


class KernelLinear(nn.Module):
    """A linear layer by the ``linear`` kernel; shares the parameters of the module it stands for.

    Sizes go by the names that the module has for them: ``in_features`` and ``out_features``, or
    ``nx`` and ``nf`` of a ``Conv1D``, whose weight lies as [in, out].
    """

    bias: Tensor | None

    def __init__(self, module: nn.Linear | CpuLinear | Conv1D, linear: LinearFunction):
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


def kernel_stand_ins(
    model: nn.Module, linear: LinearFunction, only: Collection[str] | None = None
) -> list[tuple[nn.Module, str, KernelLinear]]:
    """(parent, name, stand-in) for every linear of ``model`` that the ``linear`` kernel can serve.

    These are ``nn.Linear``, its stand-ins and ``Conv1D`` themselves, never a subclass, without
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


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear | CpuLinear | Conv1D]:
    """Whether all that a module does is to multiply rows by a weight of its own."""
    # A subclass may do anything in its forward.
    if type(module) not in (nn.Linear, OneDnnLinear, TransposedLinear, Conv1D):
        return False
    # A packed weight is no matrix, whatever dtype it claims.
    packed = is_packed(module.weight)
    # Hooks and a forward of its own (accelerate's) would be lost with the module.
    hooked = has_hooks(module) or "forward" in vars(module)
    return not packed and not hooked
