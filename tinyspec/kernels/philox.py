"""Philox4x32-10 and Gumbel noise from it, as Triton helpers.

    u = ((x >> 9) + 1/2) / 2**23        g = -log(-log(u))

Entry v of a row's noise is lane ``v & 3`` of the four outputs at counter (v >> 2, position, 0, 0)
under the row's 64-bit key, so it depends on nothing else. The rounds are written out instead of
calling ``tl.philox``, because the bits of a seed must not change with the triton version.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 outputs of the uint32 counter (c0, c1, c2, c3) under the uint32 key (k0, k1)."""
    ROUND_A: tl.constexpr = 0xD2511F53
    ROUND_B: tl.constexpr = 0xCD9E8D57
    KEY_A: tl.constexpr = 0x9E3779B9
    KEY_B: tl.constexpr = 0xBB67AE85
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(c0, tl.full(c0.shape, ROUND_A, tl.uint32)), c0 * ROUND_A
        high_b, low_b = tl.umulhi(c2, tl.full(c2.shape, ROUND_B, tl.uint32)), c2 * ROUND_B
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 += KEY_A
        k1 += KEY_B
    return c0, c1, c2, c3


@triton.jit
def gumbel(start, position, k0, k1, BLOCK: tl.constexpr):
    """Noise [BLOCK] fp32 of the entries from ``start`` (a multiple of 4) on; position and key
    uint32."""
    quad = start // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    x0, x1, x2, x3 = philox(quad.to(tl.uint32), zero + position, zero, zero, k0, k1)
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [BLOCK])
    u = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(u))
