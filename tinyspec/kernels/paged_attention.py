"""Paged attention: a work list for the pass, and two launches a layer.

Neither a grid nor an argument depends on the lengths of a pass, nor on how its rows are divided
among its sequences. The formula and the order of reduction stand in ``attention_kernel``.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.attention_kernel import attention_kernel
from tinyspec.kernels.attention_merge import LOG2E, Workspace, merge_kernel
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.attention_work import UNBOUNDED, work_list


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

    q [R, Hq, D], last dimension contiguous, caches [N, page_size, Hkv, D] contiguous, of q's dtype
    or uint8: e4m3 codes -> [R, Hq, D] in q's dtype; padding rows are 0. window: keys a row attends
    to, its own included (0: all). chunk: a row attends to the keys since the last multiple of it,
    its own included (0: all; Llama 4); not along with a window. softcap: c * tanh(s / c) on the
    scaled scores (0: none). sinks [Hq]: one more logit per head in the softmax's denominator.
    Method: FlashAttention-2 (arXiv 2307.08691) and its split over keys, both in one order of
    reduction.
    """
    num_rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    num_segments = metadata.seq_lens.shape[0]
    assert k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, torch.uint8)
    assert q.stride(-1) == 1
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

    if num_segments == 0:
        return torch.zeros((num_rows, q_heads, dim), dtype=q.dtype, device=q.device)
    out = torch.empty((num_rows, q_heads, dim), dtype=q.dtype, device=q.device)

    entry = launch.attention(q.dtype, dim, q.device, k_cache.dtype == torch.uint8)
    group = q_heads // kv_heads
    group_shift = (min(launch.next_power_of_2(group), entry.block_m) - 1).bit_length()
    heads = kv_heads * triton.cdiv(group, entry.block_m)
    splits = triton.cdiv(metadata.page_table.shape[1] * metadata.page_size, entry.split)
    entries = launch.workspace_entries((num_rows << group_shift) * heads * splits, dim)
    programs = launch.programs(q.device)
    bounds = {"window": window or UNBOUNDED, "chunk": chunk or UNBOUNDED}
    tiles, starts = work_list(
        metadata,
        num_rows,
        tile_rows=entry.block_m >> group_shift,
        heads=heads,
        group_shift=group_shift,
        split=entry.split,
        programs=programs,
        entries=entries,
        **bounds,
    )
    workspace = Workspace.of(metadata, entries, programs, entry.block_m, q)
    shared = {
        "sink_ptr": q if sinks is None else sinks,
        "cu_seqlens_ptr": metadata.cu_seqlens_q,
        "tile_ptr": tiles,
        "start_ptr": starts,
        "out_ptr": out,
        "part_acc_ptr": workspace.acc,
        "part_highest_ptr": workspace.highest,
        "part_total_ptr": workspace.total,
        "kv_heads": kv_heads,
        "group": group,
        "heads": heads,
        "SINKS": sinks is not None,
        "D": dim,
        "D_PAD": launch.padded(dim),
        "BLOCK_M": entry.block_m,
    }
    attention_kernel[(programs,)](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        page_table_ptr=metadata.page_table,
        seq_lens_ptr=metadata.seq_lens,
        state_ptr=workspace.state,
        page_size=metadata.page_size,
        **bounds,
        stride_qr=q.stride(0) // vec,
        stride_qh=q.stride(1) // vec,
        stride_table=metadata.page_table.stride(0),
        score_scale=float(score_scale),
        cap=float(softcap) * LOG2E,
        CAPPED=softcap > 0,
        VEC=vec,
        BLOCK_N=entry.block_n,
        SPLIT=entry.split,
        **shared,
        **entry.options(),
    )
    merging = launch.merge(dim)
    merge_kernel[(programs, merging.programs)](
        group_shift=group_shift,
        num_rows=num_rows,
        num_segments=num_segments,
        BLOCK_R=merging.block_r,
        num_warps=merging.num_warps,
        **shared,
        **launch.OPTIONS,
    )
    return out
