"""Helpers of both paged-attention kernels, and the second kernel, which merges cut tiles.

A row's state is (highest score, sum, weighted values); ``merge`` joins it with that of the next
split, wherever the split was computed, so there is one order of additions. Scores are in units of
log2(e), for exp2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.attention_work import FIELDS

LOG2E = math.log2(math.e)
# Pointers whose alignment must not make another binary.
POINTERS = ["page_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "sink_ptr"]
# Splits whose partial results are loaded before they are merged.
AHEAD = tl.constexpr(4)


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
    return acc * scale[:, None] / tl.where(total > 0.0, total, 1.0)[:, None]


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


@triton.jit(
    do_not_specialize=["num_rows", "num_segments", "kv_heads", "group", "group_shift", "heads"],
    do_not_specialize_on_alignment=POINTERS,
)
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


class Workspace(NamedTuple):
    """Results of splits: an entry for a row and query head, and a tile for every program."""

    acc: Tensor  # [entries, D_PAD] fp32
    highest: Tensor  # [entries] fp32
    total: Tensor  # [entries] fp32
    state: Tensor  # [programs, 2, BLOCK_M, D_PAD] fp32

    @classmethod
    def of(
        cls,
        metadata: AttentionMetadata,
        entries: int,
        programs: int,
        block_m: int,
        like: Tensor,
    ) -> Workspace:
        """For heads as wide as those of ``like``; the layers of a pass share it."""
        dim = launch.padded(like.shape[-1])
        shapes = ((entries, dim), (entries,), (entries,), (programs, 2, block_m, dim))
        key = "attention workspace", shapes
        if key not in metadata.derived:
            metadata.derived[key] = cls(
                *(torch.empty(s, dtype=torch.float32, device=like.device) for s in shapes)
            )
        return metadata.derived[key]
