"""Linear layers on a CPU: other operators than torch's default, on the model's own weights, and the
heap that their results come from.

fp32: oneDNN's product, which is faster, for few rows by a prepacked weight, or with its operands
swapped where the machine's has the same bits then. Where its operators are missing, layers stay as
they are.
bf16 on a CPU with AMX: the transposed product, weight times rows as columns. The bits of its rows
hardly ever depend on how many there are, while torch's default splits its sums by that number.

Both define canonical bits: the fingerprint names the classes. In passes that are not canonical
(*fast mode*) the fastest operator serves any row count: the same product with its operands swapped,
whatever bits it has, or torch's default: in fp32 for few rows on an Intel CPU and for small weights
(MKL), in bf16 for many rows and for small weights.

What a pass frees, glibc's heap keeps for the next one (``keep_freed_memory``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import product
from tinyspec.model.linears import SharedLinear, is_plain
from tinyspec.model.one_dnn import one_dnn, works
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import without_modes

# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest that every glibc accepts. Where glibc raises the threshold by itself, what it keeps at
# the top of the heap is twice that, too.
MMAP_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Serve blocks below 32 MB from the heap and keep up to 64 MB of it (of each of malloc's, of
    which threads share at most eight a core); whether glibc took that.

    False without glibc (macOS, musl), where nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(M_TRIM_THRESHOLD, 2 * MMAP_BYTES)
    )


# Where MKL is faster on an Intel CPU: up to 12 rows of a weight of which each thread's share fits
# in the cache of its core (2 MB), else up to 2. In a model of 43 linears, on one thread, 512 by 512
# took MKL 44, 51, 64, 89 and 117 us at 1, 2, 4, 8 and 12 rows, oneDNN 68, 97, 120, 127 and 151; 512
# by 1408 took MKL 117, 138, 225, 316 and 458, oneDNN 142, 227, 220, 250 and 274; alone and with two
# threads MKL 52, 52, 72, 93 and 110, oneDNN 76, 105, 103, 118 and 125.
MKL_ROWS, FEW_MKL_ROWS = 12, 2
MKL_SHARE = 1 << 19
# And on any where the weight is so small that what oneDNN does before each product takes longest:
# alone on two threads 128 by 128 took MKL 8, 11 and 14 us at 8, 32 and 56 rows, oneDNN 28, 32 and
# 34; 256 by 256 MKL 15, 28 and 40, oneDNN 39, 50 and 63; 896 by 128 MKL 29, 53 and 61, oneDNN 49,
# 74 and 86. On an EPYC with AVX-512 512 by 8 took MKL 3, 8, 11 and 17 us at 1, 16, 32 and 64 rows,
# oneDNN 16, 19, 21 and 24 (swapped 18, 23, 26 and 31), 256 by 256 MKL 29, 47, 66 and 98, oneDNN 29,
# 62, 84 and 110, 896 by 128 both the same.
SMALL_MKL_ROWS, SMALL_ELEMENTS = 64, 1 << 17
# Where oneDNN is faster with the weight as its first operand, transposing the result included, as
# its time is that of whole vectors of rows. In the same model 512 by 1408 took 250, 306, 321, 371
# and 452 us at 8, 12, 16, 24 and 32 rows, swapped 252, 274, 286, 455 and 431; 1408 by 512 took 237,
# 245, 278, 294, 434, 565 and 704 at 4, 8, 12, 16, 32, 48 and 64 rows, swapped 220, 219, 234, 239,
# 329, 458 and 601: the deeper a linear, the less there is to transpose.
VECTOR, DEEP = 16, 1024
LEAST_COLUMNS, LEAST_COLUMNS_IF_DEEP = 9, 4
MOST_COLUMNS, MOST_COLUMNS_IF_DEEP = 16, 64
# On a CPU with AVX2 alone (an EPYC, two threads) 512 by 1536 took 515, 470, 443, 533, 699 and 730
# us at 2, 4, 8, 16, 32 and 40 rows, swapped 576, 297, 307, 408, 552 and 753; 1536 by 512 took 300,
# 376, 367, 462, 652 and 611, swapped 277, 306, 286, 310, 485 and 853.
NARROW_COLUMNS = range(2, 33)
# Inputs, outputs and rows of products that are compared with swapped ones, once a process, in 0.1
# s: of several blocks of a sum, which have 256 to 512 inputs, and of a part of one.
COMPARED_SIZES = (2048, 384), (640, 97), (64, 32), (24, 10)
COMPARED_ROWS = 2, 4, 9, 16, 32
# Where the transposed product is faster in bf16 with AMX, as torch's default packs the weight in
# every call: 43 layers of 131,000 to 4 million took 2.7, 2.9, 2.7, 2.8 and 3.1 ms at 1, 4, 8, 16,
# 24 rows, transposed 2.2, 2.5, 2.6, 2.8 and 3.4; a whole model of them gained 13, 9, 8, 5 and 1 %.
# Of fewer elements it is slower: 40 layers of 49,000 took 31 to 33 us each at 1 to 8 rows,
# transposed 32 to 35; of 131,000 as long both ways.
TRANSPOSED_ROWS, TRANSPOSED_ELEMENTS = 16, 1 << 17
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
    if not torch.backends.mkl.is_available():
        return 0
    if elements < SMALL_ELEMENTS:
        return SMALL_MKL_ROWS
    if not cpu_has("GenuineIntel"):
        return 0
    return MKL_ROWS if elements <= MKL_SHARE * torch.get_num_threads() else FEW_MKL_ROWS


class CpuLinear(SharedLinear):
    """An ``nn.Linear`` with another operator than torch's default."""

    in_features: int
    out_features: int
    tinyspec_context: AttentionContext
    tinyspec_mkl_rows = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        fast = self.tinyspec_context.canonical is False
        run = self.fast_product(x.numel() // self.in_features) if fast else None
        return product(self.in_pass, x, self.weight, self.bias) if run is None else run(x)

    def fast_product(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        """What fast mode computes in the place of ``product`` for so many rows, if another."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]: what every canonical pass computes."""
        raise NotImplementedError

    def in_pass(self, x: Tensor) -> Tensor:
        """``product``, with its bits, by the fastest means of the running pass."""
        return self.product(x)

    def _with_bias(self, x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """``product`` of the rows of x as [R, in], the bias added, in x's shape."""
        out = product(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def default(self, x: Tensor) -> Tensor:
        """torch's default operator."""
        return nn.functional.linear(x, self.weight, self.bias)


class OneDnnLinear(CpuLinear):
    """fp32, by oneDNN: rows times weight, or weight times rows where that is faster and either the
    bits are the same or no bits are asked for."""

    def fast_product(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        if rows <= self.tinyspec_mkl_rows:
            return self.default
        other = self.faster_swapped(rows) and not swapping_keeps_bits(torch.get_num_threads())
        return self.product_swapped if other else None

    def faster_swapped(self, rows: int) -> bool:
        """Whether ``product_swapped`` is faster."""
        if self.in_features * self.out_features < SMALL_ELEMENTS:
            return False
        if cpu_has("avx2") and not cpu_has("avx512f"):
            return rows in NARROW_COLUMNS
        deep = self.in_features >= DEEP
        least = LEAST_COLUMNS_IF_DEEP if deep else LEAST_COLUMNS
        most = MOST_COLUMNS_IF_DEEP if deep else MOST_COLUMNS
        return least <= rows <= most and (rows <= VECTOR or rows % VECTOR == 0)

    def in_pass(self, x: Tensor) -> Tensor:
        prepacked = self.tinyspec_context.prepacked
        out = None if prepacked is None else prepacked.product(x, self.weight, self.bias)
        return self.product(x) if out is None else out

    def product(self, x: Tensor) -> Tensor:
        faster = self.faster_swapped(x.numel() // self.in_features)
        if faster and swapping_keeps_bits(torch.get_num_threads()):
            return self.product_swapped(x)
        return one_dnn(x, self.weight, self.bias)

    def product_swapped(self, x: Tensor) -> Tensor:
        """As oneDNN's product of rows and weight, with its operands swapped."""
        # ``contiguous`` transposes on one thread, ``cat`` on all: 8192 by 16 in 164 and 91 us on
        # an EPYC's two, 512 by 16 in 14 both.
        return self._with_bias(x, lambda rows: torch.cat((one_dnn(self.weight, rows).t(),)))


@cache
def swapping_keeps_bits(threads: int) -> bool:
    """Whether oneDNN's product has the same bits with its operands swapped, as far as some products
    on so many threads show: then passes of all kinds take what is faster. Whether that holds for a
    model's products its proof says."""
    generator, dtype = torch.Generator().manual_seed(0), torch.float32

    def same(inputs: int, outputs: int, rows: int) -> bool:
        sizes = (rows, inputs), (outputs, inputs)
        x, weight = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
        return torch.equal(one_dnn(x, weight), one_dnn(weight, x).t())

    with without_modes(), torch.inference_mode():
        return all(same(*size, rows) for size in COMPARED_SIZES for rows in COMPARED_ROWS)


class TransposedLinear(CpuLinear):
    """bf16, by the transposed product, weight times rows."""

    def fast_product(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        large = self.weight.numel() >= TRANSPOSED_ELEMENTS
        return None if large and rows <= TRANSPOSED_ROWS else self.default

    def product(self, x: Tensor) -> Tensor:
        return self._with_bias(x, self._weight_first)

    def _weight_first(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, out] without the bias, contiguous, as some callers need."""
        if len(rows) == 1:
            return torch.mv(self.weight, rows[0])[None]
        return _transpose(torch.mm(self.weight, rows.t()))


def _transpose(x: Tensor) -> Tensor:
    """[out, R] as [R, out], contiguous.

    oneDNN also flushes subnormal numbers to zero, as its product has done already.
    """
    if x.numel() < REORDERED_ELEMENTS or not torch.backends.mkldnn.enabled:
        return x.t().contiguous()
    return x.to_mkldnn().transpose(0, 1).to_dense()


def cpu_stand_ins(model: nn.Module, context: AttentionContext) -> dict[nn.Module, nn.Module]:
    """By module, for every plain ``nn.Linear`` on a CPU whose dtype has one."""
    kinds: dict[torch.dtype, type[CpuLinear]] = {}
    if works():
        kinds[torch.float32] = OneDnnLinear
    if cpu_has("amx_bf16") and torch.backends.mkldnn.is_available():
        kinds[torch.bfloat16] = TransposedLinear
    return {
        module: standing_in(
            module,
            kinds[module.weight.dtype],
            tinyspec_context=context,
            tinyspec_mkl_rows=_mkl_rows(module.weight.numel()),
        )
        for module in model.modules()
        if is_plain(module) and type(module) is nn.Linear
        if module.weight.device.type == "cpu" and module.weight.dtype in kinds
    }
