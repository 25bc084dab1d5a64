"""Accept/truncate: what a verify commits, for every verifying request at once.

    agreed    = first row whose draft is missing or differs from its target
    committed = min(agreed + 1, num_rows, first stop token + 1, remaining)

drafts and targets [S, W] int64. A program owns one request and walks its rows BLOCK_W at a time;
it reduces integer minima only. Method: LLM-42, arXiv 2601.17768.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.jit import kernel
from tinyspec.kernels.twins.sample import AcceptResult


@kernel(unaligned=None)
def accept_kernel(
    draft_ptr,  # [S, W] int64
    target_ptr,  # [S, W] int64
    num_rows_ptr,  # [S] int32
    draft_len_ptr,  # [S] int32
    start_ptr,  # [S] int32
    remaining_ptr,  # [S] int32
    stop_ptr,  # [S, K] int64
    pages_held_ptr,  # [S] int32
    result_ptr,  # [5, S] int32: in AcceptResult's order
    width,
    num_stops,
    page_size,
    stride_d,
    stride_t,
    stride_s,
    BLOCK_W: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + s)
    draft_len = tl.load(draft_len_ptr + s)
    remaining = tl.load(remaining_ptr + s)

    agreed = num_rows
    at_stop = num_rows
    for first in range(0, width, BLOCK_W):
        place = first + tl.arange(0, BLOCK_W)
        row = (place < num_rows) & (place < width)
        draft = tl.load(draft_ptr + s * stride_d + place, mask=row, other=-1)
        target = tl.load(target_ptr + s * stride_t + place, mask=row, other=-1)
        differs = row & ((draft != target) | (place >= draft_len))
        agreed = tl.minimum(agreed, tl.min(tl.where(differs, place, num_rows), axis=0))
        for i in range(0, num_stops):
            stop = tl.load(stop_ptr + s * stride_s + i)
            hit = row & (target == stop) & (stop >= 0)
            at_stop = tl.minimum(at_stop, tl.min(tl.where(hit, place, num_rows), axis=0))

    committed = tl.minimum(tl.minimum(agreed + 1, num_rows), tl.minimum(at_stop + 1, remaining))
    stopped = (at_stop < committed) | (committed == remaining)
    accepted = tl.minimum(agreed, committed)
    intact = (accepted == committed) & (stopped == 0)
    drafts_left = tl.where(intact, tl.maximum(draft_len - committed, 0), 0)
    new_len = tl.load(start_ptr + s) + committed
    kept = (new_len + drafts_left + page_size - 1) // page_size

    requests = tl.num_programs(0)
    tl.store(result_ptr + s, committed)
    tl.store(result_ptr + requests + s, accepted)
    tl.store(result_ptr + 2 * requests + s, drafts_left)
    to_free = tl.maximum(tl.load(pages_held_ptr + s) - kept, 0)
    tl.store(result_ptr + 3 * requests + s, to_free)
    tl.store(result_ptr + 4 * requests + s, stopped.to(tl.int32))


def accept_truncate(
    drafts: Tensor,
    targets: Tensor,
    num_rows: Tensor,
    draft_lens: Tensor,
    start: Tensor,
    remaining: Tensor,
    stop_ids: Tensor,
    pages_held: Tensor,
    page_size: int,
) -> AcceptResult:
    """Compare drafts with targets: what is committed, kept and freed.

    drafts, targets [S, W] int64: row j of request s yields the canonical token ``targets[s, j]``,
    which ``drafts[s, j]`` guessed; j >= draft_lens[s] has no draft and yields the bonus token.
    num_rows [S] int32: rows verified, 1 to draft_lens + 1. start [S] int32: position of row 0.
    remaining [S] int32: tokens the request may still commit, at least 1. stop_ids [S, K] int64,
    padded with -1. pages_held [S] int32.
    """
    requests, width = drafts.shape
    assert targets.shape == (requests, width) and stop_ids.shape[0] == requests
    assert drafts.dtype == targets.dtype == stop_ids.dtype == torch.int64
    assert drafts.stride(1) == targets.stride(1) == 1
    assert stop_ids.shape[1] <= 1 or stop_ids.stride(1) == 1
    for lens in (num_rows, draft_lens, start, remaining, pages_held):
        assert lens.shape == (requests,) and lens.dtype == torch.int32 and lens.is_contiguous()

    result = torch.empty((5, requests), dtype=torch.int32, device=drafts.device)
    if requests == 0:
        return AcceptResult(*result)

    entry = launch.ACCEPT
    grid = (requests,)
    accept_kernel[grid](
        draft_ptr=drafts,
        target_ptr=targets,
        num_rows_ptr=num_rows,
        draft_len_ptr=draft_lens,
        start_ptr=start,
        remaining_ptr=remaining,
        # An empty tensor has no address, and is never read.
        stop_ptr=stop_ids if stop_ids.shape[1] else drafts,
        pages_held_ptr=pages_held,
        result_ptr=result,
        width=width,
        num_stops=stop_ids.shape[1],
        page_size=page_size,
        stride_d=drafts.stride(0),
        stride_t=targets.stride(0),
        stride_s=stop_ids.stride(0),
        BLOCK_W=entry.block,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return AcceptResult(*result)
