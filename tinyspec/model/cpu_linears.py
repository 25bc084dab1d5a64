"""Linear layers on a CPU: one operator for every pass, oneDNN's on prepacked weights.

Its rows agree bit for bit from 2 rows on in fp32, and in bf16 at all row counts but with AMX, where
those beyond 32 do not: there ``transposed`` may keep the bits, and else tiles of rows do. A weight
that is not prepacked has the same bits, so memory decides none.

Small weights in fp32, of which oneDNN's overhead is the larger part, run torch's default, in
canonical passes of LEAST_ROWS or more. In plain passes they do at any number of rows, and so does
every weight in fp32 for few rows, where that is faster (``few_rows``). What oneDNN does not serve
here (fp16, machines without its instructions) stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import product
from tinyspec.model.linears import SharedLinear, is_plain
from tinyspec.model.one_dnn import PrepackedWeights, one_dnn, prepacked, serves
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import without_modes

# In fp32: on one thread of an EPYC with AVX2 128 by 128 took torch's default 7, 13, 16 and 36 us at
# 1, 8, 16 and 64 rows, oneDNN 34, 41, 44 and 62; 256 by 256 14, 31, 37 and 105, oneDNN 45, 52, 55
# and 134; 512 by 8 5, 9, 10 and 15, oneDNN 24, 40, 36 and 33.
SMALL_ELEMENTS = 1 << 17
# From so many rows on all of torch's default agree. Fewer are filled up: 16 take less than 4 by
# oneDNN, whose sums are others from 256 inputs on.
LEAST_ROWS = 16
# Row counts of plain passes at which torch's default may be faster, the most first: 43 linears on
# two threads of a Xeon took it 2.3, 4.9 and 7.6 ms at 1, 4 and 8 rows, oneDNN 5.0, 5.8 and 8.3; of
# an EPYC, where MKL is slower, 7.3, 17 and 23, oneDNN 14, 7 and 7.5.
FEW_ROWS = (8, 4, 2, 1)
TIMED, TIMES = (1024, 512), 9


@cache
def few_rows(threads: int) -> int:
    """Rows up to which torch's default takes less time in fp32 than oneDNN does, on so many threads
    of this machine; plain passes alone go by it, of whose bits nobody is told."""

    def seconds(run: Callable[[], Tensor]) -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    with without_modes(), torch.inference_mode():
        weight = torch.ones(TIMED, dtype=torch.float32, device="cpu")
        copy = prepacked(weight)
        for rows in FEW_ROWS:
            x = weight[:rows].clone()
            ways = (lambda x=x: F.linear(x, weight)), (lambda x=x: one_dnn(x, copy))
            default, own = zip(*([seconds(way) for way in ways] for _ in range(TIMES)), strict=True)
            if min(default) < min(own):
                return rows
    return 0


def is_small(weight: Tensor) -> bool:
    """Whether torch's default multiplies by it."""
    return weight.dtype == torch.float32 and weight.numel() < SMALL_ELEMENTS


def few(rows: int, weight: Tensor) -> bool:
    """Whether plain passes multiply so many rows by torch's default, whatever the size."""
    may = rows <= FEW_ROWS[0] and weight.dtype == torch.float32
    return may and rows <= few_rows(torch.get_num_threads())


class CpuLinear(SharedLinear):
    """An ``nn.Linear`` by oneDNN."""

    in_features: int
    out_features: int
    tinyspec_context: AttentionContext

    def differs_in_plain_passes(self, rows: int) -> bool:
        """Whether plain passes compute so many rows in another way than canonical ones."""
        return rows < LEAST_ROWS if is_small(self.weight) else few(rows, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        context, weight, bias = self.tinyspec_context, self.weight, self.bias
        exact = context.canonical is not False
        if not exact and (is_small(weight) or few(x.numel() // self.in_features, weight)):
            return F.linear(x, weight, bias)
        copies = context.prepacked
        return product(lambda x: self.product(x, copies, exact), x, weight, bias)

    def product(
        self, x: Tensor, copies: PrepackedWeights | None = None, exact: bool = True
    ) -> Tensor:
        """x [..., in_features] -> [..., out_features]: what canonical passes compute, and plain
        ones if not ``exact``; copies: of weights, if any."""
        weight, bias = self.weight, self.bias
        if is_small(weight):
            rows = x.reshape(-1, self.in_features)
            if (count := len(rows)) < LEAST_ROWS:
                rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - count))
            out = F.linear(rows, weight, bias)
            return out[:count].view(*x.shape[:-1], self.out_features)
        if copies is None:
            return one_dnn(x, weight, bias)
        return copies.product(x, weight, bias, exact)

    def transposed(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], as weight times rows."""
        # ``contiguous`` transposes on one thread, ``cat`` on all.
        out = torch.cat((torch.mm(self.weight, x.reshape(-1, self.in_features).t()).t(),))
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def copy_keeps_bits(self, x: Tensor, copies: PrepackedWeights) -> bool:
        """Whether ``product`` of rows x [R, in_features] is the same by a copy of the weight."""
        return is_small(self.weight) or copies.keeps_bits(x, self.weight, self.bias)


def cpu_stand_ins(model: nn.Module, context: AttentionContext) -> dict[nn.Module, nn.Module]:
    """By module, for every plain ``nn.Linear`` on a CPU of a dtype that oneDNN serves here."""
    return {
        module: standing_in(module, CpuLinear, tinyspec_context=context)
        for module in model.modules()
        if is_plain(module) and type(module) is nn.Linear
        if module.weight.device.type == "cpu" and serves(module.weight.dtype)
    }
