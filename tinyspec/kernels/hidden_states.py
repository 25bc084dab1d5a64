"""Kernels over hidden states: RMSNorm with the sum that it is taken of, and a gated MLP's product.

    s = cast(x + residual)
    n = cast(s / sqrt(mean(s^2) + eps)) * weight             (Llama)
    n = cast(s / sqrt(mean(s^2) + eps) * (1 + weight))       (Gemma: unit_offset)

x, residual, n and s [R, H]. One program owns one row, so a row's bits depend on that row and the
weight alone; the order of its one sum is fixed by H. The sum is normed as it is rounded: the norm
of s by itself has the same bits.

    out = cast(cast(act(gate)) * up)

gate, up and out [R, I]; act is SiLU, GELU, or GELU by its tanh form, in fp32. A program owns
BLOCK numbers of one row; nothing is reduced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.twins.hidden_states import ACTIVATIONS

SILU, GELU = tl.constexpr(0), tl.constexpr(1)


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


@triton.jit(do_not_specialize=["size_units", "stride_gate", "stride_up"])
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

    entry = launch.gated()
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
