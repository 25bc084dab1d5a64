"""Twin of the log-probabilities: torch's own, which reduces every row by itself on a CPU.

Its bits depend neither on a row's address nor on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
