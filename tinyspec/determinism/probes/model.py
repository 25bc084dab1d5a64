"""A patched model end to end: are a pass's logits, log-probabilities, keys and values those of the
reference bucket, row for row, and how long does it take?

Rows of every kind share its passes: single rows, verifies, prompt chunks, padding. Knows passes and
KV, not modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.determinism.checksum import row_checksums
from tinyspec.determinism.probes.bits import same_bits, unequal_bits
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.runner.batch import Batch
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner

# Sequences: rows that each has in the probe, and position of the first. 120 + 17 crosses a tile.
SEGMENTS = ((1, 7), (5, 0), (1, 64), (1, 30), (17, 120), (1, 127), (5, 21), (1, 128), (96, 3))
# Log-probabilities compared a row.
COLUMNS = 16
# About so many rows have results of their own; in larger buckets they stand more than once.
DISTINCT_ROWS = 128


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
        count = min(count, max_model_len, rows - first)
        position = (position + 5 * cycle) % (max_model_len - count + 1)
        pages = -(-(position + count) // page_size)
        found.append(_Piece(first, first + count, position, list(range(page, page + pages))))
        first, page = first + count, page + pages
    return found


class ModelProbe:
    """Rows as the reference bucket computes them, to compare other passes with.

    ``rows`` rows, of which the first few hundred are distinct; the others are the same rows again,
    on pages of their own.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, rows: int):
        assert config.page_size and config.max_model_len
        page_size, reference = config.page_size, runner.buckets.reference
        self._runner = runner
        self._rows = rows
        self._page_size = page_size
        self._distinct = min(rows, -(-DISTINCT_ROWS // reference) * reference)
        pieces = _pieces(self._distinct, page_size, config.max_model_len)
        self._pages = pieces[-1].pages[-1] + 1
        self._copies = -(-rows // self._distinct)
        self.num_pages = self._copies * self._pages
        self._pieces = [
            replace(
                piece,
                first=piece.first + copy * self._distinct,
                end=min(piece.end + copy * self._distinct, rows),
                pages=[page + copy * self._pages for page in piece.pages],
            )
            for copy in range(self._copies)
            for piece in pieces
            if piece.first + copy * self._distinct < rows
        ]
        places = [
            (piece.position + row - piece.first, piece.pages)
            for piece in self._pieces
            for row in range(piece.first, piece.end)
        ]
        slots = [pages[p // page_size] * page_size + p % page_size for p, pages in places]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(runner.vocab_size, (self._distinct,), generator=generator)
        positions = torch.tensor([position for position, _ in places])
        packed = torch.stack([ids.repeat(self._copies)[:rows], positions, torch.tensor(slots)])
        self._packed = packed.to(runner.device)
        self._slots = self._packed[2]

    def learn(self, cache: KVCache) -> None:
        """Compute the rows in passes of the reference bucket, behind contexts of random KV."""
        self._fill(cache)
        reference = self._runner.buckets.reference
        every = torch.arange(reference, device=self._runner.device)
        parts = []
        for first in range(0, self._distinct, reference):
            logits, _ = self._forward(first, reference, 0, every, canonical=True)
            parts.append([part[: self._distinct - first] for part in self._seen(logits)])
        self._tables = [torch.cat(tables) for tables in zip(*parts, strict=True)]
        self._pools = [pool.flatten(0, 1).flatten(1) for pool in (*cache.k, *cache.v)]
        own = self._slots[: self._distinct]
        self._written = [pool.index_select(0, own) for pool in self._pools]
        self._copy(cache)
        # A NaN among keys or values reaches other rows of its sequence, and which depends on what
        # ran before what: such sequences are left out.
        finite = torch.stack([rows.isfinite().all(dim=1) for rows in self._written]).all(dim=0)
        self._sound = torch.cat(
            [
                finite[p.first : p.end].all().expand(p.end - p.first)
                for p in self._pieces
                if p.first < self._distinct
            ]
        )

    @property
    def distinct(self) -> int:
        """Rows of the passes that ``retell`` runs."""
        return self._distinct

    def retell(self, cache: KVCache, tokens: Callable[[int, int], Tensor]) -> None:
        """A pass of all distinct rows, of other tokens: ``tokens(vocab_size, rows)``. For before
        ``learn``, as other tokens write other KV."""
        self._fill(cache)
        own, rows = self._packed[0].clone(), self._distinct
        self._packed[0, :rows] = tokens(self._runner.vocab_size, rows).to(own)
        self._forward(0, rows, 0, self._kept(rows), canonical=True)
        self._packed[0] = own

    def warm_up(self, cache: KVCache, sizes: Iterable[int]) -> None:
        """A pass of each size, for what happens in the first one only."""
        self._fill(cache)
        self._copy(cache)
        for rows in sizes:
            self._forward(0, rows, 0, self._kept(rows), canonical=True)

    def run(self, rows: int, turn: int, canonical: bool, compare: bool) -> tuple[float, str | None]:
        """Seconds of a pass of ``rows`` rows, and what in it differs from the reference bucket.

        canonical: linears run in tiles where they have to. turn: other sequences first, so other
        neighbours; in every second turn some padding.
        """
        first, padding = self._pieces[turn * 4 % len(self._pieces)].first, rows // 4 * (turn % 2)
        place = self._place(first, rows - padding)
        slots = self._slots[place]
        place = place % self._distinct
        for pool in self._pools:  # what an earlier pass left is not taken for written
            pool.index_fill_(0, slots, 0)
        kept = self._kept(rows)
        logits, seconds = self._forward(first, rows, padding, kept, canonical)
        wrong = self._compare(logits, kept, place, slots) if compare else None
        for pool, written in zip(self._pools, self._written, strict=True):
            pool.index_copy_(0, slots, written[place])
        return seconds, wrong

    def _compare(self, logits: Tensor, kept: Tensor, place: Tensor, slots: Tensor) -> str | None:
        """What of a pass over the rows ``place`` of the tables, written to ``slots``, differs."""

        def differs(found: Tensor, table: Tensor, rows: Tensor) -> bool:
            expected = table[rows]
            if same_bits(found, expected):
                return False
            unlike = unequal_bits(found, expected).any(dim=1)
            return bool((unlike & self._sound[rows]).any())

        live = kept < len(place)
        rows = place[kept[live]]
        names = ("logits", "log-probabilities")
        for name, found, table in zip(names, self._seen(logits), self._tables, strict=True):
            if differs(found[live], table, rows):
                return name
        for pool, written in zip(self._pools, self._written, strict=True):
            if differs(pool.index_select(0, slots), written, place):
                return "keys and values"
        return None

    def _fill(self, cache: KVCache) -> None:
        """Finite noise everywhere, other on every page of the distinct rows."""
        generator = torch.Generator().manual_seed(1)
        scale = torch.rand(self._pages, 1, 1, 1, generator=generator) + 0.5
        for pool in (*cache.k, *cache.v):
            noise = torch.randn(pool.shape[1:], generator=generator)
            torch.mul(noise.to(pool), scale.to(pool), out=pool[: self._pages])

    def _copy(self, cache: KVCache) -> None:
        """The pages of the distinct rows to those of their copies."""
        for pool in (*cache.k, *cache.v):
            copies = pool.view(self._copies, self._pages, *pool.shape[1:])
            copies[1:] = copies[:1]

    def _place(self, first: int, count: int) -> Tensor:
        """Rows of the probe from ``first`` on, and from the beginning again."""
        place = torch.arange(first, first + count, device=self._runner.device)
        return place % self._rows

    def _kept(self, rows: int) -> Tensor:
        """Rows of a pass that are unembedded: all, or of a large one as many as the reference
        bucket has, spread over it; no other count is sure to have the reference's bits."""
        count = min(rows, self._runner.buckets.reference)
        return torch.arange(count, device=self._runner.device) * rows // count

    def _forward(
        self, first: int, rows: int, padding: int, kept: Tensor, canonical: bool
    ) -> tuple[Tensor, float]:
        """Logits of ``kept`` of ``rows`` rows from ``first`` on, the last of them padding, and
        seconds."""
        place = self._place(first, rows - padding)
        packed = torch.tensor([0, 0, -1], device=place.device)[:, None].repeat(1, rows)
        packed[:, : len(place)] = self._packed[:, place]
        batch = Batch(packed[0], packed[1], packed[2], self._metadata(first, len(place)), [])
        begun = self._clocks()
        logits = self._runner.forward(batch, kept, canonical)
        # Whichever is less: a pass is not charged with waiting for another process.
        return logits, min(end - start for start, end in zip(begun, self._clocks(), strict=True))

    def _metadata(self, first: int, rows: int) -> AttentionMetadata:
        """Segments of ``rows`` rows from ``first`` on; the first and the last may be cut."""
        spans: list[tuple[int, int]] = []
        tables: list[list[int]] = []
        number = next(n for n, piece in enumerate(self._pieces) if first < piece.end)
        while rows > 0:
            piece = self._pieces[number % len(self._pieces)]
            begin = piece.first if spans else max(first, piece.first)
            count = min(piece.end - begin, rows)
            position = piece.position + begin - piece.first
            spans.append((position, position + count))
            tables.append(piece.pages)
            rows -= count
            number += 1
        return AttentionMetadata.of(spans, tables, self._page_size, self._runner.device)

    def _clocks(self) -> tuple[float, float]:
        """Time of day and, on a CPU, time that this process has had."""
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
            return time.perf_counter(), time.perf_counter()
        return time.perf_counter(), time.process_time()

    def _seen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept of logits [R, V]: a checksum of each row's bits [R, 1], so that the tables
        stay small, and log-probabilities of a few tokens [R, COLUMNS], which all share one sum."""
        columns = (
            torch.linspace(0, logits.shape[1] - 1, COLUMNS, device=logits.device).round().long()
        )
        chosen = torch.log_softmax(logits, dim=-1).index_select(1, columns)
        return row_checksums(logits)[:, None], chosen
