"""Fact 3 on this device: attention of a row depends on its own sequence alone.

A prompt of more than two tiles at once, against single rows of it among other segments. Knows head
shapes and kernels, not models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.determinism.probes.bits import PositionResult, unequal_bits
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.backend import Kernels
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.install import patched_of
from tinyspec.runner.model_runner import ModelRunner

PAGE_SIZE = 128
PAGES = 5
LENGTH = PAGE_SIZE * PAGES - 40
# Both sides of every boundary of 64 tokens, both ends, and rows all over: with some head sizes only
# one row in a hundred shows a difference.
BOUNDARIES = (p + d for p in range(64, LENGTH, 64) for d in (-1, 0))
PLACES = sorted({0, 1, 2, 3, LENGTH - 1, *BOUNDARIES, *range(0, LENGTH, 7)})
# One in so many of them also runs in a pass of its own.
SINGLE = 15


def probe_attention(runner: ModelRunner) -> list[PositionResult]:
    """``probe_rows`` of every distinct head shape of the runner's model, by the kernels that its
    passes call."""
    dtype, device = runner.model.dtype, runner.device
    kernels = patched_of(runner.model).context.kernels
    assert kernels is not None
    return [probe_rows(kernels, shape, dtype, device) for shape in dict.fromkeys(runner.layers)]


def probe_rows(
    kernels: Kernels, shape: LayerShape, dtype: torch.dtype, device: torch.device
) -> PositionResult:
    """Compares rows at PLACES, as segments of 1, 2 and 17 rows, in one pass and in several, with
    the same rows of the whole prompt."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cpu").to(device, dtype)

    k, v = (draw(PAGES, PAGE_SIZE, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    q = draw(LENGTH, shape.num_heads, shape.head_dim)

    def attend(spans: list[tuple[int, int]]) -> Tensor:
        """Attention of rows first..last of the sequence, every span a segment."""
        tables = [range(PAGES)] * len(spans)
        metadata = AttentionMetadata.of(spans, tables, PAGE_SIZE, device)
        rows = torch.cat([q[first:last] for first, last in spans])
        scores = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap}
        return kernels.paged_attention(rows, k, v, metadata, **scores)

    whole = attend([(0, LENGTH)])
    checked = differing = 0
    row_index, column_index = -1, -1
    for rows in (1, 2, 17):
        spans_of_places = [(place, min(place + rows, LENGTH)) for place in PLACES]
        # All in one pass, and some in passes of their own.
        for spans in (spans_of_places, *([span] for span in spans_of_places[::SINGLE])):
            expected = torch.cat([whole[first:last] for first, last in spans])
            wrong = unequal_bits(expected, attend(spans))
            if not differing and (places := wrong.nonzero()).numel():
                row_index, column_index = (int(n) for n in places[0])
            checked += len(wrong)
            differing += int(wrong.any(dim=1).sum())
    name = f"attention ({shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV heads)"
    return PositionResult(name, LENGTH, checked, differing, row_index, column_index)
