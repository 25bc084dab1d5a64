"""Twins of sample (temperature, seeded Gumbel noise, argmax, log-probability of the chosen token)
and of accept/truncate (the longest matching prefix of every verifying request at once).

Noise is philox4x32-10 in 64-bit integers (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Log-probabilities are torch's own, which reduces every row by itself on a CPU: their
bits depend neither on a row's address nor on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, ...]:
    """Four uint32 outputs (as int64) of counter (c0, c1, 0, 0) under the 64-bit ``key``."""
    c0, c1 = torch.broadcast_tensors(*counter)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [N, vocab_size] fp32; entry (n, v) depends on (keys[n], positions[n], v) alone.

    u = ((x >> 9) + 1/2) / 2**23 lies strictly between 0 and 1.
    """
    quads = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=keys.device)
    lanes = philox((quads[None, :], positions[:, None]), keys[:, None])
    x = torch.stack(lanes, dim=-1).flatten(1)[:, :vocab_size]
    u = ((x >> 9).float() + 0.5) * 2.0**-23
    return u.log_().neg_().log_().neg_()


def _chosen(rows: Tensor) -> Tensor:
    """[N] int64: where the highest of each of ``rows`` [N, V] is, the lowest index on ties; -1
    where it is not finite. NumPy searches a row in a third of torch's time."""
    values = rows.numpy()
    places = values.argmax(1)  # of NaN, where there is one
    places[~(abs(values.max(1)) < torch.inf)] = -1
    return torch.from_numpy(places)


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor | None,
    positions: Tensor | None,
    *,
    logprobs: bool = True,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One token per row and, if asked for, its log-probability.

    logits [N, V] fp32, excluded tokens at -inf; temperature [N] fp32, 0 for greedy; keys [N] int64;
    positions [N] int64 -> tokens [N] int64, log-probabilities [N] fp32 under softmax(logits / T)
    (T = 0: softmax(logits)). Where all rows are greedy the three may be None. The token is argmax(
    logits / T + noise), the lowest index on ties; a row without a finite maximum (NaN, +inf, or
    nothing left) yields -1. forced [N] int64, below V: where it is not negative, the token that the
    row yields instead; its log-probability has the bits of a free choice of it (-inf if it is
    excluded).
    """
    scaled = logits
    noisy = logits
    if temperature is not None and bool((sampled := temperature > 0).any()):
        assert keys is not None and positions is not None
        scaled = logits / torch.where(sampled, temperature, 1.0)[:, None]
        noisy = scaled.clone()
        noised = sampled if forced is None else sampled & (forced < 0)
        rows = noised.nonzero().squeeze(-1)
        noisy[rows] += gumbel(keys[rows], positions[rows], logits.shape[1])
    tokens = _chosen(noisy)
    if forced is not None:
        tokens = torch.where((forced < 0) | (tokens < 0), tokens, forced)
    if not logprobs:
        return tokens, None
    # log_softmax reduces every row by itself in one order, whatever the number of rows.
    logprobs_of_all = torch.log_softmax(scaled, dim=-1)
    return tokens, logprobs_of_all.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)


def log_softmax(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-probabilities [N, V] fp32 under softmax(logits / T).

    logits [N, V] fp32; temperature [N] fp32, 0 or None for T = 1. A row without a finite maximum
    yields NaN.
    """
    if temperature is not None:
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.log_softmax(logits, dim=-1)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities [N, V] fp32; logits as for ``log_softmax``."""
    return torch.softmax(logits, dim=-1)


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-probabilities [N] fp32 of ``tokens`` [N] int64, else as ``log_softmax``."""
    return log_softmax(logits, temperature).gather(1, tokens[:, None]).squeeze(1)


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
    stop = (targets[:, :, None] == stop_ids[:, None, :]).any(-1) & (targets >= 0)
    stop &= place < committed[:, None]
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
