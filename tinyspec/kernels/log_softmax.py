"""Log-probabilities of whole rows, from the log-sum-exp that ``sample`` computes.

    logprob_v = (x_v / T - highest) - rest        logsumexp(x / T) = highest + rest

Where V is no multiple of 4, torch's own softmax on CUDA adds in an order that depends on a row's
address. Here the log-sum-exp of a row depends on the row alone (``sample``), and what follows is
one operation an entry; an entry has the bits of the log-probability that ``sample`` gives with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.sample import sample_rows


def log_softmax(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-probabilities [N, V] fp32 under softmax(logits / T).

    logits [N, V] bf16, fp16 or fp32; temperature [N] fp32, 0 or None for T = 1. A row without a
    finite maximum yields NaN.
    """
    forced = None
    scaled = logits.float()
    if temperature is not None:  # a row that is forced needs no noise
        forced = torch.zeros_like(temperature, dtype=torch.int64)
        scaled = scaled / torch.where(temperature > 0, temperature, 1.0)[:, None]
    highest, rest = sample_rows(logits, temperature, forced=forced)[2]
    return (scaled - highest[:, None]) - rest[:, None]


def softmax(logits: Tensor) -> Tensor:
    """Probabilities [N, V] fp32; logits as for ``log_softmax``."""
    return log_softmax(logits).exp_()


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [N] fp32 of ``tokens`` [N] int64 under softmax(logits)."""
    return sample_rows(logits, forced=tokens)[1]
