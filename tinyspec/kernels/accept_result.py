"""What accept/truncate returns for every verifying request of a pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AcceptResult(NamedTuple):
    """All [S]; ``next_token`` int64, ``stopped`` bool, the rest int32.

    num_committed: tokens that become final, the bonus token included; at least 1.
    num_accepted:  those of them that equal their draft.
    next_token:    the last committed token.
    stopped:       it is a stop token, or the request may commit no more.
    drafts_left:   drafts after the committed ones that stay pending.
    new_lens:      positions whose KV is canonical afterwards.
    pages_to_free: pages that hold only rolled-back tokens.
    """

    num_committed: Tensor
    num_accepted: Tensor
    next_token: Tensor
    stopped: Tensor
    drafts_left: Tensor
    new_lens: Tensor
    pages_to_free: Tensor
