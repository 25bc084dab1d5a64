"""Twin of the noise: philox4x32-10 and Gumbel noise from it, in 64-bit integer torch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, ...]:
    """Four uint32 outputs (as int64) of counter (c0, c1, 0, 0) under the 64-bit ``key``."""
    c0, c1 = torch.broadcast_tensors(*counter)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [N, vocab_size] fp32; entry (n, v) depends on (keys[n], positions[n], v) alone.

    u = ((x >> 9) + 1/2) / 2**23 lies strictly between 0 and 1.
    """
    quads = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=keys.device)
    lanes = philox((quads[None, :], positions[:, None]), keys[:, None])
    x = torch.stack(lanes, dim=-1).flatten(1)[:, :vocab_size]
    u = ((x >> 9).float() + 0.5) * 2.0**-23
    return u.log_().neg_().log_().neg_()
