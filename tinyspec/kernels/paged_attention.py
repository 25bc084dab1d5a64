"""Paged attention: one reduction for decode, prompt and verify rows.

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))        s_j = cap(scale * q . k_j)

q [R, Hq, D], caches [N, page_size, Hkv, D]. The query heads that share a kv head are packed, row by
row, into tiles of BLOCK_M; a program owns one such tile and walks the keys in tiles of BLOCK_N.

Order of reduction, for every row: tiles from position 0 within a split of SPLIT tokens (online
softmax, fp32), the partial (max, sum, acc) closed at every split boundary, partials merged in order
by ``merge``. A tile or split that is all masked for a row does not change its state by a
bit: the maximum stays, the correction is exp2(0) = 1, what is added is 0. So a row's bits depend on
its own sequence alone, not on the rows, segments or pages around it. Tiles that no row of the
program attends to are skipped.

It runs in one of two ways with the same bits: a program walks all splits of its rows and stores the
result; or one program per split stores its partial in a workspace, and ``merge_kernel`` merges
those in the same order. One binary serves both. Scores are kept in units of log2(e), for exp2.

A masked key weighs 0, but 0 * NaN is NaN: values that are not finite are multiplied as 0, and the
scores of the rows that attend to them are NaN instead. So they reach these rows and no others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.attention_merge import (
    LOG2E,
    POINTERS,
    UNBOUNDED,
    Partials,
    finish,
    lowest_key,
    merge,
    merge_partials,
    sink_logits,
    tanh,
)
from tinyspec.kernels.attention_metadata import AttentionMetadata


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "kv_heads",
        "group",
        "group_shift",
        "head_blocks",
        "split_programs",
        "page_size",
        "window",
        "chunk",
        "stride_qr",
        "stride_qh",
        "stride_table",
        "score_scale",
        "cap",
    ],
    do_not_specialize_on_alignment=POINTERS,
)
def attention_kernel(
    q_ptr,  # [R, Hq, D]
    k_ptr,  # [N * page_size, Hkv, D]
    v_ptr,  # [N * page_size, Hkv, D]
    sink_ptr,  # [Hq]
    page_table_ptr,  # [S, P] int32
    cu_seqlens_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    out_ptr,  # [R, Hq, D]
    part_acc_ptr,  # [splits, R, Hq, D] fp32
    part_highest_ptr,  # [splits, R, Hq] fp32
    part_total_ptr,  # [splits, R, Hq] fp32
    num_rows,
    kv_heads,
    group,
    group_shift,  # log2 of the heads of one row in a tile
    head_blocks,  # tiles that the heads of one row fill
    split_programs,  # 1: walk all splits; more: one split per program
    page_size,
    window,  # UNBOUNDED: none
    chunk,  # likewise
    stride_qr,  # strides of q in units of VEC elements
    stride_qh,
    stride_table,
    score_scale,
    cap,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    s = tl.program_id(1)
    my_split = tl.program_id(2) % split_programs
    head_block = (tl.program_id(2) // split_programs) % head_blocks
    kv_head = tl.program_id(2) // (split_programs * head_blocks)
    seg_start = tl.load(cu_seqlens_ptr + s)
    seg_rows = tl.load(cu_seqlens_ptr + s + 1) - seg_start
    seq_len = tl.load(seq_lens_ptr + s)

    tile_rows = BLOCK_M >> group_shift
    first_row = tl.program_id(0) * tile_rows
    if first_row >= seg_rows:
        return
    # Keys that any row of this program attends to: lowest..end - 1.
    first_position = seq_len - seg_rows + first_row
    end = tl.minimum(seq_len, first_position + tile_rows)
    lowest = lowest_key(first_position, window, chunk)
    first_split = lowest // SPLIT
    end_split = (end + SPLIT - 1) // SPLIT
    if split_programs > 1:
        first_split = tl.maximum(first_split, my_split)
        end_split = tl.minimum(end_split, my_split + 1)
    if first_split >= end_split:
        return

    m = tl.arange(0, BLOCK_M)
    row = m >> group_shift
    head = head_block * BLOCK_M + (m & ((1 << group_shift) - 1))
    valid = (first_row + row < seg_rows) & (head < group)
    position = first_position + row
    row_lowest = lowest_key(position, window, chunk)
    pass_row = (seg_start + first_row).to(tl.int64)
    first_head = kv_head.to(tl.int64) * group
    table_ptr = page_table_ptr + s.to(tl.int64) * stride_table
    d = tl.arange(0, D_PAD)
    size = page_size.to(tl.uint32)
    d_mask = d < D
    mask = valid[:, None] & d_mask[None, :]

    q_offset = (pass_row + row) * stride_qr + (first_head + head) * stride_qh
    q = tl.load(q_ptr + q_offset[:, None] * VEC + d[None, :], mask=mask, other=0.0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for split in range(first_split, end_split):
        split_highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_total = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        first_key = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
        end_key = tl.minimum(end, (split + 1) * SPLIT)
        for start in range(first_key, end_key, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            live = (key >= lowest) & (key < end)
            # Unsigned division takes fewer instructions.
            page_index = key.to(tl.uint32) // size
            page = tl.load(table_ptr + page_index, mask=live, other=0)
            slot = (page.to(tl.int64) - page_index) * page_size + key
            kv_offset = ((slot * kv_heads + kv_head) * D)[:, None] + d[None, :]
            kv_mask = live[:, None] & d_mask[None, :]

            k = tl.load(k_ptr + kv_offset, mask=kv_mask, other=0.0)
            v = tl.load(v_ptr + kv_offset, mask=kv_mask, other=0.0)
            # 0, or NaN where something is not finite.
            nothing = v * 0.0
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
            if CAPPED:
                scores = cap * tanh(scores)
            scores += tl.sum(nothing, axis=1)[None, :]
            seen = (key[None, :] <= position[:, None]) & (key[None, :] >= row_lowest[:, None])
            scores = tl.where(seen, scores, float("-inf"))

            top = tl.maximum(split_highest, tl.max(scores, axis=1))
            # A row without a key so far keeps (-inf, 0, 0).
            shift = tl.where(top == float("-inf"), 0.0, top)
            decay = tl.exp2(split_highest - shift)
            p = tl.exp2(scores - shift[:, None])
            split_total = split_total * decay + tl.sum(p, axis=1)
            split_highest = top

            v = tl.where(nothing == 0.0, v, 0.0)
            split_acc = tl.dot(p.to(v.dtype), v, split_acc * decay[:, None], input_precision="ieee")
        highest, total, acc = merge(highest, total, acc, split_highest, split_total, split_acc)

    q_heads = kv_heads * group
    entry = pass_row * q_heads + first_head
    # Within a tile 32 bits are enough and take half the registers.
    in_tile = row * q_heads + head
    in_tile_d = in_tile[:, None] * D + d[None, :]
    if split_programs > 1:
        entry += my_split.to(tl.int64) * num_rows * q_heads
        tl.store(part_highest_ptr + entry + in_tile, highest, mask=valid)
        tl.store(part_total_ptr + entry + in_tile, total, mask=valid)
        tl.store(part_acc_ptr + entry * D + in_tile_d, acc, mask=mask)
    else:
        out = finish(highest, total, acc, sink_logits(sink_ptr + first_head, head, valid, SINKS))
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + entry * D + in_tile_d, out, mask=mask)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's pages.

    q [R, Hq, D], last dimension contiguous, caches [N, page_size, Hkv, D] contiguous -> [R, Hq, D]
    in q's dtype; padding rows are 0. window: keys a row attends to, its own included (0: all).
    chunk: a row attends to the keys since the last multiple of it, its own included (0: all; Llama
    4); not along with a window. softcap: c * tanh(s / c) on the scaled scores (0: none). sinks
    [Hq]: one more logit per head in the softmax's denominator. Method: FlashAttention-2 (arXiv
    2307.08691) and its split over keys, both in one order of reduction.
    """
    num_rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    num_segments = metadata.seq_lens.shape[0]
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.stride(-1) == 1
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.shape[1:] == (metadata.page_size, kv_heads, dim) and q_heads % kv_heads == 0
    assert launch.aligned(k_cache, v_cache) and len(metadata.cu_seqlens_q) == num_segments + 1
    for table in (metadata.page_table, metadata.cu_seqlens_q, metadata.seq_lens):
        assert table.dtype == torch.int32 and table.stride(-1) == 1
    assert sinks is None or (sinks.shape == (q_heads,) and sinks.is_contiguous())
    assert window >= 0 and chunk >= 0 and softcap >= 0 and not (window and chunk)

    vec = launch.vector(q.dtype, dim)
    q = launch.vectorizable(q, vec)
    score_scale = scale / softcap if softcap else scale * LOG2E

    out = torch.zeros((num_rows, q_heads, dim), dtype=q.dtype, device=q.device)
    if num_segments == 0 or metadata.max_seqlen_q == 0:
        return out

    entry = launch.attention(q.dtype, dim)
    group = q_heads // kv_heads
    group_pad = min(launch.next_power_of_2(group), entry.block_m)
    head_blocks = triton.cdiv(group, entry.block_m)
    row_tiles = triton.cdiv(metadata.max_seqlen_q, entry.block_m // group_pad)
    programs = row_tiles * num_segments * kv_heads * head_blocks
    splits = triton.cdiv(metadata.max_seqlen_k, entry.split)
    workspace_bytes = 4 * splits * num_rows * q_heads * (dim + 2)
    split_programs = launch.split_programs(programs, splits, workspace_bytes)
    partials = Partials.empty(split_programs, q)
    bounds = {"window": window or UNBOUNDED, "chunk": chunk or UNBOUNDED}

    grid = (row_tiles, num_segments, kv_heads * head_blocks * split_programs)
    attention_kernel[grid](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        sink_ptr=q if sinks is None else sinks,
        page_table_ptr=metadata.page_table,
        cu_seqlens_ptr=metadata.cu_seqlens_q,
        seq_lens_ptr=metadata.seq_lens,
        out_ptr=out,
        part_acc_ptr=partials.acc,
        part_highest_ptr=partials.highest,
        part_total_ptr=partials.total,
        num_rows=num_rows,
        kv_heads=kv_heads,
        group=group,
        group_shift=group_pad.bit_length() - 1,
        head_blocks=head_blocks,
        split_programs=split_programs,
        page_size=metadata.page_size,
        **bounds,
        stride_qr=q.stride(0) // vec,
        stride_qh=q.stride(1) // vec,
        stride_table=metadata.page_table.stride(0),
        score_scale=float(score_scale),
        cap=float(softcap) * LOG2E,
        CAPPED=softcap > 0,
        SINKS=sinks is not None,
        D=dim,
        D_PAD=launch.padded(dim),
        VEC=vec,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        SPLIT=entry.split,
        **entry.options(),
    )
    if split_programs > 1:
        merge_partials(partials, out, metadata, **bounds, sinks=sinks, split=entry.split)
    return out
