"""Twin of the KV cache's codes: torch's own e4m3fn, saturating, as bytes.

A cache holds numbers in the dtype of q, k and v, or codes (uint8).
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.uint8
NAN = 0x7F
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of ``dtype`` holds it: as it is, or its codes: of 448 beyond it, NAN of NaN,
    whose sign depends on how torch gets to an element."""
    if dtype != CODES:
        return x
    codes = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(CODES)
    return codes.masked_fill_(x.isnan(), NAN)


def values(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache holds, in ``dtype``: as it is, or what its codes mean, exactly."""
    return cache if cache.dtype == dtype else cache.view(torch.float8_e4m3fn).to(dtype)
