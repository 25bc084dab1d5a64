"""Sequences laid out in pages, a pass over rows of them, and what attention of these is by the
formula: what the tests of attention share, by the kernel and by the twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, dense, normal
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.paged_attention import paged_attention

NAN, LARGE = float("nan"), 6e4


@dataclass
class Sequence:
    """One sequence: a query for every position, its keys and values."""

    q: Tensor  # [L, Hq, D]
    k: Tensor  # [L, Hkv, D]
    v: Tensor

    @classmethod
    def make(
        cls,
        length: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        seed: int = 0,
        device: str = DEVICE,
    ) -> Sequence:
        shapes = ((length, q_heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
        parts = (normal(*s, seed=3 * seed + i, dtype=dtype) for i, s in enumerate(shapes))
        return cls(*(part.to(device) for part in parts))

    def clone(self) -> Sequence:
        return Sequence(self.q.clone(), self.k.clone(), self.v.clone())


@dataclass
class Pass:
    """Rows of several sequences, laid out in pages."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata

    def __call__(
        self,
        scale: float | None = None,
        attend: Callable[..., Tensor] = paged_attention,
        **options: Any,
    ) -> Tensor:
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        return attend(self.q, self.k_cache, self.v_cache, self.metadata, scale=scale, **options)


def marked(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as ``fused_kv_write`` leaves them in a cache."""
    codes = v.dtype == torch.uint8
    wrong = v & 0x7F == 0x7F if codes else ~v.isfinite()
    k = k.masked_fill(wrong.any(-1, keepdim=True), 0x7F if codes else NAN)
    return k, v.masked_fill(wrong, 0)


def tables_of(needs: list[int], seed: int = 0, step: int = 0) -> list[list[int]]:
    """Pages of sequences that need so many: shuffled, or every ``step``th of the cache."""
    total = sum(needs)
    shuffled = torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed)) + 1
    pages = torch.arange(total) * step if step else shuffled[:total]
    return [part.tolist() for part in pages.split(needs)]


def lay_out(
    chunks: list[tuple[Sequence, int, int]],
    page_size: int = 16,
    padding: int = 0,
    fill: float = 0.0,
    seed: int = 0,
    step: int = 0,
    tables: list[list[int]] | None = None,
    values: float | None = None,
    exact: bool = True,
    written: bool = True,
) -> Pass:
    """A pass over rows [start, stop) of each sequence. Keys that are not used are ``fill``, such
    values by default large, but finite as ``fused_kv_write`` leaves them.

    written: by it; without it values that are not finite stand in the cache, and so does all of a
    sequence, beyond ``stop``."""
    sample = chunks[0][0]
    device = sample.q.device
    ends = [stop if written else len(sequence.k) for sequence, _, stop in chunks]
    tables = tables or tables_of([-(-end // page_size) for end in ends], seed, step)
    shape = (max(map(max, tables)) + 2, page_size, *sample.k.shape[1:])
    if values is None:
        values = 0x7E if sample.k.dtype == torch.uint8 else LARGE
    options = {"dtype": sample.k.dtype, "device": device}
    caches = [torch.full(shape, unused, **options) for unused in (fill, values)]
    for (sequence, *_), end, pages in zip(chunks, ends, tables, strict=True):
        slots = torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)
        slots = slots.flatten()[:end].to(device)
        held = marked(sequence.k, sequence.v) if written else (sequence.k, sequence.v)
        for cache, numbers in zip(caches, held, strict=True):
            cache.flatten(0, 1)[slots] = numbers[:end]
    q = [sequence.q[start:stop] for sequence, start, stop in chunks]
    q.append(torch.full((padding, *sample.q.shape[1:]), NAN, dtype=sample.q.dtype, device=device))
    spans = [(start, stop) for _, start, stop in chunks]
    metadata = AttentionMetadata.of(spans, tables, page_size, device, exact)
    return Pass(torch.cat(q), caches[0], caches[1], metadata)


def with_sinks(options: dict, q_heads: int, dtype: torch.dtype, device: str = DEVICE) -> dict:
    """``options`` with numbers in place of "sinks": True."""
    if options.get("sinks") is not True:
        return dict(options)
    return options | {"sinks": normal(q_heads, seed=99, dtype=dtype).to(device)}


def rows_of(sequence: Sequence, start: int, stop: int, *given: Any, **options: Any) -> Tensor:
    """Rows [start, stop) by the formula."""
    whole = (x[:stop] for x in (sequence.q, sequence.k, sequence.v))
    return dense(*whole, *given, **options)[start:]
