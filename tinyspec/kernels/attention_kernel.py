"""The kernels of paged attention: one reduction for decode, prompt and verify rows.

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))        s_j = cap(scale * q . k_j)

q [R, Hq, D], caches [N, page_size, Hkv, D], in q's dtype or as e4m3 codes (uint8), whose values are
exact in it. The query heads that share a kv head are packed, row by row, into tiles of BLOCK_M. A
program owns the units that the work list gives it, each a split of SPLIT keys of one tile and kv
head, and walks their keys in tiles of BLOCK_N.

Order of reduction, for every row: tiles from position 0 within a split (online softmax, fp32), the
partial (max, sum, acc) closed at every split boundary, partials merged in order by ``merge``. A
tile or split that is all masked for a row does not change its state by a bit: the maximum stays,
the correction is exp2(0) = 1, what is added is 0. So a row's bits depend on its own sequence alone,
not on the rows, segments or pages around it, nor on who computes what. Tiles that no row of the
program attends to are skipped.

Where one program has all splits of a tile and head, it merges them as it goes and stores the
result; otherwise every split's partial goes to the workspace, and ``merge_kernel`` merges them in
the same order. One binary serves both. A row's state is (highest score, sum, weighted values);
scores are kept in units of log2(e), for exp2.

A masked key weighs 0, but 0 * NaN is NaN: so values in a cache are finite, which ``kv_write`` sees
to, also where nothing was written yet. One that was not is NaN in its key, and so are the scores of
the rows that attend to it: it reaches these rows and no others. A code of NaN is multiplied as 480.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tinyspec.kernels.jit import kernel
from tinyspec.kernels.kv_write import decode, not_numbers

LOG2E = math.log2(math.e)
# Pointers whose alignment must not make another binary.
POINTERS = ["page_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "sink_ptr"]
# Of a tile: segment, its first row in it, rows, first split, splits, first entry of the workspace
# (-1: it has none, and is not cut), log2 of the heads of a row.
FIELDS = tl.constexpr(7)
# Splits whose partial results are loaded before they are merged.
AHEAD = tl.constexpr(4)


@triton.jit
def lowest_key(position, window, chunk):
    """First key that a row at ``position`` attends to: that of its window or chunk."""
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def merge(highest, total, acc, new_highest, new_total, new_acc):
    """Running state [rows], [rows], [rows, D] and the next partial; either may be empty
    (-inf, 0, 0)."""
    top = tl.maximum(highest, new_highest)
    shift = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(highest - shift)
    new = tl.exp2(new_highest - shift)
    return top, total * old + new_total * new, acc * old[:, None] + new_acc * new[:, None]


@triton.jit
def finish(highest, total, acc, sink):
    """acc / total, with one more logit (-inf for none) in the total."""
    top = tl.maximum(highest, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    scale = tl.exp2(highest - shift)
    total = total * scale + tl.exp2(sink - shift)
    return acc * (scale / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def tanh(x):
    """By exp2, and by its series near 0, where 1 - 2 / (e + 1) would cancel."""
    # 2 * log2(e)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    y = x * x
    near = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488)))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0.0, -far, far))


@triton.jit
def sink_logits(sink_ptr, head, mask, SINKS: tl.constexpr):
    """Sink logits of the heads in units of log2(e); -inf without sinks."""
    if SINKS:
        return tl.load(sink_ptr + head, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
    else:
        return tl.full(head.shape, float("-inf"), tl.float32)


@triton.jit
def rows_and_heads(m, log_heads, head_block, tile_size, group):
    """Row within its tile and head within its group of every query row, and whether it exists."""
    row = m >> log_heads
    head = (head_block << log_heads) + (m & ((1 << log_heads) - 1))
    return row, head, (row < tile_size) & (head < group)


@kernel(POINTERS)
def attention_kernel(
    q_ptr,  # [R, Hq, D]
    k_ptr,  # [N * page_size, Hkv, D]
    v_ptr,  # [N * page_size, Hkv, D]
    sink_ptr,  # [Hq]
    page_table_ptr,  # [S, P] int32
    cu_seqlens_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    tile_ptr,  # [tiles, FIELDS] int32
    start_ptr,  # [programs + 1, 3] int32
    out_ptr,  # [R, Hq, D]
    part_acc_ptr,  # [entries, D_PAD] fp32
    part_highest_ptr,  # [entries] fp32
    part_total_ptr,  # [entries] fp32
    state_ptr,  # [programs, 2, BLOCK_M, D_PAD] fp32
    kv_heads,
    group,
    heads,  # of a tile: KV heads, times the tiles that the query heads of one fill
    page_shift,  # log2 of tokens
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
    CODES: tl.constexpr = k_ptr.dtype.element_ty == tl.uint8
    start = start_ptr + 3 * tl.program_id(0)
    first_item = tl.load(start)
    first_split = tl.load(start + 1)
    last_item = tl.load(start + 3)
    q_heads = kv_heads * group
    head_blocks = heads // kv_heads
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    d_mask = d < D
    in_page = (1 << page_shift) - 1

    item = first_item
    split = first_split
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(tl.load(start + 2), tl.load(start + 5)):
        record = tile_ptr + item // heads * FIELDS
        s = tl.load(record)
        first_row = tl.load(record + 1)
        tile_size = tl.load(record + 2)
        splits = tl.load(record + 4)
        split_start = (tl.load(record + 3) + split) * SPLIT
        head_block = item % heads % head_blocks
        kv_head = item % heads // head_blocks
        seg_start = tl.load(cu_seqlens_ptr + s)
        seg_end = tl.load(cu_seqlens_ptr + s + 1)
        first_position = tl.load(seq_lens_ptr + s) - (seg_end - seg_start) + first_row
        # Keys that any row of the tile attends to: lowest..end - 1.
        end = first_position + tile_size
        lowest = lowest_key(first_position, window, chunk)

        # Loaded, here and below, so that what follows from it is not held in registers throughout.
        log_heads = tl.load(record + 6)
        row, head, valid = rows_and_heads(m, log_heads, head_block, tile_size, group)
        position = first_position + row
        row_lowest = lowest_key(position, window, chunk)
        pass_row = (seg_start + first_row).to(tl.int64)
        table_ptr = page_table_ptr + s.to(tl.int64) * stride_table
        q_tile = q_ptr + (pass_row * stride_qr + kv_head.to(tl.int64) * group * stride_qh) * VEC
        # Within a tile 32 bits are enough and take half the registers.
        in_tile = (row * stride_qr + head * stride_qh)[:, None] * VEC + d[None, :]
        k_head, v_head = k_ptr + kv_head * D, v_ptr + kv_head * D
        q = tl.load(q_tile + in_tile, mask=valid[:, None] & d_mask[None, :], other=0.0)

        split_highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_total = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        first_key = tl.maximum(split_start, lowest // BLOCK_N * BLOCK_N)
        end_key = tl.minimum(end, split_start + SPLIT)
        # The pages of a tile of keys are looked up a turn earlier: so no copy of K or V waits for
        # them, and those of several tiles are under way at a time. Keys that are none of the tile's
        # are read from page 0, and masked.
        next_key = first_key + tl.arange(0, BLOCK_N)
        in_use = (next_key >= lowest) & (next_key < end)
        page = tl.load(table_ptr + (next_key >> page_shift), mask=in_use, other=0)
        for start_key in range(first_key, end_key, BLOCK_N):
            key = start_key + tl.arange(0, BLOCK_N)
            slot = (page.to(tl.int64) << page_shift) + (key & in_page)
            kv_offset = (slot * (kv_heads * D))[:, None] + d[None, :]
            next_key += BLOCK_N
            in_use = (next_key >= lowest) & (next_key < end)
            page = tl.load(table_ptr + (next_key >> page_shift), mask=in_use, other=0)

            k = tl.load(k_head + kv_offset, mask=d_mask[None, :], other=0.0)
            v = tl.load(v_head + kv_offset, mask=d_mask[None, :], other=0.0)
            if CODES:
                k, v = decode(k), decode(v)
                nothing = not_numbers(k)
                k, v = k.to(q.dtype), v.to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
            if CAPPED:
                scores = cap * tanh(scores)
            if CODES:
                scores += nothing[None, :]
            seen = (key[None, :] <= position[:, None]) & (key[None, :] >= row_lowest[:, None])
            scores = tl.where(seen, scores, float("-inf"))

            top = tl.maximum(split_highest, tl.max(scores, axis=1))
            # A row without a key so far keeps (-inf, 0, 0).
            shift = tl.where(top == float("-inf"), 0.0, top)
            decay = tl.exp2(split_highest - shift)
            p = tl.exp2(scores - shift[:, None])
            split_total = split_total * decay + tl.sum(p, axis=1)
            split_highest = top
            split_acc = tl.dot(p.to(v.dtype), v, split_acc * decay[:, None], input_precision="ieee")

        used = m < tile_size << tl.load(record + 6)
        if (item < last_item) & ((item > first_item) | (first_split == 0)):
            # All splits of the item are this program's. What they add up to so far waits in
            # memory, which takes half the registers: read from one tile, written to the other.
            state = state_ptr + 2 * tl.program_id(0).to(tl.int64) * (BLOCK_M * D_PAD)
            earlier = state + (1 - split % 2) * (BLOCK_M * D_PAD)
            if split > 0:
                acc = tl.load(
                    (earlier + m[:, None] * D_PAD) + d[None, :], mask=used[:, None], other=0.0
                )
                highest, total, acc = merge(
                    highest, total, acc, split_highest, split_total, split_acc
                )
            else:
                # As merged with nothing: -0 becomes 0.
                highest, total, acc = split_highest, split_total, split_acc + 0.0
            if split + 1 < splits:
                later = state + split % 2 * (BLOCK_M * D_PAD)
                tl.store((later + m[:, None] * D_PAD) + d[None, :], acc, mask=used[:, None])
                # Threads do not load what they have stored themselves.
                tl.debug_barrier()
            else:
                log_heads = tl.load(record + 6)
                row, head, valid = rows_and_heads(m, log_heads, head_block, tile_size, group)
                sink = sink_logits(sink_ptr + kv_head * group, head, valid, SINKS)
                out = finish(highest, total, acc, sink).to(out_ptr.dtype.element_ty)
                out_tile = out_ptr + (pass_row * q_heads + kv_head * group) * D
                in_tile = (row * q_heads + head)[:, None] * D + d[None, :]
                tl.store(out_tile + in_tile, out, mask=valid[:, None] & d_mask[None, :])
        else:
            entry = (item % heads * splits + split) * (tile_size << tl.load(record + 6))
            entry = (tl.load(record + 5) + entry).to(tl.int64)
            tl.store(part_highest_ptr + entry + m, split_highest, mask=used)
            tl.store(part_total_ptr + entry + m, split_total, mask=used)
            part = part_acc_ptr + entry * D_PAD
            tl.store((part + m[:, None] * D_PAD) + d[None, :], split_acc, mask=used[:, None])
        split += 1
        item = tl.where(split == splits, item + 1, item)
        split = tl.where(split == splits, 0, split)


@kernel(POINTERS)
def merge_kernel(
    part_acc_ptr,  # [entries, D_PAD] fp32
    part_highest_ptr,  # [entries] fp32
    part_total_ptr,  # [entries] fp32
    sink_ptr,  # [Hq]
    cu_seqlens_ptr,  # [S + 1] int32
    tile_ptr,  # [tiles, FIELDS] int32
    start_ptr,  # [programs + 1, 3] int32
    out_ptr,  # [R, Hq, D]
    num_rows,
    num_segments,
    kv_heads,
    group,
    group_shift,  # log2 of the heads of one row in a tile
    heads,  # of a tile
    SINKS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    p = tl.program_id(0)
    q_heads = kv_heads * group
    d = tl.arange(0, D_PAD)[None, :]
    r = tl.arange(0, BLOCK_R)

    # Padding rows are 0.
    row_end = tl.load(cu_seqlens_ptr + num_segments).to(tl.int64) * q_heads
    stride = tl.num_programs(0) * tl.num_programs(1) * BLOCK_R
    begin = row_end + (p * tl.num_programs(1) + tl.program_id(1)) * BLOCK_R
    for entry in range(begin, num_rows.to(tl.int64) * q_heads, stride):
        entries = entry + r[:, None]
        zero = tl.zeros([BLOCK_R, D_PAD], out_ptr.dtype.element_ty)
        mask = (entries < num_rows.to(tl.int64) * q_heads) & (d < D)
        tl.store(out_ptr + entries * D + d, zero, mask=mask)

    # The first cut of an item merges all of it.
    start = start_ptr + 3 * p
    item = tl.load(start)
    if tl.load(start + 1) == 0:
        return
    if (tl.load(start - 3) == item) & (tl.load(start - 2) > 0):
        return
    record = tile_ptr + item // heads * FIELDS
    first_row = tl.load(cu_seqlens_ptr + tl.load(record)) + tl.load(record + 1)
    tile_size = tl.load(record + 2)
    splits = tl.load(record + 4)
    tile_heads = tile_size << group_shift
    first_entry = (tl.load(record + 5) + item % heads * splits * tile_heads).to(tl.int64)
    head_blocks = heads // kv_heads
    kv_head = item % heads // head_blocks
    head_block = item % heads % head_blocks

    for first in range(tl.program_id(1) * BLOCK_R, tile_heads, tl.num_programs(1) * BLOCK_R):
        m = first + r
        row = m >> group_shift
        head = head_block * BLOCK_M + (m & ((1 << group_shift) - 1))
        valid = (row < tile_size) & (head < group)
        mask = valid[:, None] & (d < D)
        highest = tl.full([BLOCK_R], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, D_PAD], tl.float32)
        for split in tl.range(0, splits, num_stages=AHEAD):
            part = first_entry + split * tile_heads + m
            part_highest = tl.load(part_highest_ptr + part, mask=valid, other=float("-inf"))
            part_total = tl.load(part_total_ptr + part, mask=valid, other=0.0)
            part_acc = tl.load(part_acc_ptr + part[:, None] * D_PAD + d, mask=mask, other=0.0)
            highest, total, acc = merge(highest, total, acc, part_highest, part_total, part_acc)

        sink = sink_logits(sink_ptr + kv_head * group, head, valid, SINKS)
        out = finish(highest, total, acc, sink)
        out_row = (first_row.to(tl.int64) + row) * q_heads + kv_head * group + head
        tl.store(out_ptr + out_row[:, None] * D + d, out.to(out_ptr.dtype.element_ty), mask=mask)
