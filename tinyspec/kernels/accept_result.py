"""What accept/truncate returns for every verifying request of a pass."""

from __future__ import annotations

from typing import NamedTuple

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
