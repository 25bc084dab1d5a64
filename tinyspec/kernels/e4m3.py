"""Codes of 8 bits of the KV cache, e4m3fn: a sign, 4 bits of exponent, 3 of mantissa.

    value = (-1)^sign * 2^(exponent - 7) * (1 + mantissa / 8)      2^-6 * mantissa / 8 at exponent 0

The largest number is 448, 0x7f and 0xff are NaN, there is no infinity. By integer arithmetic, with
one sum and one product of fp32, on all architectures: NVIDIA's below 8.9 and others have no
instruction for it, and all give the same codes and values as those that have. Every value of a code
is exact in bf16, fp16 and fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Between the exponents of fp32 and of e4m3.
EXPONENTS = tl.constexpr(2.0**120)
# The largest number; what ``decode`` makes of NaN lies above.
LARGEST = tl.constexpr(448.0)


@triton.jit
def encode(x):
    """Codes of x in any float dtype, uint8: round to nearest, ties to even; beyond 448 and infinite
    the code of 448, of every NaN 0x7f."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    kept = tl.minimum(magnitude, 0x43E00000)  # 448
    code = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
    # Codes below 2^-6 are 2^-9 apart, as fp32 numbers are from 2^14 on: the sum rounds to them.
    small = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, code) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def decode(codes):
    """fp32 values of uint8 codes; of NaN 480, which no other code has: ``not_numbers`` tells."""
    # Sign and exponent go to their places, 120 too low; codes below 2^-6 are subnormal there, which
    # a product takes as they are (tests/kernels/test_compile.py). It is exact.
    bits = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
    return bits.to(tl.float32, bitcast=True) * EXPONENTS


@triton.jit
def not_numbers(k, v):
    """[rows]: NaN where a row of k or v, both [rows, D] by ``decode``, has a NaN; else 0."""
    largest = tl.max(tl.maximum(tl.abs(k), tl.abs(v)), axis=1)
    return tl.where(largest > LARGEST, float("nan"), 0.0)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """x as a cache of this dtype holds it: as it is, or its codes."""
    if dtype == tl.uint8:
        return encode(x)
    else:
        return x
