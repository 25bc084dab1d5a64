"""The canary: bits of a few fixed operators, in the dtypes and widths of a model.

A digest of what products, sums, element-wise functions and attention give for inputs made from
integers, in torch's state of a pass. It is part of the fingerprint, so that an influence that no
library reports (MKL_CBWR, ONEDNN_MAX_CPU_ISA, another BLAS) shows as another fingerprint. It proves
nothing of a model: the probes do that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.determinism.environment import ambient
from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.checksum import checksum
from tinyspec.model.cpu.linears import CpuLinear
from tinyspec.model.linear_kinds import distinct_linears, linear_shape
from tinyspec.model.served_model import served_of
from tinyspec.model.torch_state import TorchState

# Kinds of linears and heads, and outputs of a linear: more would cost more and show little more.
MOST_LINEARS, MOST_OUTPUTS, MOST_HEADS = 8, 256, 2
# More than one tile of the attention twin, and a part of one.
TOKENS = 160
# Elements that every thread gets some of, up to 16 threads.
LONG = 1 << 19
# Of weights; others are packed, and multiplied in the dtype of the model.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTWISE: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.exp, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.erf, torch.reciprocal),
    *(F.silu, F.gelu, F.softplus),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.square().add(1).rsqrt(),
    lambda x: x.abs().add(1).log(),
)
REDUCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.sum(dim=-1),
    lambda x: x.square().mean(dim=-1),
    lambda x: x.softmax(dim=-1),
    lambda x: x.log_softmax(dim=-1),
    lambda x: F.rms_norm(x, x.shape[-1:]),
    lambda x: F.layer_norm(x, x.shape[-1:]),
)


@dataclass(frozen=True)
class Used:
    """What a model computes with: (dtype, in, out, class) of its linears, its heads, its KV dtype.

    The class is that of linears which a CPU runs by other operators than torch's default.
    """

    linears: tuple[tuple[torch.dtype, int, int, type[CpuLinear] | None], ...]
    heads: tuple[LayerShape, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> Used:
        """Of a served model."""
        found = set()
        for module in distinct_linears(model).values():
            inputs, outputs = linear_shape(module) or (0, 0)
            weight = getattr(module, "weight", None)
            dtype = weight.dtype if isinstance(weight, Tensor) else model.dtype
            dtype = dtype if dtype in DTYPES else model.dtype
            kind = type(module) if isinstance(module, CpuLinear) else None
            found.add((dtype, inputs, min(outputs, MOST_OUTPUTS), kind))
        linears = sorted(found, key=str)[:MOST_LINEARS]
        heads = tuple(dict.fromkeys(served_of(model).layers))[:MOST_HEADS]
        return cls(tuple(linears), heads, model.dtype)


def canary(model: PreTrainedModel, rows: int) -> str:
    """16 hexadecimal digits for a served model in passes of ``rows`` rows, the reference bucket.

    Computed once for equal models, and again when threads or what else is not pinned have changed.
    """
    kernels = served_of(model).context.kernels
    assert kernels is not None
    with TorchState(model.device)():
        return _digest(Used.of(model), rows, model.device, kernels.backend, ambient(model.device))


@cache
def _digest(
    used: Used, rows: int, device: torch.device, backend_name: str, _: tuple[object, ...]
) -> str:
    kernels = backend.load(backend_name)
    results = [
        *_linears(used, rows, device, kernels.linear),
        *_row_functions(used, rows, device),
        *_attention(used, device, kernels),
        *_long(device),
    ]
    sums = [(str(result.dtype), tuple(result.shape), checksum(result)) for result in results]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _numbers(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns] of both signs below 64, of magnitudes that change from column to column; from
    integers alone, so the same everywhere."""
    place = torch.arange(rows * columns, dtype=torch.int64, device=device)
    mixed = (place * 2654435761 >> 9) % 8191 - 4095
    column = torch.arange(columns, dtype=torch.int32, device=device)
    scale = ((column * 5 % 7 + 124) << 23).view(torch.float32)  # 1/8 to 8
    return (mixed.view(rows, columns).float() * 2.0**-9 * scale).to(dtype)


def _cancelling(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``_numbers`` whose second half in every second row takes back the first, so that rounding of
    the sums is all that is left."""
    x = _numbers(rows, columns, dtype, device)
    half = columns // 2
    x[::2, half : 2 * half] = -x[::2, :half].flip(1)
    return x


def _linears(
    used: Used, rows: int, device: torch.device, kernel: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Products by the ways that linears take: both layouts of a weight, the kernel, a CPU's own."""
    for dtype, inputs, outputs, kind in used.linears:
        x = _cancelling(rows, inputs, dtype, device)
        weight = _numbers(outputs, inputs, dtype, device) / 64
        half = inputs // 2
        weight[:, half : 2 * half] = weight[:, :half].flip(1)
        yield F.linear(x, weight)
        yield torch.mm(x, weight.t().contiguous())
        yield kernel(x, weight)
        if kind is not None:
            linear = nn.Linear(inputs, outputs, bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            yield kind(linear).product(x)


def _row_functions(used: Used, rows: int, device: torch.device) -> Iterator[Tensor]:
    for width in sorted({inputs for _, inputs, *_ in used.linears}):
        for dtype in dict.fromkeys((used.dtype, torch.float32)):
            x = _numbers(rows, width, dtype, device)
            for function in (*ELEMENTWISE, *REDUCTIONS):
                yield function(x / 8)


def _attention(used: Used, device: torch.device, kernels: backend.Kernels) -> Iterator[Tensor]:
    """A prompt, and its last row by itself."""
    for shape in used.heads:
        size = 128
        pages = -(-TOKENS // size)
        wide = shape.num_kv_heads * shape.head_dim
        cache = _numbers(pages * size, wide, used.dtype, device) / 16
        cache = cache.view(pages, size, shape.num_kv_heads, shape.head_dim)
        q = _numbers(TOKENS, shape.num_heads * shape.head_dim, used.dtype, device) / 16
        q = q.view(TOKENS, shape.num_heads, shape.head_dim)
        scores = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap}
        for first in (0, TOKENS - 1):
            metadata = AttentionMetadata.of([(first, TOKENS)], [range(pages)], size, device)
            v = cache.flip(0).contiguous()
            yield kernels.paged_attention(q[first:], cache, v, metadata, **scores)


def _long(device: torch.device) -> Iterator[Tensor]:
    """Loops that every thread has a part of, among subnormal numbers as well."""
    x = _numbers(1, LONG, torch.float32, device)[0]
    yield (x / 3).sum()
    yield x.exp()
    yield x * 2.0**-120 * 2.0**-20
