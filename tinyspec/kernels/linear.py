"""Linear: a matrix product whose rows do not depend on their number.

    out[r, n] = sum_k x[r, k] * weight[n, k] + bias[n]

x [R, K], weight [N, K], out [R, N]. A program owns a tile of BLOCK_M rows by BLOCK_N outputs and
walks all of K from 0 in steps of BLOCK_K, into one fp32 accumulator; the bias joins it in fp32
before the single cast. Nothing is split over K and the tile is keyed by dtype alone, so a row's
bits depend on that row, the weight and the bias: not on the number of rows, its row index, its
neighbours, or the number of outputs. A short last tile is padded with zeros.

The weight is read as it is stored: [N, K] of ``nn.Linear``, or [K, N] of GPT-2's ``Conv1D``, passed
transposed. VEC_K and VEC_N are known divisors of K and N; they widen loads and stores and come from
the layer, never from the pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch


@triton.jit(
    do_not_specialize=["num_rows", "k_units", "n_units", "num_bias", "stride_x", "stride_w"],
    do_not_specialize_on_alignment=["bias_ptr"],
)
def linear_kernel(
    x_ptr,  # [R, K]
    weight_ptr,  # [N, K], or [K, N] if TRANSPOSED
    bias_ptr,  # [num_bias]
    out_ptr,  # [R, N]
    num_rows,
    k_units,  # K in units of VEC_K elements
    n_units,  # N in units of VEC_N elements
    num_bias,  # N, or 0: no bias
    stride_x,  # in units of VEC_K elements
    stride_w,  # in units of VEC_K elements, of VEC_N if TRANSPOSED
    TRANSPOSED: tl.constexpr,
    VEC_K: tl.constexpr,
    VEC_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    width = k_units * VEC_K
    row_mask = row < num_rows
    n_mask = n < n_units * VEC_N

    x_tile = x_ptr + (row * stride_x)[:, None] * VEC_K + k[None, :]
    if TRANSPOSED:
        w_tile = weight_ptr + (k.to(tl.int64) * stride_w)[:, None] * VEC_N + n[None, :]
        w_step = stride_w.to(tl.int64) * (VEC_N * BLOCK_K)
    else:
        w_tile = weight_ptr + (n * stride_w)[None, :] * VEC_K + k[:, None]
        w_step = BLOCK_K

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k_mask = start + k < width
        x = tl.load(x_tile, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        w = tl.load(w_tile, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_tile += BLOCK_K
        w_tile += w_step

    bias = tl.load(bias_ptr + n, mask=n < num_bias, other=0.0)
    out = (acc + bias.to(tl.float32)[None, :]).to(out_ptr.dtype.element_ty)
    out_tile = out_ptr + (row * n_units)[:, None] * VEC_N + n[None, :]
    tl.store(out_tile, out, mask=row_mask[:, None] & n_mask[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; the bits of a row depend on that row, the weight and the bias alone.

    x [R, K], weight [N, K] (K or N contiguous; anything else is copied), bias [N] or None, all of
    one dtype (bf16, fp16 or fp32) -> [R, N] in that dtype, summed in fp32 and rounded once.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    assert weight.shape == (outputs, width) and width > 0 and outputs > 0
    assert x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert bias is None or (bias.shape == (outputs,) and bias.dtype == x.dtype)
    assert bias is None or bias.is_contiguous()

    vec_k, vec_n = launch.vector(x.dtype, width), launch.vector(x.dtype, outputs)
    transposed = weight.stride(1) != 1 and weight.stride(0) == 1
    vec_w = vec_n if transposed else vec_k
    x = launch.vectorizable(x, vec_k)
    stored = launch.vectorizable(weight.T if transposed else weight, vec_w)

    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out

    entry = launch.linear(x.dtype)
    grid = (triton.cdiv(rows, entry.block_m), triton.cdiv(outputs, entry.block_n))
    linear_kernel[grid](
        x_ptr=x,
        weight_ptr=stored,
        bias_ptr=x if bias is None else bias,
        out_ptr=out,
        num_rows=rows,
        k_units=width // vec_k,
        n_units=outputs // vec_n,
        num_bias=0 if bias is None else outputs,
        stride_x=x.stride(0) // vec_k,
        stride_w=stored.stride(0) // vec_w,
        TRANSPOSED=transposed,
        VEC_K=vec_k,
        VEC_N=vec_n,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        BLOCK_K=entry.block_k,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        **launch.OPTIONS,
    )
    return out
