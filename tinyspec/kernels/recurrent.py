"""Recurrent layers: the gated delta rule and Mamba 2's, token by token.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    out_t = S_t^T q_t

A program owns BLOCK_V columns of one head's state in one segment, and holds them in registers.
From the state of the sequence on it goes through all tokens since: those before the segment are
read from the ring, the segment's own where they are given, and either is computed by the same
instructions, so a row's numbers follow from its sequence alone. Rings are written by ``keep_rows``
afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.backend import AttentionMetadata, LayerStates
from tinyspec.kernels.jit import kernel

OF_THE_PASS = ["first_ptr", "length_ptr", "owner_ptr", "at_ptr", "to_ptr"]


@triton.jit
def _either(own, given, there, held):
    """fp32 numbers of a row that is given, or of one in a ring; 0 where there is neither."""
    fresh = tl.load(own, mask=given, other=0.0).to(tl.float32)
    return fresh + tl.load(there, mask=held, other=0.0).to(tl.float32)  # one of them is 0


@triton.jit
def _token(position, span, own, rings, steps, columns):
    """Query, key, value, log decay and beta of the token at ``position`` of a segment, from its row
    or, without a query, from the ring; 0 behind the last."""
    start, end, row, place, ring = span
    q, kv, gates = own
    ring_kv, ring_gates = rings
    step_q, step_kv, step_gates = steps
    ks, vs, k_column, v_column, DK, DV = columns
    given, held = (position >= start) & (position < end), position < tl.minimum(start, end)
    row, place = (row + position).to(tl.int64), place + position % ring
    kv += row * step_kv
    ring_kv += place * step_kv
    gates += row * step_gates
    ring_gates += place * step_gates
    k_given, k_held = ks < tl.where(given, DK, 0), ks < tl.where(held, DK, 0)
    v_given, v_held = vs < tl.where(given, DV, 0), vs < tl.where(held, DV, 0)
    q = tl.load(q + row * step_q + k_column, mask=k_given, other=0.0).to(tl.float32)
    k = _either(kv + k_column, k_given, ring_kv + k_column, k_held)
    v = _either(kv + v_column, v_given, ring_kv + v_column, v_held)
    g = _either(gates, given, ring_gates, held)
    return q, k, v, g, _either(gates + 1, given, ring_gates + 1, held)


@kernel(OF_THE_PASS)
def recurrent_kernel(
    q_ptr,  # [R, K_HEADS * DK]
    kv_ptr,  # [R, K_HEADS * DK + HEADS * DV]
    gates_ptr,  # [R, HEADS, 2] fp32
    kv_ring_ptr,  # [N, ring, K_HEADS * DK + HEADS * DV]
    gates_ring_ptr,  # [N, ring, HEADS, 2] fp32
    state_ptr,  # [N, HEADS, DK, DV] fp32
    first_ptr,  # [S + 1] int32
    length_ptr,  # [S] int32
    owner_ptr,  # [S] int32
    at_ptr,  # [S] int32
    to_ptr,  # [S] int32
    out_ptr,  # [R, HEADS * DV] fp32
    stride_q,  # of rows, in units of VEC elements
    ring,
    scale,
    eps,
    K_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    VEC: tl.constexpr,
    DELTA: tl.constexpr,
    NORM: tl.constexpr,
    KEYS: tl.constexpr,  # DK or the next power of two
    BLOCK_V: tl.constexpr,
):
    segment, head = tl.program_id(0), tl.program_id(1)
    ks, vs = tl.arange(0, KEYS), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = ks < DK, vs < DV
    first = tl.load(first_ptr + segment)
    count = tl.load(first_ptr + segment + 1) - first
    at, to = tl.load(at_ptr + segment), tl.load(to_ptr + segment)
    owner = tl.load(owner_ptr + segment).to(tl.int64)
    length = tl.load(length_ptr + segment)
    start, end = length - count, tl.where(count > 0, length, at)

    k_column, v_column = head // (HEADS // K_HEADS) * DK + ks, head * DV + vs
    own, rings = (q_ptr, kv_ptr, gates_ptr + head * 2), (kv_ring_ptr, gates_ring_ptr + head * 2)
    steps = stride_q * VEC, K_HEADS * DK + HEADS * DV, HEADS * 2
    columns = ks, vs, k_column, K_HEADS * DK + v_column, DK, DV
    span = start, end, first - start, owner * ring, ring
    cells = state_ptr + (owner * HEADS + head) * (DK * DV) + ks[:, None] * DV + vs[None, :]
    mask = k_mask[:, None] & v_mask[None, :]
    there_is = tl.where(at > 0, DK, 0)
    state = tl.load(cells, mask=(ks[:, None] < there_is) & v_mask[None, :], other=0.0)
    q, k, v, g, beta = _token(at, span, own, rings, steps, columns)
    for position in range(at, end):
        now_q, now_k, update, decay, rate = q, k, v, tl.exp(g), beta
        # While this token is computed the next one is on its way.
        q, k, v, g, beta = _token(position + 1, span, own, rings, steps, columns)
        state *= decay
        if NORM:
            now_k *= tl.rsqrt(tl.sum(now_k * now_k, 0) + eps)
        if DELTA:
            update -= tl.sum(state * now_k[:, None], 0)
        update *= rate
        state += now_k[:, None] * update[None, :]
        if position >= start:
            if NORM:
                now_q *= tl.rsqrt(tl.sum(now_q * now_q, 0) + eps)
            out = tl.sum(state * now_q[:, None], 0) * scale
            row = (first + position - start).to(tl.int64)
            tl.store(out_ptr + row * (HEADS * DV) + v_column, out, mask=v_mask)
        if position + 1 == to:
            tl.store(cells, state, mask=mask)


def scan(
    q: Tensor,
    kv: Tensor,
    gates: Tensor,
    states: LayerStates,
    metadata: AttentionMetadata,
    delta: bool,
    scale: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """What each row reads of the state of its sequence, [R, H, Dv] fp32.

    q [R, Hk, Dk], kv [R, Hk * Dk + H * Dv], gates [R, H, 2] fp32: log decay and beta. delta: which
    rule. eps: q and k are divided by their norms first, and q multiplied by ``scale``. Padding rows
    get 0.
    """
    (count, k_heads, dk), (heads, _, dv) = q.shape, states.state.shape[1:]
    given = metadata.checkpoints
    assert given is not None and heads % k_heads == 0 and states.state.shape[2] == dk
    assert kv.shape == (count, k_heads * dk + heads * dv) and kv.is_contiguous()
    assert gates.shape == (count, heads, 2) and gates.dtype == torch.float32
    assert all(pool.is_contiguous() for pool in states)
    out = torch.zeros((count, heads, dv), dtype=torch.float32, device=q.device)
    vec = launch.vector(q.dtype, dk)
    q = launch.vectorizable(q.flatten(1), vec)
    keys, block = launch.state_blocks(dk, dv)
    recurrent_kernel[(len(metadata.seq_lens), heads, triton.cdiv(dv, block))](
        q_ptr=q,
        kv_ptr=kv,
        gates_ptr=gates.contiguous(),
        kv_ring_ptr=states.kv,
        gates_ring_ptr=states.gates,
        state_ptr=states.state,
        first_ptr=metadata.cu_seqlens_q,
        length_ptr=metadata.seq_lens,
        owner_ptr=given.owners,
        at_ptr=given.at,
        to_ptr=given.to,
        out_ptr=out,
        stride_q=q.stride(0) // vec,
        ring=states.kv.shape[1],
        scale=scale,
        eps=eps or 0.0,
        K_HEADS=k_heads,
        HEADS=heads,
        DK=dk,
        DV=dv,
        VEC=vec,
        DELTA=delta,
        NORM=eps is not None,
        KEYS=keys,
        BLOCK_V=block,
        num_warps=1,
        **launch.state_options(q.device),
    )
    return out


@kernel(["slot_ptr"])
def keep_rows_kernel(
    rows_ptr,  # [R, W]
    ring_ptr,  # [N * L, W]
    slot_ptr,  # [R] int64
    width_units,  # W in units of VEC elements
    stride,  # of rows, in the same units
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = width_units * VEC
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        own = tl.load(rows_ptr + row.to(tl.int64) * stride * VEC + column, mask=column < width)
        tl.store(ring_ptr + slot * width + column, own, mask=column < width)


def keep_rows(ring: Tensor, rows: Tensor, slots: Tensor, metadata: AttentionMetadata) -> None:
    """Write rows [R, W] to their places ``slots`` [R] int64 of a ring [N, L, W]; -1: nowhere."""
    count, width = rows.shape
    assert ring.shape[-1] == width and ring.is_contiguous() and ring.dtype == rows.dtype
    vec = launch.vector(rows.dtype, width)
    rows = launch.vectorizable(rows, vec)
    entry = launch.KEEP_ROWS
    keep_rows_kernel[(count, triton.cdiv(width, entry.block))](
        rows_ptr=rows,
        ring_ptr=ring,
        slot_ptr=slots,
        width_units=width // vec,
        stride=rows.stride(0) // vec,
        VEC=vec,
        BLOCK=entry.block,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )


def recurrent(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *given: Any, **rule: Any) -> Tensor:
    """As ``scan``; rows with a place in the rings are kept there."""
    kv = torch.cat([k.flatten(1), v.flatten(1)], -1)
    out = scan(q, kv, gates, *given, **rule)
    states, metadata = given
    slots = metadata.checkpoints.slots
    keep_rows(states.kv, kv, slots, metadata)
    keep_rows(states.gates, gates.flatten(1), slots, metadata)
    return out
