"""Whether what a function gives one part of a batch depends on that part alone.

The same part is put at other places of the batch, beside other neighbours: larger ones, zeros,
values that are not finite. Compares bits. Knows functions, not what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.model.checksum import BITS

# How much larger neighbours are; the last two stand for zeros and for NaN.
FACTORS = (1.0, 1e2, 1e4, 0.0, torch.nan)


class BatchFunction(NamedTuple):
    """A function of [B, length, d] whose first dimension is the batch. like: [0, d], of the dtype
    and on the device of its input."""

    name: str
    run: Callable[[Tensor], Tensor]
    length: int
    like: Tensor


def mixing(functions: list[BatchFunction], batch: int) -> str | None:
    """The name of the first of ``functions`` in which a part's result depends on its place or on
    its neighbours, in a batch of so many parts; None if there is none."""
    return _first_other(functions, batch, batch, range(1, batch))


def other_than(functions: list[BatchFunction], batch: int, other: int) -> str | None:
    """The name of the first of ``functions`` in which a part has not the same result in batches of
    ``other`` parts as in those of ``batch``, which mix none; None if there is none."""
    return _first_other(functions, other, batch, sorted({0, 1 % other, other // 2}))


def _first_other(
    functions: list[BatchFunction], batch: int, reference: int, shifts: Iterable[int]
) -> str | None:
    return next((f.name for f in functions if not _is_own(f, batch, reference, shifts)), None)


def _is_own(function: BatchFunction, batch: int, reference: int, shifts: Iterable[int]) -> bool:
    generator = torch.Generator().manual_seed(batch)

    def random(count: int) -> Tensor:
        shape = count, function.length, function.like.shape[1]
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        # Of many sizes, so that the order of a sum shows.
        sizes = torch.randn(shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        return (values * sizes.exp()).to(function.like)

    whole = -(-batch // reference) * reference
    parts = random(whole)
    results = torch.cat([function.run(some) for some in parts.split(reference)])[:batch]
    parts = parts[:batch]
    places = torch.arange(batch, device=parts.device)
    for shift in shifts:
        for odd in (0, 1):
            kept = places[odd::2]
            there = (kept + shift) % batch
            neighbours = random(batch) * FACTORS[(shift + odd) % len(FACTORS)]
            neighbours[there] = parts[kept]
            if not _same_bits(function.run(neighbours)[there], results[kept]):
                return False
    order = torch.randperm(batch, generator=generator).to(parts.device)
    return _same_bits(function.run(parts[order]), results[order])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
