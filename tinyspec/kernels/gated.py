"""The product of a gated MLP: one half through an activation, times the other half.

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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SILU, GELU = tl.constexpr(0), tl.constexpr(1)


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
