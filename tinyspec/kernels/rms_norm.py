"""RMSNorm of hidden states, with the sum that it is taken of.

    s = cast(x + residual)
    n = cast(s / sqrt(mean(s^2) + eps)) * weight             (Llama)
    n = cast(s / sqrt(mean(s^2) + eps) * (1 + weight))       (Gemma: unit_offset)

x, residual, n and s [R, H]. One program owns one row, so a row's bits depend on that row and the
weight alone; the order of its one sum is fixed by H. The sum is normed as it is rounded: the norm
of s by itself has the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch


@triton.jit(do_not_specialize=["stride_x", "stride_residual", "eps"])
def add_rms_norm_kernel(
    x_ptr,  # [R, SIZE]
    residual_ptr,  # [R, SIZE]
    weight_ptr,  # [SIZE]
    normed_ptr,  # [R, SIZE]
    summed_ptr,  # [R, SIZE]
    stride_x,  # of rows, in units of VEC elements
    stride_residual,
    eps,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DTYPE: tl.constexpr = normed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE

    x = tl.load(x_ptr + row * stride_x * VEC + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_row = residual_ptr + row * stride_residual * VEC
        x += tl.load(residual_row + column, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(DTYPE)
        tl.store(summed_ptr + row * SIZE + column, rounded, mask=mask)
        x = rounded.to(tl.float32)

    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = x * (1.0 + weight) if UNIT_OFFSET else x.to(DTYPE).to(tl.float32) * weight
    tl.store(normed_ptr + row * SIZE + column, normed.to(DTYPE), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and the sum; of x, and x itself, without a residual.

    x and residual [..., H], weight [H], of one dtype, H up to ``launch.MAX_NORM`` -> two [..., H].
    unit_offset: the weight is stored less one, and multiplied before the norm is rounded.
    """
    size = x.shape[-1]
    assert weight.shape == (size,) and weight.dtype == x.dtype and size <= launch.MAX_NORM
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    vec = launch.vector(x.dtype, size)
    rows = launch.vectorizable(x.reshape(-1, size), vec)
    others = rows if residual is None else launch.vectorizable(residual.reshape(-1, size), vec)
    weight = launch.vectorizable(weight, 1)

    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows) == 0:
        return normed, summed

    entry = launch.rms_norm(size)
    add_rms_norm_kernel[(len(rows),)](
        x_ptr=rows,
        residual_ptr=others,
        weight_ptr=weight,
        normed_ptr=normed,
        summed_ptr=normed if residual is None else summed,
        stride_x=rows.stride(0) // vec,
        stride_residual=others.stride(0) // vec,
        eps=float(eps),
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        SIZE=size,
        VEC=vec,
        BLOCK=entry.block,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return normed, summed
