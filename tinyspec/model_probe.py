"""A patched model end to end: are a pass's logits, log-probabilities, keys and values those of the
reference bucket, row for row, and how long does it take?

Rows of every kind share its passes: single rows, verifies, prompt chunks, padding. Knows passes and
KV, not modules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinyspec.batch import Batch
from tinyspec.config import EngineConfig
from tinyspec.invariance import same_bits
from tinyspec.kernels.segments import Segments
from tinyspec.kv_cache import KVCache
from tinyspec.runner import Runner

# Sequences: rows that each has in the probe, and position of the first. 120 + 17 crosses a tile;
# the last grows from cycle to cycle, so that large buckets are not full of single rows.
SEGMENTS = ((1, 7), (5, 0), (1, 64), (1, 30), (17, 120), (1, 127), (5, 21), (1, 128), (96, 3))
# Log-probabilities compared a row.
COLUMNS = 16


@dataclass(frozen=True)
class _Piece:
    """Rows ``first`` to ``end`` of the probe: one sequence's, on pages of its own."""

    first: int
    end: int
    position: int
    pages: list[int]


def _pieces(rows: int, page_size: int, max_model_len: int) -> list[_Piece]:
    """Sequences of together ``rows`` rows."""
    found: list[_Piece] = []
    first = page = 0
    while first < rows:
        cycle, kind = divmod(len(found), len(SEGMENTS))
        count, position = SEGMENTS[kind]
        if kind == len(SEGMENTS) - 1:
            count = (count + 32 << cycle) - 32
        count = min(count, max_model_len, rows - first)
        position = (position + 5 * cycle) % (max_model_len - count + 1)
        pages = -(-(position + count) // page_size)
        found.append(_Piece(first, first + count, position, list(range(page, page + pages))))
        first, page = first + count, page + pages
    return found


class ModelProbe:
    """Every row of the probe as the reference bucket computes it, to compare other passes with."""

    def __init__(self, runner: Runner, config: EngineConfig, rows: int):
        assert config.page_size and config.max_model_len
        page_size = config.page_size
        self._runner = runner
        self._rows = rows
        self._page_size = page_size
        self._pieces = _pieces(rows, page_size, config.max_model_len)
        self.num_pages = self._pieces[-1].pages[-1] + 1
        places = [
            (piece.position + row - piece.first, piece.pages)
            for piece in self._pieces
            for row in range(piece.first, piece.end)
        ]
        slots = [pages[p // page_size] * page_size + p % page_size for p, pages in places]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(runner.vocab_size, (rows,), generator=generator)
        positions = torch.tensor([position for position, _ in places])
        packed = torch.stack([ids, positions, torch.tensor(slots)])
        self._packed = packed.to(runner.device)
        self._slots = self._packed[2]

    def learn(self, cache: KVCache) -> None:
        """Compute every row in passes of the reference bucket, behind contexts of random KV."""
        self._fill(cache)
        reference = self._runner.buckets.reference
        columns = torch.linspace(0, self._runner.vocab_size - 1, COLUMNS).round().long()
        self._columns = columns.to(self._runner.device)
        logits: list[Tensor] = []
        logprobs: list[Tensor] = []
        for first in range(0, self._rows, reference):
            found, _ = self._forward(first, reference, 0)
            logits.append(found[: self._rows - first])
            logprobs.append(self._chosen(found)[: self._rows - first])
        self._logits, self._logprobs = torch.cat(logits), torch.cat(logprobs)
        self._pools = [pool.flatten(0, 1).flatten(1) for pool in (*cache.k, *cache.v)]
        self._written = [pool.index_select(0, self._slots) for pool in self._pools]

    def warm_up(self, cache: KVCache, sizes: Iterable[int]) -> None:
        """A pass of each size, for what happens in the first one only."""
        self._fill(cache)
        for rows in sizes:
            self._forward(0, rows, 0)

    def run(self, rows: int, turn: int, compare: bool) -> tuple[float, str | None]:
        """Seconds of a pass of ``rows`` rows, and what in it differs from the reference bucket.

        turn: other sequences first, so other neighbours; in every second turn some padding.
        """
        first, padding = self._pieces[turn * 4 % len(self._pieces)].first, rows // 4 * (turn % 2)
        live = rows - padding
        wrapped = max(0, first + live - self._rows)
        spans = [slice(first, first + live - wrapped), slice(0, wrapped)]
        slots = torch.cat([self._slots[span] for span in spans])
        for pool in self._pools:  # what an earlier pass left is not taken for written
            pool.index_fill_(0, slots, 0)
        logits, seconds = self._forward(first, rows, padding)

        def differs(found: Tensor, table: Tensor) -> bool:
            parts = found[:live].split([span.stop - span.start for span in spans])
            pairs = zip(parts, spans, strict=True)
            return not all(same_bits(part, table[span]) for part, span in pairs)

        wrong = None
        if compare:
            if differs(logits, self._logits):
                wrong = "logits"
            elif differs(self._chosen(logits), self._logprobs):
                wrong = "log-probabilities"
            elif any(
                differs(pool.index_select(0, slots), written)
                for pool, written in zip(self._pools, self._written, strict=True)
            ):
                wrong = "keys and values"
        for pool, written in zip(self._pools, self._written, strict=True):
            for span in spans:
                pool.index_copy_(0, self._slots[span], written[span])
        return seconds, wrong

    def _fill(self, cache: KVCache) -> None:
        """Finite noise everywhere, other on every page."""
        generator = torch.Generator().manual_seed(1)
        scale = torch.rand(self.num_pages, 1, 1, 1, generator=generator) + 0.5
        for pool in (*cache.k, *cache.v):
            noise = torch.randn(pool.shape[1:], generator=generator)
            torch.mul(noise.to(pool), scale.to(pool), out=pool)

    def _forward(self, first: int, rows: int, padding: int) -> tuple[Tensor, float]:
        """Logits of ``rows`` rows from ``first`` on, the last of them padding, and seconds."""
        device = self._runner.device
        live = rows - padding
        packed = torch.tensor([0, 0, -1], device=device)[:, None].repeat(1, rows)
        place = torch.arange(first, first + live, device=device) % self._rows
        packed[:, :live] = self._packed[:, place]
        batch = Batch(packed[0], packed[1], packed[2], self._segments(first, live), [])
        keep = torch.arange(rows, device=device)
        begun = self._now()
        logits = self._runner.forward(batch, keep)
        return logits, self._now() - begun

    def _segments(self, first: int, rows: int) -> Segments:
        """Segments of ``rows`` rows from ``first`` on; the first and the last may be cut."""
        starts, lengths, tables = [0], [], []
        number = next(n for n, piece in enumerate(self._pieces) if first < piece.end)
        while starts[-1] < rows:
            piece = self._pieces[number % len(self._pieces)]
            begin = max(first, piece.first) if starts == [0] else piece.first
            count = min(piece.end - begin, rows - starts[-1])
            starts.append(starts[-1] + count)
            lengths.append(piece.position + begin - piece.first + count)
            tables.append(piece.pages)
            number += 1
        widest = max(map(len, tables))
        counts = [end - begin for begin, end in pairwise(starts)]

        def column(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._runner.device)

        return Segments(
            page_table=column([table + [0] * (widest - len(table)) for table in tables]),
            cu_seqlens_q=column(starts),
            seq_lens=column(lengths),
            page_size=self._page_size,
            max_seqlen_q=max(counts),
            max_seqlen_k=max(lengths),
        )

    def _now(self) -> float:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        return time.perf_counter()

    def _chosen(self, logits: Tensor) -> Tensor:
        """Log-probabilities of a few tokens a row: all share one sum."""
        return torch.log_softmax(logits, dim=-1).index_select(1, self._columns)
