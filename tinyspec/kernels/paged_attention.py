"""Paged attention: a work list for the pass, and two launches a layer.

Neither a grid nor an argument depends on the lengths of a pass, nor on how its rows are divided
among its sequences. The formula and the order of reduction stand in ``attention_kernel``. The work
list says what a fixed number of programs compute in one pass.

A tile is the rows of one segment that share a tile of query rows; a unit is one split of keys of
one tile and one head (a KV head, or a part of its query heads). Units are numbered tile by tile,
head by head, split by split; program p owns those from p * U / programs on, up to the next
program's, so all have as much to do, whatever the pass holds. Where such a cut falls among the
splits of a tile and head, their partial results are merged afterwards.

Cuts are moved to the tile and head that they fall into where cutting gains little (few splits) or
where the workspace is full. They say who computes what, never in which order anything is added.

The list is built on the device once a pass and kind of layer: no shape, grid or argument depends on
what the pass holds. Knows rows, lengths and windows; neither queries nor pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.attention_kernel import (
    FIELDS,
    LOG2E,
    attention_kernel,
    lowest_key,
    merge_kernel,
)
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.jit import kernel

# A window or chunk that masks nothing.
UNBOUNDED = 2**31 - 1
# A tile and head with less than a fourth of what a program has to do is not cut.
LEAST_PART = tl.constexpr(4)
# Of the work list: segments and tiles looked at together, and starts that a program makes.
BLOCK_S, BLOCK_T, BLOCK_P = 32, 128, 16


@triton.jit
def segment_tiles(cu_seqlens_ptr, first, num_segments, tile_rows, BLOCK_S: tl.constexpr):
    """[BLOCK_S] tiles of the segments from ``first`` on, 0 behind the last."""
    s = first + tl.arange(0, BLOCK_S)
    mask = s < num_segments
    rows = tl.load(cu_seqlens_ptr + s + 1, mask=mask, other=0)
    return tl.cdiv(rows - tl.load(cu_seqlens_ptr + s, mask=mask, other=0), tile_rows)


@kernel(["cu_seqlens_ptr", "seq_lens_ptr"])
def work_kernel(
    cu_seqlens_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    tile_ptr,  # [tiles, FIELDS] int32
    start_ptr,  # [programs + 1, 3] int32
    num_segments,
    tile_rows,
    heads,  # of a tile, each a unit per split
    group_shift,  # log2 of the heads of one row in a tile
    window,
    chunk,
    programs,
    entries,  # of the workspace, each for one split of one row of one head
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A program makes BLOCK_P of the starts. All make all tiles, so that none waits for another:
    what they store is the same, and each reads what it has stored itself."""
    num_tiles = num_segments * 0
    for first in range(0, num_segments, BLOCK_S):
        num_tiles += tl.sum(segment_tiles(cu_seqlens_ptr, first, num_segments, tile_rows, BLOCK_S))

    # Every tile but its entry, and the number of splits of all.
    all_splits = num_tiles * 0
    for first in range(0, num_tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        valid = t < num_tiles
        segment = t * 0
        first_tile = t * 0
        tiles_before = num_tiles * 0
        for some in range(0, num_segments, BLOCK_S):
            tiles = segment_tiles(cu_seqlens_ptr, some, num_segments, tile_rows, BLOCK_S)
            ends = tiles_before + tl.cumsum(tiles, axis=0)
            before = ends[None, :] <= t[:, None]
            segment += tl.sum(before.to(tl.int32), axis=1)
            last_end = tl.max(tl.where(before, ends[None, :], 0), axis=1)
            first_tile = tl.maximum(first_tile, last_end)
            tiles_before += tl.sum(tiles)
        seg_start = tl.load(cu_seqlens_ptr + segment, mask=valid, other=0)
        seg_rows = tl.load(cu_seqlens_ptr + segment + 1, mask=valid, other=0) - seg_start
        first_row = (t - first_tile) * tile_rows
        tile_size = tl.minimum(seg_rows - first_row, tile_rows)
        position = tl.load(seq_lens_ptr + segment, mask=valid, other=0) - seg_rows + first_row
        first_split = lowest_key(position, window, chunk) // SPLIT
        splits = (position + tile_size - 1) // SPLIT + 1 - first_split
        record = tile_ptr + t * FIELDS
        tl.store(record, segment, mask=valid)
        tl.store(record + 1, first_row, mask=valid)
        tl.store(record + 2, tile_size, mask=valid)
        tl.store(record + 3, first_split, mask=valid)
        tl.store(record + 4, splits, mask=valid)
        tl.store(record + 6, group_shift + t * 0, mask=valid)
        all_splits += tl.sum(tl.where(valid, splits, 0), axis=0)
    tl.debug_barrier()

    # Entries, and the tile in which each program begins.
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    units = (all_splits * heads).to(tl.int64)
    cut = (p * units // programs).to(tl.int32)
    my_tile = p * 0
    my_unit = p * 0
    units_before = num_tiles * 0
    entries_before = (num_tiles * 0).to(tl.int64)
    for first in range(0, num_tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        valid = t < num_tiles
        record = tile_ptr + t * FIELDS
        splits = tl.load(record + 4, mask=valid, other=0)
        tile_size = tl.load(record + 2, mask=valid, other=0)
        wanted = splits * LEAST_PART * programs > units
        needed = tl.where(wanted, splits * heads * (tile_size << group_shift), 0).to(tl.int64)
        entry_end = entries_before + tl.cumsum(needed, axis=0)
        divisible = wanted & (entry_end <= entries)
        tl.store(record + 5, tl.where(divisible, entry_end - needed, -1), mask=valid)

        unit_end = units_before + tl.cumsum(splits * heads, axis=0)
        before = (unit_end[None, :] <= cut[:, None]) & valid[None, :]
        my_tile += tl.sum(before.to(tl.int32), axis=1)
        my_unit = tl.maximum(my_unit, tl.max(tl.where(before, unit_end[None, :], 0), axis=1))
        units_before += tl.sum(splits * heads, axis=0)
        entries_before += tl.sum(needed, axis=0)
    tl.debug_barrier()

    record = tile_ptr + my_tile * FIELDS
    splits = tl.load(record + 4, mask=my_tile < num_tiles, other=1)
    entry = tl.load(record + 5, mask=my_tile < num_tiles, other=-1)
    item = my_tile * heads + (cut - my_unit) // splits
    split = (cut - my_unit) % splits
    # Moved to the item's first split, if it is not to be cut.
    cut -= tl.where(entry < 0, split, 0)
    split = tl.where(entry < 0, 0, split)
    start = start_ptr + 3 * p
    tl.store(start, item, mask=p <= programs)
    tl.store(start + 1, split, mask=p <= programs)
    tl.store(start + 2, cut, mask=p <= programs)


class WorkList(NamedTuple):
    """Item i is head ``i % heads`` of tile ``i // heads``. Program p begins at split
    ``starts[p, 1]`` of item ``starts[p, 0]``, which is unit ``starts[p, 2]``, and ends where p + 1
    begins."""

    tiles: Tensor  # [tiles, FIELDS] int32, in use as many as the pass has
    starts: Tensor  # [programs + 1, 3] int32


def work_list(
    metadata: AttentionMetadata, num_rows: int, *, split: int, programs: int, **settings: int
) -> WorkList:
    """The list of a pass of ``num_rows`` rows, the same one for all layers that ask for the same.

    split: tokens. settings: as ``work_kernel`` has them.
    """
    key = "attention work", num_rows, split, programs, *settings.values()
    if (found := metadata.derived.get(key)) is not None:
        return found
    num_segments, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    most = min(num_rows, num_segments + num_rows // settings["tile_rows"])
    tiles = torch.empty((most, FIELDS.value), dtype=torch.int32, device=device)
    starts = torch.empty((programs + 1, 3), dtype=torch.int32, device=device)
    work_kernel[(triton.cdiv(programs + 1, BLOCK_P),)](
        cu_seqlens_ptr=metadata.cu_seqlens_q,
        seq_lens_ptr=metadata.seq_lens,
        tile_ptr=tiles,
        start_ptr=starts,
        num_segments=num_segments,
        programs=programs,
        **settings,
        SPLIT=split,
        BLOCK_S=BLOCK_S,
        BLOCK_T=BLOCK_T,
        BLOCK_P=BLOCK_P,
        num_warps=4,
        **launch.OPTIONS,
    )
    return metadata.derived.setdefault(key, WorkList(tiles, starts))


def workspace(
    metadata: AttentionMetadata, entries: int, programs: int, block_m: int, like: Tensor
) -> dict[str, Tensor]:
    """Results of splits, for heads as wide as those of ``like``: an entry for a row and query head,
    and a tile for every program. The layers of a pass share it."""
    dim = launch.padded(like.shape[-1])
    shapes = {
        "part_acc_ptr": (entries, dim),
        "part_highest_ptr": (entries,),
        "part_total_ptr": (entries,),
        "state_ptr": (programs, 2, block_m, dim),
    }
    key = "attention workspace", *shapes.values()
    if key not in metadata.derived:
        metadata.derived[key] = {
            name: torch.empty(shape, dtype=torch.float32, device=like.device)
            for name, shape in shapes.items()
        }
    return metadata.derived[key]


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
    assert metadata.page_size & (metadata.page_size - 1) == 0
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
    parts = dict(workspace(metadata, entries, programs, entry.block_m, q))
    state = parts.pop("state_ptr")
    shared = {
        "sink_ptr": q if sinks is None else sinks,
        "cu_seqlens_ptr": metadata.cu_seqlens_q,
        "tile_ptr": tiles,
        "start_ptr": starts,
        "out_ptr": out,
        **parts,
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
        state_ptr=state,
        page_shift=metadata.page_size.bit_length() - 1,
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
    merge_kernel[(programs, launch.MERGE_PROGRAMS)](
        group_shift=group_shift,
        num_rows=num_rows,
        num_segments=num_segments,
        BLOCK_R=merging.block,
        num_warps=merging.num_warps,
        **shared,
        **launch.OPTIONS,
    )
    return out
