"""Twin of the KV cache's codes: torch's own e4m3fn, saturating, as bytes.

A cache holds numbers in the dtype of q, k and v, or codes (uint8).
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.uint8
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of ``dtype`` holds it: as it is, or its codes, which are those of 448 beyond it
    and NaN's of NaN."""
    if dtype != CODES:
        return x
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(CODES)


def values(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache holds, in ``dtype``: as it is, or what its codes mean, exactly."""
    return cache if cache.dtype == dtype else cache.view(torch.float8_e4m3fn).to(dtype)
