"""Which keys the rows of a pass attend to: segments, causal bounds, and masks of all other keys.

Shared by the canonical reduction and by the faster one. Knows neither tiles nor calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata

# Finite, so that a tile that is masked for a row yields a finite result, which then weighs 0; and
# larger than any score.
MASKED = -3e38
# Between any sum of scores and one masked score.
UNLIKELY = -MASKED / 2

Position = TypeVar("Position", int, Tensor)


class CausalMask(NamedTuple):
    """A row attends to its own key and those before it: the last ``window`` of them, or those since
    the last multiple of ``chunk``; 0: no such bound."""

    window: int = 0
    chunk: int = 0

    def lowest_key(self, position: Position) -> Position:
        """First key of a row at ``position``; 0 or less: all."""
        if self.chunk:
            return position - position % self.chunk
        return position - self.window + 1 if self.window else position * 0


def segments(metadata: AttentionMetadata) -> Iterator[tuple[tuple[int, int], int, list[int]]]:
    """Of every segment its rows (first, end), its context length and its pages."""
    return zip(
        pairwise(metadata.cu_seqlens_q.tolist()),
        metadata.seq_lens.tolist(),
        metadata.page_table.tolist(),
        strict=True,
    )


def masked(hidden: Tensor) -> Tensor:
    """fp32 in the shape of ``hidden``: MASKED where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill_(hidden, MASKED)


def all_finite(out: Tensor, highest: Tensor) -> bool:
    """Whether results and the highest scores that they come from are finite and not MASKED, by
    their sums: False also where these are beyond fp32.

    In 16 bits torch makes 0 of a row with a score of +inf. Where all scores of a row are -inf, only
    masked ones are left.
    """
    wide = torch.float32 if out.dtype == torch.float16 else None
    total = float(out.sum(dtype=wide)), float(highest.sum())
    return math.isfinite(total[0]) and abs(total[1]) < UNLIKELY
