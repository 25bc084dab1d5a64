"""Fused KV write: q/k RMSNorm, RoPE on q and k, scatter of k and v into their slots, one launch.

    n = cast(x / sqrt(mean(x^2) + eps)) * weight               (Qwen3; only where weights are given)
    y = [n1 * cos1 - n2 * sin1, n2 * cos2 + n1 * sin2, n_rest]

1 and 2 are the halves of the first rot dimensions (Llama), or its even and odd ones (GLM).

q [R, Hq, D], k and v [R, Hkv, D], caches [N, page_size, Hkv, D], in their dtype or as e4m3 codes
(uint8). A program owns BLOCK_H heads of one row: q heads, or k heads together with the v heads of
the same number. RoPE is computed in fp32 and rounded once, to the dtype of k, before it is encoded.
The only reduction is the norm's sum over a head, in an order fixed by dtype, head size and how the
dimensions pair.

Values in a cache are finite: attention multiplies those that a row does not attend to by 0. One
that is not finite is written as 0, and all of its key as NaN, as are then the scores of the rows
that attend to it.

A code is e4m3fn: a sign, 4 bits of exponent, 3 of mantissa.

    value = (-1)^sign * 2^(exponent - 7) * (1 + mantissa / 8)      2^-6 * mantissa / 8 at exponent 0

The largest number is 448, 0x7f and 0xff are NaN, there is no infinity. Codes are made and read
(by attention) by integer arithmetic, with one sum and one product of fp32, on all architectures:
NVIDIA's below 8.9 and others have no instruction for it, and all give the same codes and values as
those that have. Every value of a code is exact in bf16, fp16 and fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.jit import kernel

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
def not_numbers(k):
    """[rows]: NaN where a row of k [rows, D], by ``decode``, has a NaN; else 0."""
    largest = tl.max(tl.abs(k), axis=1)
    return tl.where(largest > LARGEST, float("nan"), 0.0)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """x as a cache of this dtype holds it: as it is, or its codes."""
    if dtype == tl.uint8:
        return encode(x)
    else:
        return x


@triton.jit
def _normed(x, weight_ptr, dim, rms, mask, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """x [heads, dims] fp32 after the norm, rounded where transformers rounds."""
    if NORM:
        weight = tl.load(weight_ptr + dim, mask=mask, other=0.0).to(tl.float32)
        x = ((x * rms[:, None]).to(DTYPE).to(tl.float32) * weight[None, :]).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _norm_rotate(
    x_ptr,  # [heads, D] of one row
    out_ptr,  # [heads, D] of one row
    weight_ptr,  # [D]
    cos_ptr,  # [ROT] of one row
    sin_ptr,  # [ROT] of one row
    head,
    head_mask,
    stride_x,
    eps,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROT: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    wrong=None,  # [heads] whether all of a head becomes NaN
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STORED: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = ROT // 2
    pair = tl.arange(0, HALF_PAD)
    pair_mask = pair < HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else HALF + pair
    rest = ROT + tl.arange(0, REST_PAD)
    rest_mask = rest < D
    x_row = x_ptr + head[:, None] * stride_x
    out_row = out_ptr + head[:, None] * D

    total = tl.zeros([head.shape[0]], tl.float32)
    if ROT > 0:
        pair_mask_2d = head_mask[:, None] & pair_mask[None, :]
        x1 = tl.load(x_row + first[None, :], mask=pair_mask_2d, other=0.0).to(tl.float32)
        x2 = tl.load(x_row + second[None, :], mask=pair_mask_2d, other=0.0).to(tl.float32)
        total += tl.sum(x1 * x1 + x2 * x2, axis=1)
    if ROT < D:
        copy_mask = head_mask[:, None] & rest_mask[None, :]
        x3 = tl.load(x_row + rest[None, :], mask=copy_mask, other=0.0).to(tl.float32)
        total += tl.sum(x3 * x3, axis=1)
    rms = tl.rsqrt(total / D + eps)

    if ROT > 0:
        x1 = _normed(x1, weight_ptr, first, rms, pair_mask, NORM, DTYPE)
        x2 = _normed(x2, weight_ptr, second, rms, pair_mask, NORM, DTYPE)
        cos1 = tl.load(cos_ptr + first, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        sin1 = tl.load(sin_ptr + first, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        cos2 = tl.load(cos_ptr + second, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        sin2 = tl.load(sin_ptr + second, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        if wrong is not None:
            y1 = tl.where(wrong[:, None], float("nan"), y1)
            y2 = tl.where(wrong[:, None], float("nan"), y2)
        tl.store(out_row + first[None, :], stored(y1.to(DTYPE), STORED), mask=pair_mask_2d)
        tl.store(out_row + second[None, :], stored(y2.to(DTYPE), STORED), mask=pair_mask_2d)
    if ROT < D:
        x3 = _normed(x3, weight_ptr, rest, rms, rest_mask, NORM, DTYPE)
        if wrong is not None:
            x3 = tl.where(wrong[:, None], float("nan"), x3)
        tl.store(out_row + rest[None, :], stored(x3.to(DTYPE), STORED), mask=copy_mask)


@kernel(["cos_ptr", "sin_ptr", "q_weight_ptr", "k_weight_ptr", "slot_ptr"])
def kv_write_kernel(
    q_ptr,  # [R, Hq, D]
    k_ptr,  # [R, Hkv, D]
    v_ptr,  # [R, Hkv, D]
    cos_ptr,  # [R, ROT]
    sin_ptr,  # [R, ROT]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    k_cache_ptr,  # [N * page_size, Hkv, D]
    v_cache_ptr,  # [N * page_size, Hkv, D]
    slot_ptr,  # [R]
    out_ptr,  # [R, Hq, D]
    q_heads,
    kv_heads,
    stride_qr,  # strides of q, k and v in units of VEC elements
    stride_qh,
    stride_kr,
    stride_kh,
    stride_vr,
    stride_vh,
    stride_cos,
    stride_sin,
    eps,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROT: tl.constexpr,
    D: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, BLOCK_H)
    cos_row = cos_ptr + row * stride_cos
    sin_row = sin_ptr + row * stride_sin

    if block < q_blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        _norm_rotate(
            q_ptr + row * stride_qr * VEC,
            out_ptr + row * q_heads * D,
            q_weight_ptr,
            cos_row,
            sin_row,
            head,
            head < q_heads,
            stride_qh.to(tl.int64) * VEC,
            eps,
            NORM=NORM_Q,
            INTERLEAVED=INTERLEAVED,
            ROT=ROT,
            D=D,
            HALF_PAD=HALF_PAD,
            REST_PAD=REST_PAD,
        )
    else:
        slot = tl.load(slot_ptr + row)
        if slot >= 0:
            head = ((block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
            head_mask = head < kv_heads
            dim = tl.arange(0, D_PAD)[None, :]
            mask = head_mask[:, None] & (dim < D)
            v_row = v_ptr + row * stride_vr * VEC + head[:, None] * (stride_vh.to(tl.int64) * VEC)
            v = tl.load(v_row + dim, mask=mask, other=0.0)
            # As codes infinite values become 448.
            finite = (v == v) if v_cache_ptr.dtype.element_ty == tl.uint8 else v * 0.0 == 0.0
            _norm_rotate(
                k_ptr + row * stride_kr * VEC,
                k_cache_ptr + slot * kv_heads * D,
                k_weight_ptr,
                cos_row,
                sin_row,
                head,
                head_mask,
                stride_kh.to(tl.int64) * VEC,
                eps,
                NORM=NORM_K,
                INTERLEAVED=INTERLEAVED,
                ROT=ROT,
                D=D,
                HALF_PAD=HALF_PAD,
                REST_PAD=REST_PAD,
                wrong=tl.min(finite.to(tl.int32), axis=1) == 0,
            )
            v = stored(tl.where(finite, v, 0.0).to(v.dtype), v_cache_ptr.dtype.element_ty)
            tl.store(v_cache_ptr + (slot * kv_heads + head[:, None]) * D + dim, v, mask=mask)


def fused_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    derived: object = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v where ``slot_mapping`` says, return the rotated q.

    q [R, Hq, D], k and v [R, Hkv, D], last dimension contiguous; cos and sin [R, rot] with rot <=
    D, in any float dtype, or None for no RoPE; caches [N, page_size, Hkv, D] contiguous, of q's
    dtype or uint8: e4m3 codes; slot_mapping [R] int64, page * page_size + offset, -1 to skip.
    q_weight and k_weight [D]: RMSNorm over the head before RoPE (Qwen3). interleaved: RoPE rotates
    even with odd dimensions (GLM) instead of the first with the second half. derived: unused here.
    """
    rows, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    assert k.shape == v.shape == (rows, kv_heads, dim) and slot_mapping.shape == (rows,)
    assert k_cache.shape == v_cache.shape and k_cache.shape[2:] == (kv_heads, dim)
    assert q.dtype == k.dtype == v.dtype and k_cache.dtype == v_cache.dtype
    assert k_cache.dtype in (q.dtype, torch.uint8)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and slot_mapping.is_contiguous()
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and slot_mapping.dtype == torch.int64
    assert launch.aligned(k_cache, v_cache)
    assert (cos is None) == (sin is None)
    assert cos is None or sin is None or cos.stride(-1) == sin.stride(-1) == 1
    rot = 0 if cos is None else cos.shape[-1]
    assert rot <= dim and rot % 2 == 0
    vec = launch.vector(q.dtype, dim)
    q, k, v = (launch.vectorizable(x, vec) for x in (q, k, v))
    # A pointer that is never read needs a type as well.
    norm_q, norm_k = q_weight is not None, k_weight is not None
    cos, sin = (q, q) if cos is None or sin is None else (cos, sin)
    q_weight = q if q_weight is None else q_weight
    k_weight = q if k_weight is None else k_weight

    out = torch.empty((rows, q_heads, dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out

    entry = launch.kv_write(dim)
    half_pad = launch.next_power_of_2(max(1, rot // 2))
    rest_pad = launch.next_power_of_2(max(1, dim - rot))
    blocks = triton.cdiv(q_heads, entry.block) + triton.cdiv(kv_heads, entry.block)
    grid = (rows, blocks)
    kv_write_kernel[grid](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        cos_ptr=cos,
        sin_ptr=sin,
        q_weight_ptr=q_weight,
        k_weight_ptr=k_weight,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        slot_ptr=slot_mapping,
        out_ptr=out,
        q_heads=q_heads,
        kv_heads=kv_heads,
        stride_qr=q.stride(0) // vec,
        stride_qh=q.stride(1) // vec,
        stride_kr=k.stride(0) // vec,
        stride_kh=k.stride(1) // vec,
        stride_vr=v.stride(0) // vec,
        stride_vh=v.stride(1) // vec,
        stride_cos=cos.stride(0),
        stride_sin=sin.stride(0),
        eps=float(eps),
        NORM_Q=norm_q,
        NORM_K=norm_k,
        INTERLEAVED=interleaved,
        ROT=rot,
        D=dim,
        VEC=vec,
        BLOCK_H=entry.block,
        HALF_PAD=half_pad,
        REST_PAD=rest_pad,
        D_PAD=launch.next_power_of_2(dim),
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return out
