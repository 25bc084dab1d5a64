"""What the kernel tests share: device, dtypes, numbers.

The Triton kernels run interpreted on a CPU (``TRITON_INTERPRET=1``) and compiled where there is a
GPU. Interpreted bf16 is wrong, so bf16 needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
]


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
