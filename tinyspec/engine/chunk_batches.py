"""Runs functions of chunks in batches whose size changes no chunk's bits.

Small batches are padded to one of a few sizes. Until ``prove`` nothing is known of them, and any
size is taken. Knows functions of [B, ...], not what they compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinyspec.determinism.probes.batches import BatchFunction, mixing, other_than

logger = logging.getLogger("tinyspec")
# Chunks of the batch that says what a chunk's bits are, and of those that may give the same.
REFERENCE = 8
SIZES = (1, 8, 16, 32, 64)


class ChunkBatches:
    """functions: makes all that runs in batches, to be looked at.

    reference: chunks of a batch that decides bits; 1 where chunks of a batch mix. proven: whether
    this is known, so that a chunk's results hang on nothing else.
    """

    def __init__(self, functions: Callable[[], list[BatchFunction]]):
        self._functions = functions
        self.forget()

    def forget(self) -> None:
        """The functions changed."""
        self.reference, self.proven = REFERENCE, False
        self._same = {REFERENCE: True}

    def prove(self) -> None:
        """Find whether what a chunk gives is its own; if not, each runs alone."""
        if self.proven:
            return
        if mixed := mixing(self._functions(), self.reference):
            logger.info("thoughts are made one chunk at a time: %s mixes chunks", mixed)
            self.reference = 1
        self.proven = True

    def run(
        self, function: Callable[..., Tensor], *given: Tensor, fills: tuple[Any, ...]
    ) -> Tensor:
        """``function`` of all parts of ``given``, [N, ...] each; fills: what pads a batch."""
        found, start, count = [], 0, len(given[0])
        while start < count:
            size = self._size(count - start)
            parts = [tensor[start : start + size] for tensor in given]
            short = size - len(parts[0])
            if short:
                parts = [_padded(*pair, short) for pair in zip(parts, fills, strict=True)]
            found.append(function(*parts)[: size - short])
            start += size
        return torch.cat(found)

    def _size(self, count: int) -> int:
        """Of the next batch, where so many chunks are left."""
        if not self.proven:
            return min(count, SIZES[-1])
        if self.reference == 1:
            return 1
        enough = next((s for s in SIZES if s >= count and self._is_same(s)), None)
        return enough or max(size for size in SIZES if size <= count and self._is_same(size))

    def _is_same(self, size: int) -> bool:
        """Whether batches of ``size`` give the bits of the reference; looked at once."""
        if size not in self._same:
            self._same[size] = other_than(self._functions(), self.reference, size) is None
        return self._same[size]


def _padded(part: Tensor, fill: Any, count: int) -> Tensor:
    return torch.cat([part, part.new_full((count, *part.shape[1:]), fill)])
