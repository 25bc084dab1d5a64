"""The kernels by themselves: on a GPU the Triton kernels, on a CPU their twins.

On a GPU a kernel is compared with its twin's definition before it is timed. GB/s counts every input
read once and every output written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyspec.kernels import backend as kernels
from tinyspec.kernels.attention_metadata import AttentionMetadata

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNELS = kernels.load("triton" if CUDA else "torch")
TWINS = kernels.load("torch")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16 if CUDA else 128


def time_it(benchmark: Any, function: Callable[[], object], moved: int) -> None:
    """Time ``function``, which moves ``moved`` bytes."""

    def run() -> None:
        function()
        if CUDA:
            torch.cuda.synchronize()

    run()
    benchmark(run)
    if benchmark.stats is not None:
        benchmark.extra_info["GB_per_s"] = round(moved / benchmark.stats.stats.median / 1e9, 2)


def paged(sequences: int, context: int, rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """q, caches and attention metadata of equal sequences, their pages scattered."""
    pages = -(-context // PAGE)
    shape = (sequences * pages, PAGE, KV_HEADS, DIM)
    k, v = (torch.randn(shape, dtype=dtype, device=DEVICE) for _ in range(2))
    q = torch.randn(sequences * rows, HEADS, DIM, dtype=dtype, device=DEVICE)
    tables = torch.randperm(sequences * pages).view(sequences, pages).tolist()
    spans = [(context - rows, context)] * sequences
    return q, k, v, AttentionMetadata.of(spans, tables, PAGE, DEVICE)


def on_cpu(q: Any, k: Any, v: Any, metadata: AttentionMetadata) -> torch.Tensor:
    """The twin's result, in fp32."""
    moved = replace(
        metadata,
        page_table=metadata.page_table.cpu(),
        cu_seqlens_q=metadata.cu_seqlens_q.cpu(),
        seq_lens=metadata.seq_lens.cpu(),
        derived={},
    )
    wide = (x.float().cpu() for x in (q, k, v))
    return TWINS.paged_attention(*wide, moved, scale=DIM**-0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("sequences", "context", "rows"), [(1, 1024, 1), (64, 512, 1), (1, 512, 512), (8, 700, 17)]
)
@pytest.mark.benchmark(group="paged attention")
def bench_paged_attention(
    benchmark: Any, sequences: int, context: int, rows: int, dtype: str, smoke: bool
) -> None:
    if smoke:
        sequences, context, rows = min(sequences, 2), 40, min(rows, 8)
    q, k, v, metadata = paged(sequences, context, rows, getattr(torch, dtype))
    out = KERNELS.paged_attention(q, k, v, metadata, scale=DIM**-0.5)
    error = (out.float().cpu() - on_cpu(q, k, v, metadata)).norm() / out.float().cpu().norm()
    assert error < (1e-2 if q.dtype == torch.bfloat16 else 1e-5), error
    metadata.derived.clear()
    moved = (2 * q.numel() + k.numel() + v.numel()) * q.element_size()
    time_it(benchmark, lambda: KERNELS.paged_attention(q, k, v, metadata, scale=DIM**-0.5), moved)


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.benchmark(group="fused KV write")
def bench_kv_write(benchmark: Any, rows: int, smoke: bool) -> None:
    rows = min(rows, 8) if smoke else rows
    dtype = torch.bfloat16
    q = torch.randn(rows, HEADS, DIM, dtype=dtype, device=DEVICE)
    k, v = (torch.randn(rows, KV_HEADS, DIM, dtype=dtype, device=DEVICE) for _ in range(2))
    cos, sin = (torch.randn(rows, DIM, dtype=dtype, device=DEVICE) for _ in range(2))
    cos, sin = (torch.cat((x[:, : DIM // 2],) * 2, dim=-1) for x in (cos, sin))
    pool = torch.zeros(2, -(-rows // PAGE), PAGE, KV_HEADS, DIM, dtype=dtype, device=DEVICE)
    slots = torch.randperm(pool.shape[1] * PAGE, device=DEVICE)[:rows]

    def write() -> torch.Tensor:
        return KERNELS.fused_kv_write(q, k, v, cos, sin, pool[0], pool[1], slots)

    write()
    assert torch.equal(pool[1].flatten(0, 1)[slots], v)
    time_it(benchmark, write, 2 * (q.numel() + k.numel() + v.numel()) * q.element_size())


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.benchmark(group="sample")
def bench_sample(benchmark: Any, rows: int, temperature: float, smoke: bool) -> None:
    vocab = 1000 if smoke else 32000
    logits = torch.randn(rows, vocab, device=DEVICE)
    temperatures = torch.full((rows,), temperature, device=DEVICE)
    keys = torch.arange(rows, device=DEVICE) * 7919
    positions = torch.arange(rows, device=DEVICE)
    tokens, _ = KERNELS.sample(logits, temperatures, keys, positions)
    if temperature == 0:
        assert torch.equal(tokens, logits.argmax(-1))
    moved = logits.numel() * 4
    time_it(benchmark, lambda: KERNELS.sample(logits, temperatures, keys, positions), moved)


@pytest.mark.benchmark(group="accept/truncate")
def bench_accept(benchmark: Any) -> None:
    requests, width = 64, 17
    drafts = torch.randint(0, 9, (requests, width), device=DEVICE)
    targets = drafts.clone()
    targets[::2, 5] += 1

    def column(value: int) -> torch.Tensor:
        return torch.full((requests,), value, dtype=torch.int32, device=DEVICE)

    stops = torch.full((requests, 1), -1, device=DEVICE)

    def decide() -> Any:
        return KERNELS.accept_truncate(
            drafts, targets, column(17), column(16), column(9), column(99), stops, column(9), 16
        )

    assert decide().num_committed.tolist() == [6, 17] * (requests // 2)
    time_it(benchmark, decide, 2 * drafts.numel() * 8)
