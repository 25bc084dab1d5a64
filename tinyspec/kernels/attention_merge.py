"""Helpers of both paged-attention kernels, and the second kernel, which merges splits.

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

LOG2E = math.log2(math.e)
# A window or chunk that masks nothing.
UNBOUNDED = 2**31 - 1
# Pointers whose alignment must not make another binary.
POINTERS = ["page_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "sink_ptr"]


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
    do_not_specialize=["num_rows", "q_heads", "window", "chunk"],
    do_not_specialize_on_alignment=POINTERS,
)
def merge_kernel(
    part_acc_ptr,  # [splits, R, Hq, D] fp32
    part_highest_ptr,  # [splits, R, Hq] fp32
    part_total_ptr,  # [splits, R, Hq] fp32
    sink_ptr,  # [Hq]
    cu_seqlens_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    out_ptr,  # [R, Hq, D]
    num_rows,
    q_heads,
    window,
    chunk,
    SINKS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    s = tl.program_id(1)
    seg_start = tl.load(cu_seqlens_ptr + s)
    seg_rows = tl.load(cu_seqlens_ptr + s + 1) - seg_start
    row = tl.program_id(0)
    if row >= seg_rows:
        return
    position = tl.load(seq_lens_ptr + s) - seg_rows + row

    # One row of one head, as a tile of height 1.
    head = tl.program_id(2) + tl.arange(0, 1)
    entry = (seg_start + row).to(tl.int64) * q_heads + head
    d = tl.arange(0, D_PAD)[None, :]
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D_PAD], tl.float32)
    part_stride = num_rows.to(tl.int64) * q_heads
    for split in range(lowest_key(position, window, chunk) // SPLIT, position // SPLIT + 1):
        part = entry + split * part_stride
        part_highest = tl.load(part_highest_ptr + part)
        part_total = tl.load(part_total_ptr + part)
        part_acc = tl.load(part_acc_ptr + part[:, None] * D + d, mask=d < D, other=0.0)
        highest, total, acc = merge(highest, total, acc, part_highest, part_total, part_acc)

    out = finish(highest, total, acc, sink_logits(sink_ptr, head, head < q_heads, SINKS))
    out_ptrs = out_ptr + entry[:, None] * D + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d < D)


class Partials(NamedTuple):
    """Workspace for a partial state per split, R rows and Hq heads each."""

    acc: Tensor  # [splits, R, Hq, D] fp32
    highest: Tensor  # [splits, R, Hq] fp32
    total: Tensor  # [splits, R, Hq] fp32

    @classmethod
    def empty(cls, splits: int, like: Tensor) -> Partials:
        """For the rows, heads and head size of ``like``; unused where splits is 1: one element
        each."""
        rows, heads, dim = like.shape
        shape = (splits, rows, heads) if splits > 1 else (1, 1, 1)
        sizes = ((*shape, dim), shape, shape)
        return cls(*(torch.empty(s, dtype=torch.float32, device=like.device) for s in sizes))


def merge_partials(
    partials: Partials,
    out: Tensor,
    metadata: AttentionMetadata,
    *,
    window: int,
    chunk: int,
    sinks: Tensor | None,
    split: int,
) -> None:
    """Merge the partials of every row's splits, ``split`` tokens each, into out [R, Hq, D]."""
    num_rows, q_heads, dim = out.shape
    grid = (metadata.max_seqlen_q, metadata.seq_lens.shape[0], q_heads)
    merge_kernel[grid](
        part_acc_ptr=partials.acc,
        part_highest_ptr=partials.highest,
        part_total_ptr=partials.total,
        sink_ptr=out if sinks is None else sinks,
        cu_seqlens_ptr=metadata.cu_seqlens_q,
        seq_lens_ptr=metadata.seq_lens,
        out_ptr=out,
        num_rows=num_rows,
        q_heads=q_heads,
        window=window,
        chunk=chunk,
        SINKS=sinks is not None,
        D=dim,
        D_PAD=launch.padded(dim),
        SPLIT=split,
        num_warps=1,
        **launch.OPTIONS,
    )
