"""Short convolution over pages: what a row makes of itself and of the rows before it in its
sequence, each channel by itself.

    y[r] = bias + sum over j of weight[:, j] * x[position of r - (K - 1 - j)],  j = 0 .. K - 1

x [R, C] in one dtype, weight [C, K]; a row before the first of its sequence is 0. Rows of the same
segment are read where they are given, those before it from the pages, and every row is written to
its slot; or from rings, to which ``keep_rows`` writes. A program owns BLOCK channels of one row.
Summed in fp32, oldest first, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.jit import kernel


@kernel(["weight_ptr", "bias_ptr", "slot_ptr", "table_ptr", "first_ptr", "length_ptr"])
def short_conv_kernel(
    x_ptr,  # [R, C]
    weight_ptr,  # [C, K]
    bias_ptr,  # [C]
    pool_ptr,  # [N * page_size, C]
    slot_ptr,  # [R] int64
    table_ptr,  # [S, P] int32
    first_ptr,  # [S + 1] int32
    length_ptr,  # [S] int32
    out_ptr,  # [R, C]
    channel_units,  # C in units of VEC elements
    stride_x,  # of rows, in units of VEC elements
    segments,
    page_size,
    stride_table,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RING: tl.constexpr,  # table_ptr: [S] int32, rings of page_size tokens
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels = channel_units * VEC
    mask = channel < channels
    x_row = x_ptr + row.to(tl.int64) * stride_x * VEC
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty

    # The segment of the row: how many end before it. Rows behind all of them are padding.
    segment = 0
    for start in range(0, segments, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        ends = tl.load(first_ptr + 1 + s, mask=s < segments, other=row + 1)
        segment += tl.sum((ends <= row).to(tl.int32), axis=0)
    live = segment < segments
    segment = tl.minimum(segment, segments - 1)
    first = tl.load(first_ptr + segment)
    end = tl.load(first_ptr + segment + 1)
    position = tl.load(length_ptr + segment) - (end - row)
    pages = table_ptr + segment.to(tl.int64) * stride_table

    if not RING:
        slot = tl.load(slot_ptr + row)
        own = tl.load(x_row + channel, mask=mask, other=0.0)
        if slot >= 0:
            tl.store(pool_ptr + slot * channels + channel, own, mask=mask)
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for j in range(K):
        back = K - 1 - j
        at = position - back
        given = live & (row - back >= first)
        stored = live & (row - back < first) & (at >= 0)
        number = 0 if RING else at // page_size
        page = tl.load(pages + number, mask=stored, other=0).to(tl.int64)
        there = pool_ptr + (page * page_size + at % page_size) * channels
        held = tl.load(there + channel, mask=channel < tl.where(stored, channels, 0), other=0.0)
        before = x_row - back * stride_x * VEC
        fresh = tl.load(before + channel, mask=channel < tl.where(given, channels, 0), other=0.0)
        value = (fresh + held).to(tl.float32)  # one of them is 0
        weight = tl.load(weight_ptr + channel * K + j, mask=mask, other=0.0).to(DTYPE)
        total += value * weight.to(tl.float32)
    out_row = out_ptr + row.to(tl.int64) * channels
    tl.store(out_row + channel, total.to(DTYPE), mask=mask)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
    ring: bool = False,
) -> Tensor:
    """The convolution of the rows of a pass, [R, C].

    x [R, C], weight [C, K], read in the dtype of x, bias [C] or None, pool [N, page_size, 1, C]
    in the dtype of x, slot_mapping [R] int64 as for the KV write. ring: the pool [N, L, C] is of
    ``metadata.checkpoints``, and only read. Padding rows get the bias.
    """
    rows, channels = x.shape
    assert weight.shape[0] == channels == pool.shape[-1] and pool.dtype == x.dtype
    assert pool.is_contiguous() and slot_mapping.is_contiguous() and weight.is_contiguous()
    assert bias is None or (bias.shape == (channels,) and bias.is_contiguous())
    assert launch.aligned(pool)
    vec = launch.vector(x.dtype, channels)
    x = launch.vectorizable(x, vec)
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    entry = launch.SHORT_CONV
    table, size = metadata.page_table, metadata.page_size
    if ring:
        assert metadata.checkpoints is not None
        table, size = metadata.checkpoints.owners, pool.shape[1]
    short_conv_kernel[(rows, triton.cdiv(channels, entry.block))](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=x if bias is None else bias,
        pool_ptr=pool,
        slot_ptr=slot_mapping,
        table_ptr=table,
        first_ptr=metadata.cu_seqlens_q,
        length_ptr=metadata.seq_lens,
        out_ptr=out,
        channel_units=channels // vec,
        stride_x=x.stride(0) // vec,
        segments=len(metadata.seq_lens),
        page_size=size,
        stride_table=table.stride(0),
        K=weight.shape[1],
        BIAS=bias is not None,
        RING=ring,
        VEC=vec,
        BLOCK=entry.block,
        BLOCK_S=launch.SEGMENTS,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return out
