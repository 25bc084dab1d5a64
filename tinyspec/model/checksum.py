"""The bits of tensors: which differ, and checksums, integer sums that have no order, so that any
device gives the same."""

from __future__ import annotations

import torch
from torch import Tensor

# Integers of as many bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words summed at a time: few enough to stay in a CPU's cache.
CHUNK = 1 << 18
_MULTIPLIER = 0xD6E8FEB86659FD93
_PLACE_MULTIPLIER = -7046029254386353131


def unequal_bits(a: Tensor, b: Tensor) -> Tensor:
    """`[rows, ...]` twice -> bool `[rows, elements]`; NaN equals any NaN, -0 is not 0."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    bits = BITS[a.element_size()]
    unequal = a.contiguous().view(bits) != b.contiguous().view(bits)
    return (unequal & ~(a.isnan() & b.isnan())).reshape(len(a), -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether `unequal_bits` finds none; faster where it does not."""
    bits = BITS[a.element_size()]
    if torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)):
        return True
    return not unequal_bits(a, b).any()


def checksum(tensor: Tensor) -> int:
    """Sum of a tensor's bits, weighted by position, modulo 2**64, computed where it lies."""
    flat = tensor.detach().contiguous().flatten()
    size = flat.element_size()
    words = flat.view(BITS[size])
    # Eight bytes at a time; what is left one element at a time.
    whole = words.numel() * size // 8 * 8 // size
    head = words[:whole]
    if head.storage_offset() * size % 8:
        head = head.clone()
    total = 0
    for part in (head.view(torch.int64), words[whole:]):
        weights = _weights(min(CHUNK, len(part)), part.device)
        for chunk in part.split(CHUNK) if len(part) else ():
            total = total * _MULTIPLIER + int(_weighted_sum(chunk, weights[: len(chunk)]))
    return total % (1 << 64)


def row_checksums(rows: Tensor) -> Tensor:
    """[R, N] in fp32 -> [R], the same sum of every row; any NaN counts as the same NaN."""
    weights = _weights(rows.shape[1], rows.device)
    sums = []
    for part in rows.split(max(1, CHUNK // rows.shape[1])):
        if part.sum().isnan():
            part = part.masked_fill(part.isnan(), torch.nan)
        sums.append(_weighted_sum(part.view(torch.int32), weights))
    return torch.cat(sums)


def _weights(count: int, device: torch.device) -> Tensor:
    """[count] int64: odd and spread over 64 bits, so that swapping two words changes the sum."""
    if device.type == "cpu" and count <= CHUNK:
        return _OF_A_CHUNK[:count]
    return _made(count, device)


def _made(count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) * 2 + 1) * _PLACE_MULTIPLIER


_OF_A_CHUNK = _made(CHUNK, torch.device("cpu"))


def _weighted_sum(words: Tensor, weights: Tensor) -> Tensor:
    """[..., N] integers times [N] -> [...], modulo 2**64."""
    # One pass over the words; CUDA has no such product of integers.
    if words.dim() == 1 and words.dtype == torch.int64 and words.device.type == "cpu":
        return torch.dot(words, weights)
    return (words * weights).sum(dim=-1)
