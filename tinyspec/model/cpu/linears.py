"""Linear layers by other operators than torch's default, on a CPU, with the model's own weights.

fp32: oneDNN's product, which is faster. The operator is private to torch (inductor emits it), so it
is looked up and compared before use; where it is missing or disagrees, layers stay as they are.
bf16 on a CPU with AMX: the transposed product, weight times rows as columns. The bits of its rows
hardly ever depend on how many there are, while torch's default splits its sums by that number. At
row counts where a probe finds that the direct product (rows times weight) has the same bits and is
faster, it is used.

Both define canonical bits: the fingerprint names the classes. In fast mode torch's default serves
the row counts at which it is faster: few in fp32 (MKL, on an Intel CPU), many in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.linears import SharedLinear, is_plain
from tinyspec.model.modules import children

# Where MKL is faster on an Intel CPU (two cores, AMX), by elements of the weight: 42 layers of
# 131,000 to 721,000 took 1.5, 2.1, 2.6 and 3.2 ms at 1, 4, 8, 12 rows, by oneDNN 2.3, 3.7, 4.0 and
# 4.5, and from 16 rows on the same; of 2 million and more only 1 or 2 rows were faster by MKL.
MKL_ROWS, FEW_MKL_ROWS = 12, 2
MKL_ELEMENTS = 1 << 16, 1 << 20
# Where the transposed product is faster in bf16 with AMX, as torch's default packs the weight in
# every call: 43 layers of 131,000 to 4 million took 2.7, 2.9, 2.7, 2.8 and 3.1 ms at 1, 4, 8, 16,
# 24 rows, transposed 2.2, 2.5, 2.6, 2.8 and 3.4; a whole model of them gained 13, 9, 8, 5 and 1 %.
TRANSPOSED_ROWS = 16
# From so many elements on oneDNN transposes a matrix faster: 1408 by 64, 512 by 512, 8192 by 64
# and 1408 by 512 took torch 44, 123, 306 and 453 us, oneDNN 60, 100, 163 and 237.
REORDERED_ELEMENTS = 1 << 18


@cache
def cpu_has(name: str) -> bool:
    """Whether /proc/cpuinfo names this vendor or instruction set."""
    info = Path("/proc/cpuinfo")
    return info.exists() and name in info.read_text()


def _mkl_rows(elements: int) -> int:
    """Rows up to which MKL is faster for an fp32 weight."""
    mkl = cpu_has("GenuineIntel") and torch.backends.mkl.is_available()
    if not mkl or elements < MKL_ELEMENTS[0]:
        return 0
    return MKL_ROWS if elements <= MKL_ELEMENTS[1] else FEW_MKL_ROWS


class CpuLinear(SharedLinear):
    """An ``nn.Linear`` with another operator than torch's default.

    fast_rows: the row counts at which fast mode takes torch's default.
    """

    in_features: int
    out_features: int
    fast_rows = range(0)

    def __init__(self, linear: nn.Linear, fast_mode: FastMode | None = None):
        super().__init__(linear)
        self._fast_mode = fast_mode or FastMode()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if self._fast_mode.on and x.numel() // self.in_features in self.fast_rows:
            return self.default(x)
        return self.canonical(x)

    def differs_in_fast_mode(self, rows: int) -> bool:
        """Whether fast mode may change the bits of ``rows`` rows."""
        return rows in self.fast_rows

    def canonical(self, x: Tensor) -> Tensor:
        """The operator of every canonical pass."""
        raise NotImplementedError

    def default(self, x: Tensor) -> Tensor:
        """torch's default operator."""
        return nn.functional.linear(x, self.weight, self.bias)


class OneDnnLinear(CpuLinear):
    """fp32, by oneDNN."""

    def __init__(self, linear: nn.Linear, fast_mode: FastMode | None = None):
        super().__init__(linear, fast_mode)
        self.fast_rows = range(_mkl_rows(linear.weight.numel()) + 1)

    def canonical(self, x: Tensor) -> Tensor:
        """By oneDNN."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class TransposedLinear(CpuLinear):
    """bf16, by the transposed product.

    direct: the row counts at which the direct product is used instead, because it is faster and a
    probe found the same bits.
    """

    fast_rows = range(TRANSPOSED_ROWS + 1, sys.maxsize)
    direct: Collection[int] = ()

    def differs_in_fast_mode(self, rows: int) -> bool:
        # The direct product is torch's default, but for the rounding of the bias.
        same = rows in self.direct and self.bias is None
        return super().differs_in_fast_mode(rows) and not same

    def canonical(self, x: Tensor) -> Tensor:
        """By the transposed product, or the direct one where it has the same bits."""
        rows = x.reshape(-1, self.in_features)
        product = self.direct_product if len(rows) in self.direct else self.transposed_product
        out = product(rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def transposed_product(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, out] without the bias, contiguous, as some callers need."""
        if len(rows) == 1:
            return torch.mv(self.weight, rows[0])[None]
        return _transpose(torch.mm(self.weight, rows.t()))

    def direct_product(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, out] without the bias."""
        return torch.mm(rows, self.weight.t())


def _transpose(x: Tensor) -> Tensor:
    """[out, R] as [R, out], contiguous.

    oneDNN also flushes subnormal numbers to zero, as its product has done already.
    """
    if x.numel() < REORDERED_ELEMENTS or not torch.backends.mkldnn.enabled:
        return x.t().contiguous()
    return x.to_mkldnn().transpose(0, 1).to_dense()


def _works() -> bool:
    """Whether oneDNN's operator exists and agrees with ``F.linear``."""
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weight = torch.linspace(-1, 1, 64 * 8, **floats).view(8, 64)
    x, bias = torch.ones(4, 64, **floats), torch.ones(8, **floats)
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias), atol=1e-4)


def cpu_stand_ins(
    model: nn.Module, fast_mode: FastMode | None = None
) -> list[tuple[nn.Module, str, CpuLinear]]:
    """(parent, name, stand-in) for every plain ``nn.Linear`` on a CPU whose dtype has one."""
    kinds: dict[torch.dtype, type[CpuLinear]] = {}
    with torch.inference_mode():
        if _works():
            kinds[torch.float32] = OneDnnLinear
    if cpu_has("amx_bf16") and torch.backends.mkldnn.is_available():
        kinds[torch.bfloat16] = TransposedLinear
    return [
        (parent, name, kinds[child.weight.dtype](child, fast_mode))
        for parent, name, child in children(model)
        if is_plain(child) and type(child) is nn.Linear
        if child.weight.device.type == "cpu" and child.weight.dtype in kinds
    ]
