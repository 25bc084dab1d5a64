"""Twin of accept/truncate: the longest matching prefix of every verifying request at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AcceptResult(NamedTuple):
    """All [S] int32.

    num_committed: tokens that become final, the bonus token included; at least 1.
    num_accepted:  those of them that equal their draft.
    drafts_left:   drafts after the committed ones that stay pending.
    pages_to_free: pages that hold only rolled-back tokens.
    stopped:       1 where the last of them is a stop token or the request may commit no more.
    """

    num_committed: Tensor
    num_accepted: Tensor
    drafts_left: Tensor
    pages_to_free: Tensor
    stopped: Tensor


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
    num_rows [S]: rows verified, 1 to draft_lens + 1 (fewer than that: a partial verify).
    start [S]: position of row 0. remaining [S]: tokens the request may still commit, at least 1.
    stop_ids [S, K], padded with -1. pages_held [S]. Method: LLM-42, arXiv 2601.17768.
    """
    place = torch.arange(drafts.shape[1], dtype=torch.int64, device=drafts.device)
    row = place < num_rows[:, None]
    match = (drafts == targets) & (place < draft_lens[:, None]) & row
    agreed = match.long().cumprod(-1).sum(-1)
    # A row is committed when every row before it agreed with its draft.
    committed = torch.minimum(torch.minimum(agreed + 1, num_rows), remaining)
    stop = (targets[:, :, None] == stop_ids[:, None, :]).any(-1) & (place < committed[:, None])
    at_stop = torch.where(stop, place, drafts.shape[1]).amin(-1)
    committed = torch.minimum(committed, at_stop + 1)
    stopped = (at_stop < drafts.shape[1]) | (committed == remaining)
    accepted = torch.minimum(agreed, committed)
    intact = (accepted == committed) & ~stopped
    drafts_left = torch.where(intact, draft_lens - committed, 0)
    kept = (start + committed + drafts_left + page_size - 1) // page_size
    to_free = (pages_held - kept).clamp(min=0)
    return AcceptResult(
        *(found.int() for found in (committed, accepted, drafts_left, to_free, stopped))
    )
