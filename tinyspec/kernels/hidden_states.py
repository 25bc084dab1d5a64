"""Kernels over hidden states: RMSNorm with the sum that it is taken of, a gated MLP's product, and
a matrix product whose rows do not depend on their number.

    s = cast(x + residual)
    n = cast(s / sqrt(mean(s^2) + eps)) * weight             (Llama)
    n = cast(s / sqrt(mean(s^2) + eps) * (1 + weight))       (Gemma: unit_offset)

x, residual, n and s [R, H]. One program owns one row, so a row's bits depend on that row and the
weight alone; the order of its one sum is fixed by H. The sum is normed as it is rounded: the norm
of s by itself has the same bits.

    out = cast(cast(act(gate)) * up)

gate, up and out [R, I]; act is SiLU, GELU, or GELU by its tanh form, in fp32. A program owns
BLOCK numbers of one row; nothing is reduced.

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
from tinyspec.kernels.jit import kernel
from tinyspec.kernels.twins.layers import ACTIVATIONS

SILU, GELU = tl.constexpr(0), tl.constexpr(1)


@kernel()
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


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """x fp32 through the activation of this number."""
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@kernel()
def gated_kernel(
    gate_ptr,  # [R, I]
    up_ptr,  # [R, I]
    out_ptr,  # [R, I]
    size_units,  # I in units of VEC elements
    stride_gate,  # of rows, in units of VEC elements
    stride_up,
    ACTIVATION: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size_units * VEC
    gate_row = gate_ptr + row * stride_gate * VEC
    up_row = up_ptr + row * stride_up * VEC
    out_row = out_ptr + row * size_units * VEC

    gate = tl.load(gate_row + column, mask=mask, other=0.0)
    up = tl.load(up_row + column, mask=mask, other=0.0).to(tl.float32)
    active = _activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out_row + column, (active * up).to(gate.dtype), mask=mask)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, each rounded once; gate and up [..., I] of one dtype -> [..., I].

    activation: one of ACTIVATIONS.
    """
    size = gate.shape[-1]
    assert gate.shape == up.shape and gate.dtype == up.dtype and activation in ACTIVATIONS
    vec = launch.vector(gate.dtype, size)
    gates, ups = (launch.vectorizable(x.reshape(-1, size), vec) for x in (gate, up))

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out

    entry = launch.GATED
    gated_kernel[(len(gates), triton.cdiv(size, entry.block))](
        gate_ptr=gates,
        up_ptr=ups,
        out_ptr=out,
        size_units=size // vec,
        stride_gate=gates.stride(0) // vec,
        stride_up=ups.stride(0) // vec,
        ACTIVATION=ACTIVATIONS.index(activation),
        VEC=vec,
        BLOCK=entry.block,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return out


@triton.jit
def product(
    x_tile,
    w_tile,
    w_step,
    row_mask,
    n_mask,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums of a tile over all of K, in the one order that there is: pointers [BLOCK_M, BLOCK_K] and
    [BLOCK_K, BLOCK_N] to the first numbers, and masks -> [BLOCK_M, BLOCK_N] fp32."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k_mask = start + k < width
        x = tl.load(x_tile, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        w = tl.load(w_tile, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
        x_tile += BLOCK_K
        w_tile += w_step
    return acc


@kernel(["bias_ptr"])
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

    acc = product(x_tile, w_tile, w_step, row_mask, n_mask, width, BLOCK_M, BLOCK_N, BLOCK_K)

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
