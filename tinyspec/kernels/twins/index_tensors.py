"""Index tensors of the twins, on the CPU. Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def integers(values: Sequence[int]) -> Tensor:
    """[n] int64; a range is counted by torch."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, dtype=torch.int64, device="cpu")
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def counts_up(numbers: Tensor) -> bool:
    """Whether they are 0, 1, 2, ..."""
    return torch.equal(numbers, integers(range(len(numbers))))


def as_slice(numbers: list[int]) -> slice | Tensor:
    """As a slice where they rise by even steps."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    stop = numbers[-1] + 1
    even = step > 0 and numbers == list(range(numbers[0], stop, step))
    return slice(numbers[0], stop, step) if even else integers(numbers)
