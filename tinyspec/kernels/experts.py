"""Kernels of a mixture of experts: which rows an expert has, their product with its weight, and the
sum of what a row's experts say. Nothing is read by the host, and every launch follows from shapes
alone, so a graph can hold them.

    out[p, n] = sum_k x[p, k] * weight[e(p), n, k] + bias[e(p), n]

P pairs of a row and an expert, x [P, K], weight [E, N, K], out [P, N]. A program owns a tile of up
to BLOCK_M pairs of one expert by BLOCK_N outputs and adds up as ``linear`` does: a pair's bits
depend on that pair, not on how many others its expert has. There are as many programs as tiles can
be at most; which expert's a tile is follows from the first pair of every expert.

    sum[r] = cast(cast(out[r, 0] * scale[r, 0]) + cast(out[r, 1] * scale[r, 1]) + ...)

in fp32, in ascending order of the experts' numbers, in whichever order a row names them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.hidden_states import product
from tinyspec.kernels.jit import kernel


@kernel(None)
def sort_kernel(
    index_ptr,  # [P]
    pairs_ptr,  # [P]
    starts_ptr,  # [E + 1]
    num_pairs,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_pairs, BLOCK):
        pair = start + offset
        chosen = tl.load(index_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        before += (chosen < expert).to(tl.int64)
    at = tl.sum(before)
    tl.store(starts_ptr + expert, at)
    for start in range(0, num_pairs, BLOCK):
        pair = start + offset
        chosen = tl.load(index_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        own = (chosen == expert).to(tl.int64)
        tl.store(pairs_ptr + at + tl.cumsum(own) - 1, pair.to(tl.int64), mask=own > 0)
        at += tl.sum(own)


def sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """index [R, k] int64, from 0 to E - 1, E = ``num_experts`` -> the pairs of a row and an expert
    by expert and then by number [R * k], and the first of every expert among them [E + 1]; int64.
    """
    sizes = index.numel(), num_experts + 1
    pairs, starts = (torch.empty(n, dtype=torch.int64, device=index.device) for n in sizes)
    # The last program has no pairs: it tells how many there are.
    sort_kernel[(num_experts + 1,)](
        index_ptr=index.contiguous(),
        pairs_ptr=pairs,
        starts_ptr=starts,
        num_pairs=len(pairs),
        BLOCK=launch.SORT.block,
        num_warps=launch.SORT.num_warps,
        **launch.OPTIONS,
    )
    return pairs, starts


@kernel(["bias_ptr"])
def grouped_kernel(
    x_ptr,  # [P, K]
    weight_ptr,  # [E, N, K], or [E, K, N] if TRANSPOSED
    bias_ptr,  # [E, num_bias]
    pairs_ptr,  # [P]
    starts_ptr,  # [E + 1]
    out_ptr,  # [P, N]
    num_experts,
    k_units,  # K in units of VEC_K elements
    n_units,  # N in units of VEC_N elements
    num_bias,  # N, or 0: no bias
    stride_x,  # in units of VEC_K elements
    stride_w,  # in units of VEC_K elements, of VEC_N if TRANSPOSED; so is stride_e
    stride_e,
    TRANSPOSED: tl.constexpr,
    EXPERTS: tl.constexpr,
    VEC_K: tl.constexpr,
    VEC_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    first = tl.load(starts_ptr + experts, mask=known, other=0)
    end = tl.load(starts_ptr + experts + 1, mask=known, other=0)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles)
    expert = tl.sum((known & (upto <= tile)).to(tl.int64))
    own = experts == expert
    start = tl.sum(tl.where(own, first + (tile - upto + tiles) * BLOCK_M, 0))
    place = start + tl.arange(0, BLOCK_M)
    row_mask = place < tl.sum(tl.where(own, end, 0))
    row = tl.load(pairs_ptr + place, mask=row_mask, other=0)

    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = n < n_units * VEC_N
    # Tiles behind the last one walk along nothing.
    width = tl.where(expert < num_experts, k_units * VEC_K, 0)
    x_tile = x_ptr + (row * stride_x)[:, None] * VEC_K + k[None, :]
    if TRANSPOSED:
        w_first = weight_ptr + expert * stride_e * VEC_N
        w_tile = w_first + (k.to(tl.int64) * stride_w)[:, None] * VEC_N + n[None, :]
        w_step = stride_w.to(tl.int64) * (VEC_N * BLOCK_K)
    else:
        w_first = weight_ptr + expert * stride_e * VEC_K
        w_tile = w_first + (n * stride_w)[None, :] * VEC_K + k[:, None]
        w_step = BLOCK_K
    acc = product(x_tile, w_tile, w_step, row_mask, n_mask, width, BLOCK_M, BLOCK_N, BLOCK_K)

    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    biases = tl.where(expert < num_experts, num_bias, 0)
    bias = tl.load(bias_ptr + expert * num_bias + n, mask=n < biases, other=0.0)
    out = (acc + bias.to(DTYPE).to(tl.float32)[None, :]).to(DTYPE)
    out_tile = out_ptr + (row * n_units)[:, None] * VEC_N + n[None, :]
    tl.store(out_tile, out, mask=row_mask[:, None] & n_mask[None, :])


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Tensor, starts: Tensor
) -> Tensor:
    """Every pair of x [P, K] times the weight of its expert, plus its bias -> [P, N]; the bits of a
    pair depend on itself and its expert alone, and are those of ``linear``.

    x bf16, fp16 or fp32; weight [E, N, K] (K or N contiguous; anything else is copied), bias
    [E, N] or None, rounded to x's dtype as they are read; pairs, starts: of ``sort_by_expert``.
    """
    (count, width), (num_experts, outputs, _) = x.shape, weight.shape
    assert weight.shape == (num_experts, outputs, width) and width > 0 and outputs > 0
    assert bias is None or (bias.shape == (num_experts, outputs) and bias.is_contiguous())

    wider = max(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    vec_k, vec_n = launch.vector(wider, width), launch.vector(wider, outputs)
    transposed = weight.stride(2) != 1 and weight.stride(1) == 1
    vec_w = vec_n if transposed else vec_k
    x = launch.vectorizable(x, vec_k)
    stored = launch.vectorizable(weight.transpose(1, 2) if transposed else weight, vec_w)

    out = torch.empty((count, outputs), dtype=x.dtype, device=x.device)
    entry = launch.linear(x.dtype)
    # A tile of wider weights takes the room of two: with as many stages gfx942 has not enough.
    num_stages = entry.num_stages - (wider != x.dtype)
    most = count // entry.block_m + min(num_experts, count)
    grouped_kernel[(most, triton.cdiv(outputs, entry.block_n))](
        x_ptr=x,
        weight_ptr=stored,
        bias_ptr=stored if bias is None else bias,
        pairs_ptr=pairs,
        starts_ptr=starts,
        out_ptr=out,
        num_experts=num_experts,
        k_units=width // vec_k,
        n_units=outputs // vec_n,
        num_bias=0 if bias is None else outputs,
        stride_x=x.stride(0) // vec_k,
        stride_w=stored.stride(1) // vec_w,
        stride_e=stored.stride(0) // vec_w,
        TRANSPOSED=transposed,
        EXPERTS=launch.next_power_of_2(num_experts),
        VEC_K=vec_k,
        VEC_N=vec_n,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        BLOCK_K=entry.block_k,
        num_warps=entry.num_warps,
        num_stages=num_stages,
        **launch.OPTIONS,
    )
    return out


@kernel(["index_ptr", "scale_ptr"])
def add_kernel(
    out_ptr,  # [R * slots, H]
    index_ptr,  # [R, slots]
    scale_ptr,  # [R, slots]
    sum_ptr,  # [R, H]
    slots,
    size_units,  # H in units of VEC elements
    ROUND: tl.constexpr,
    SLOTS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size_units * VEC
    slot = tl.arange(0, SLOTS)
    chosen = tl.load(index_ptr + row * slots + slot, mask=slot < slots, other=1 << 30)
    same = (chosen[None, :] == chosen[:, None]) & (slot[None, :] < slot[:, None])
    rank = tl.sum(((chosen[None, :] < chosen[:, None]) | same).to(tl.int32), axis=1)

    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(0, slots):
        pair = row * slots + tl.sum(tl.where(rank == turn, slot, 0))
        out_row = out_ptr + pair * size_units * VEC
        part = tl.load(out_row + column, mask=mask, other=0.0).to(tl.float32)
        part *= tl.load(scale_ptr + pair).to(tl.float32)
        if ROUND:
            part = part.to(out_ptr.dtype.element_ty).to(tl.float32)
        total = tl.where(turn == 0, part, total + part)
    sum_row = sum_ptr + row * size_units * VEC
    tl.store(sum_row + column, total.to(sum_ptr.dtype.element_ty), mask=mask)


def add_experts(out: Tensor, scales: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """out [R * k, H], one for each expert of a row, scales and index [R, k] -> [R, H] in ``dtype``:
    out times scales, in the wider dtype of both, added in fp32 in ascending order of ``index``."""
    (rows, slots), size = index.shape, out.shape[1]
    assert out.is_contiguous()
    vec = launch.vector(out.dtype, size)
    found = torch.empty((rows, size), dtype=dtype, device=out.device)
    add_kernel[(rows, triton.cdiv(size, launch.ADD_EXPERTS.block))](
        out_ptr=launch.vectorizable(out, size),
        index_ptr=index.contiguous(),
        scale_ptr=scales.contiguous(),
        sum_ptr=found,
        slots=slots,
        size_units=size // vec,
        ROUND=out.dtype == scales.dtype and out.dtype != torch.float32,
        SLOTS=launch.next_power_of_2(slots),
        VEC=vec,
        BLOCK=launch.ADD_EXPERTS.block,
        num_warps=launch.ADD_EXPERTS.num_warps,
        **launch.OPTIONS,
    )
    return found
