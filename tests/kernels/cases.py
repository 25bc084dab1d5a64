"""What the kernel tests share: device, dtypes, numbers.

The Triton kernels run interpreted on a CPU (``TRITON_INTERPRET=1``) and compiled where there is a
GPU. Interpreted bf16 is wrong, so bf16 needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def both(argument: str, kernel: Any, twin: Any) -> pytest.MarkDecorator:
    """A test's ``argument`` and ``dtype``: a kernel where it can run, and its twin, on the CPU."""
    found = [pytest.param(kernel, *p.values, id=f"triton-{p.id}", marks=p.marks) for p in DTYPES]
    found += [pytest.param(twin, dtype, id=f"twin-{name}") for dtype, name in NAMES.items()]
    return pytest.mark.parametrize(f"{argument}, dtype", found)


def ints(values: list[int] | Tensor) -> Tensor:
    """int32 metadata on the tests' device."""
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def sensitive(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Logits with a log-sum-exp near log(2), whose last bits show the order of additions."""
    logits = normal(rows, vocab, seed=seed) - math.log(vocab) - 0.5
    logits[:, 0] = 0.0
    return logits


def sees(length: int, window: int = 0, chunk: int = 0, device: object = "cpu") -> Tensor:
    """[length, length]: whether the row sees the key."""
    key = torch.arange(length, device=device)
    row = key[:, None]
    seen = key <= row
    if window:
        seen &= key > row - window
    if chunk:
        seen &= key // chunk == row // chunk
    return seen


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    **bounds: int,
) -> Tensor:
    """Attention of all rows of a sequence by the formula, in ``dtype``, the way transformers' eager
    attention writes it: q [L, Hq, D], k and v [L, Hkv, D] -> [L, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = product(q, k.transpose(1, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees(q.shape[1], **bounds, device=q.device), -math.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(dtype)
    return product(weights[..., : k.shape[1]], v).transpose(0, 1)


def assert_row_invariant(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every row of x alone, in every row count, at every index, beside every other."""
    alone = torch.cat([run(x[r : r + 1]) for r in range(len(x))])
    for rows in range(1, len(x) + 1):
        assert torch.equal(run(x[:rows]), alone[:rows]), rows
        assert torch.equal(run(x.roll(rows, 0)), alone.roll(rows, 0)), rows
    for fill in (0.0, 6e4, math.inf, math.nan):
        for kept in (slice(0, None, 2), slice(1, None, 2)):
            crowd = torch.full_like(x, fill)
            crowd[kept] = x[kept]
            assert torch.equal(run(crowd)[kept], alone[kept]), fill
