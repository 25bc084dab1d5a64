"""Recurrent layers: the gated delta rule and Mamba 2's, one sequence's tokens by tiles.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    out_t = S_t^T q_t

A program owns BLOCK_V columns of one head's state in one segment, which it reads and writes by
BLOCK_K rows. From the state of the sequence on it goes through all tokens since: those before the
segment are read from the ring, the segment's own where they are given. A tile is as many tokens as
``Checkpoints`` say, from a multiple of it on, filled up with zeros, so a row's numbers follow from
its sequence alone. Rings are written by ``keep_rows`` afterwards.
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
def _either(own, given, there, held, mask):
    """fp32 numbers of rows that are given, and of those in a ring; 0 where there is neither."""
    fresh = tl.load(own, mask=given & mask, other=0.0).to(tl.float32)
    return fresh + tl.load(there, mask=held & mask, other=0.0).to(tl.float32)  # one of them is 0


@kernel(OF_THE_PASS)
def recurrent_kernel(
    q_ptr,  # [R, K_HEADS * DK]
    k_ptr,  # [R, K_HEADS * DK]
    v_ptr,  # [R, HEADS * DV]
    gates_ptr,  # [R, HEADS, 2] fp32
    kv_ring_ptr,  # [N, ring, K_HEADS * DK + HEADS * DV]
    gates_ring_ptr,  # [N, ring, HEADS, 2] fp32
    state_ptr,  # [2 * N, HEADS, DK, DV] fp32
    first_ptr,  # [S + 1] int32
    length_ptr,  # [S] int32
    owner_ptr,  # [S] int32
    at_ptr,  # [S] int32
    to_ptr,  # [S] int32
    out_ptr,  # [R, HEADS * DV] fp32
    stride_q,  # of rows, in units of VEC_K elements, like the next
    stride_k,
    stride_v,  # in units of VEC_V
    ring,
    states,  # behind so many there is one to spare for each
    scale,
    eps,
    K_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    VEC_K: tl.constexpr,
    VEC_V: tl.constexpr,
    DELTA: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    segment, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE)
    ks, vs = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.load(first_ptr + segment)
    count = tl.load(first_ptr + segment + 1) - first
    at, to = tl.load(at_ptr + segment), tl.load(to_ptr + segment)
    owner = tl.load(owner_ptr + segment).to(tl.int64)
    length = tl.load(length_ptr + segment)
    start, end = length - count, tl.where(count > 0, length, at)

    k_first, v_column = head // (HEADS // K_HEADS) * DK, head * DV + vs[None, :]
    v_mask = vs[None, :] < DV
    cells = state_ptr + head * DK * DV + ks[:, None] * DV + vs[None, :]

    for begin in range(at, end, TILE):
        position = begin + row
        given, held = (position >= start) & (position < end), position < tl.minimum(start, end)
        rows = (first + position - start).to(tl.int64)
        places = owner * ring + position % ring
        x, y, r, p = given[:, None], held[:, None], rows[:, None], places[:, None]
        own_q, own_k = q_ptr + r * stride_q * VEC_K, k_ptr + r * stride_k * VEC_K
        kv = kv_ring_ptr + p * (K_HEADS * DK + HEADS * DV)
        own = v_ptr + r * stride_v * VEC_V
        v = _either(own + v_column, x, kv + K_HEADS * DK + v_column, y, v_mask)
        own, there = (rows * HEADS + head) * 2, (places * HEADS + head) * 2
        own, there = gates_ptr + own, gates_ring_ptr + there
        g = _either(own, given, there, held, given | held)
        beta = _either(own + 1, given, there + 1, held, given | held)

        # The state before the tile: none, the sequence's, or behind what it moves to one that the
        # next pass computes again.
        spare = begin > tl.maximum(at, to)
        source = cells + tl.where(spare, owner + states, owner) * (HEADS * DK * DV)
        there_is = tl.where(begin > 0, DK, 0)
        scores = tl.zeros([TILE, TILE], tl.float32)
        system = tl.zeros([TILE, TILE], tl.float32)
        read = tl.zeros([TILE, BLOCK_V], tl.float32)
        out = tl.zeros([TILE, BLOCK_V], tl.float32)
        k_squares = tl.zeros([TILE], tl.float32)
        q_squares = tl.zeros([TILE], tl.float32)
        for c in range(0, DK, BLOCK_K):
            column, mask = k_first + c + ks[None, :], c + ks[None, :] < DK
            k = _either(own_k + column, x, kv + column, y, mask)
            q = tl.load(own_q + column, mask=x & mask, other=0.0).to(tl.float32)
            state = tl.load(source + c * DV, mask=(c + ks[:, None] < there_is) & v_mask, other=0.0)
            scores += tl.dot(q, tl.trans(k), input_precision="ieee")
            out += tl.dot(q, state, input_precision="ieee")
            if DELTA:
                system += tl.dot(k, tl.trans(k), input_precision="ieee")
                read += tl.dot(k, state, input_precision="ieee")
            if NORM:
                k_squares += tl.sum(k * k, 1)
                q_squares += tl.sum(q * q, 1)
        if NORM:
            k_norm, q_norm = tl.rsqrt(k_squares + eps), tl.rsqrt(q_squares + eps) * scale
        else:
            k_norm, q_norm = k_squares + 1.0, q_squares + scale

        # Log decays of the tokens between two rows alone: differences of sums would be less exact.
        between = tl.cumsum(tl.where(row[:, None] > row[None, :], g[:, None], 0.0), 0)
        ends = tl.sum(tl.where(row[:, None] == TILE - 1, between, 0.0), 0)
        sums = tl.cumsum(g, 0)
        last = tl.sum(tl.where(row == TILE - 1, sums, 0.0), 0)
        pairs = tl.where(row[:, None] >= row[None, :], tl.exp(between), 0.0) * k_norm[None, :]
        scores *= pairs * q_norm[:, None]
        updates = beta[:, None] * v
        if DELTA:
            updates -= (beta * tl.exp(sums) * k_norm)[:, None] * read
            system *= pairs * (beta * k_norm)[:, None]
            for n in range(TILE - 1):  # what row n has added the later ones do not add again
                done = tl.sum(tl.where(row[:, None] == n, updates, 0.0), 0)
                part = tl.sum(tl.where(row[None, :] == n, system, 0.0), 1)
                updates -= tl.where(row > n, part, 0.0)[:, None] * done[None, :]
        out = out * (q_norm * tl.exp(sums))[:, None]
        out += tl.dot(scores, updates, input_precision="ieee")
        tl.store(out_ptr + r * (HEADS * DV) + v_column, out, mask=x & v_mask)

        after = begin + TILE
        if (after <= to) | (after < end):
            updates *= (tl.exp(ends) * k_norm)[:, None]
            target = cells + tl.where(after > to, owner + states, owner) * (HEADS * DK * DV)
            for c in range(0, DK, BLOCK_K):
                column, mask = k_first + c + ks[None, :], c + ks[None, :] < DK
                k = _either(own_k + column, x, kv + column, y, mask)
                whole = (c + ks[:, None] < DK) & v_mask
                state = tl.load(
                    source + c * DV, mask=(c + ks[:, None] < there_is) & v_mask, other=0.0
                )
                state = state * tl.exp(last)
                state += tl.dot(tl.trans(k), updates, input_precision="ieee")
                tl.store(target + c * DV, state, mask=whole)
            tl.debug_barrier()  # the next tile reads what all lanes have written


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    states: LayerStates,
    metadata: AttentionMetadata,
    delta: bool,
    scale: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """What each row reads of the state of its sequence, [R, H, Dv] fp32.

    q, k [R, Hk, Dk], v [R, H, Dv], gates [R, H, 2] fp32: log decay and beta. delta: which rule.
    eps: q and k are divided by their norms first, and q multiplied by ``scale``. Padding rows get
    0.
    """
    (count, k_heads, dk), (heads, dv) = q.shape, v.shape[1:]
    given = metadata.checkpoints
    assert given is not None and heads % k_heads == 0 and k.shape == q.shape
    assert gates.shape == (count, heads, 2) and gates.dtype == torch.float32
    assert all(pool.is_contiguous() for pool in states) and states.state.shape[1:] == (
        heads,
        dk,
        dv,
    )
    out = torch.zeros((count, heads, dv), dtype=torch.float32, device=v.device)
    vec_k, vec_v = launch.vector(q.dtype, dk), launch.vector(v.dtype, dv)
    q, k = (launch.vectorizable(x.flatten(1), vec_k) for x in (q, k))
    v = launch.vectorizable(v.flatten(1), vec_v)
    entry = launch.RECURRENT
    grid = len(metadata.seq_lens), heads, triton.cdiv(dv, entry.block)
    recurrent_kernel[grid](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
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
        stride_q=q.stride(0) // vec_k,
        stride_k=k.stride(0) // vec_k,
        stride_v=v.stride(0) // vec_v,
        ring=states.kv.shape[1],
        states=len(states.kv),
        scale=scale,
        eps=eps or 0.0,
        K_HEADS=k_heads,
        HEADS=heads,
        DK=dk,
        DV=dv,
        VEC_K=vec_k,
        VEC_V=vec_v,
        DELTA=delta,
        NORM=eps is not None,
        TILE=given.tile,
        BLOCK_K=launch.STATE_KEYS,
        BLOCK_V=entry.block,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
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
    """Write rows [R, ...] to their places ``slots`` [R] int64 of a ring [N, L, W]; -1: nowhere."""
    rows = rows.flatten(1)
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
    out = scan(q, k, v, gates, *given, **rule)
    states, metadata = given
    assert metadata.checkpoints is not None
    slots = metadata.checkpoints.slots
    keep_rows(states.kv, torch.cat([k.flatten(1), v.flatten(1)], -1), slots, metadata)
    keep_rows(states.gates, gates, slots, metadata)
    return out
