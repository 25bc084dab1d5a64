"""Top-k, top-p and min-p, every row by itself: a row's result depends on that row alone.

Probabilities are summed as 40-bit integers, so the order of addition does not matter, and ties go
to the lowest index; transformers' warpers use an unstable sort and a floating-point scan instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Softmax = Callable[[Tensor], Tensor]
_ONE = 1 << 40


def keep_top_k(logits: Tensor, k: Tensor, most: int | None = None) -> Tensor:
    """Exclude (-inf) all but the ``k[n]`` highest of each row [N, V]; k = 0 keeps all.

    most: the largest of ``k``, none of which is 0; without it the device is asked, and waited for.
    """
    vocab = logits.shape[1]
    k = torch.where(k > 0, k.clamp(max=vocab), vocab).long()
    highest = logits.topk(int(k.max()) if most is None else min(most, vocab)).values
    threshold = highest.gather(1, k[:, None] - 1)
    above = logits > threshold
    tied = logits == threshold
    places = k[:, None] - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= places))
    return logits.masked_fill(~keep, -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor, softmax: Softmax) -> Tensor:
    """Exclude the least likely tokens whose probabilities together are at most 1 - p[n].

    softmax: of rows [N, V], each by itself.
    """
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    shares = (softmax(ordered).double() * _ONE).round().long()
    before = shares.cumsum(-1) - shares
    # The share from this token down to the least likely one must exceed what may be cut.
    rest = shares.sum(-1, keepdim=True) - before
    cut = ((1.0 - p.double()) * _ONE).floor().long()
    keep = rest > cut[:, None]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(1, index, keep), -torch.inf)


def keep_min_p(logits: Tensor, p: Tensor, softmax: Softmax) -> Tensor:
    """Exclude tokens less likely than ``p[n]`` times the likeliest of the row; softmax as above."""
    shares = softmax(logits)
    return logits.masked_fill(shares < p[:, None] * shares.amax(-1, keepdim=True), -torch.inf)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """CTRL's penalty on one row [V]: tokens ``seen`` have positive logits divided by ``penalty``,
    negative ones multiplied (Keskar et al., 2019)."""
    scores = logits[seen]
    changed = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.index_copy(0, seen, changed)
