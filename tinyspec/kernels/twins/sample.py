"""Twin of sample: temperature, seeded Gumbel noise, argmax, log-probability of the chosen token.

Noise is philox4x32-10 in 64-bit integers (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Log-probabilities are torch's own, which reduces every row by itself on a CPU: their
bits depend neither on a row's address nor on the number of rows.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
BLOCK, LEAST_ROWS = 128, 16


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


def _highest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows.max(dim=-1)``; many rows are reduced block by block first, in half the time."""
    count, width = rows.shape
    if count < LEAST_ROWS or width % BLOCK or not rows.is_contiguous():
        return rows.max(dim=-1)
    blocks = rows.view(count, -1, BLOCK)
    block = blocks.amax(dim=-1).max(dim=-1).indices
    best, place = blocks[torch.arange(count, dtype=torch.int64, device=rows.device), block].max(
        dim=-1
    )
    return best, block * BLOCK + place


def _chosen(rows: Tensor) -> Tensor:
    """[N] int64: where the highest of each of ``rows`` [N, V] is, the lowest index on ties; -1
    where it is not finite. NumPy searches a row in a tenth to a third of torch's time."""
    if rows.shape[0] < LEAST_ROWS and rows.is_cpu:
        values = rows.numpy()
        places = values.argmax(1)  # of NaN, where there is one
        for row, place in enumerate(places.tolist()):
            if not isfinite(values.item(row, place)):
                places[row] = -1
        return torch.from_numpy(places)
    best, tokens = _highest(rows)
    return torch.where(best - best == 0, tokens, -1)


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


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [N] fp32 of ``tokens`` [N] int64 under softmax(logits)."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
