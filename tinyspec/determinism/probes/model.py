"""Probes a served model end to end: does a pass give every row the logits, log-probabilities, keys
and values that the reference bucket gives it, and how long does it take?

Compared is on scratch weights, which the caller sees to, so that no value of the model's own can
hide a difference; timed is on its own. Rows of every kind share its passes: single rows, verifies,
prompt chunks, padding. Knows passes and KV, not modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.determinism.probes.attention import longest_split
from tinyspec.determinism.probes.bits import same_bits, unequal_bits
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.layers import stored, values
from tinyspec.model.checksum import row_checksums
from tinyspec.runner.batch import Batch
from tinyspec.runner.model_runner import ModelRunner

# Sequences: rows that each has in the probe, and position of the first. 120 + 17 crosses a tile.
SEGMENTS = ((1, 7), (5, 0), (1, 64), (1, 30), (17, 120), (1, 127), (5, 21), (1, 128), (96, 3))
# Rows of the sequence whose context goes beyond a split, and its place among them: there every
# bucket's second pass begins.
BEYOND, PLACE = 9, 4
# Log-probabilities compared a row.
COLUMNS = 16
# About so many rows are distinct; larger buckets repeat them.
DISTINCT_ROWS = 96


@dataclass(frozen=True)
class Segment:
    """Rows ``first`` to ``end`` of the probe: of one sequence, on its own pages."""

    first: int
    end: int
    position: int
    pages: list[int]


def segments(rows: int, page_size: int, max_model_len: int, split: int = 0) -> list[Segment]:
    """Sequences with ``rows`` rows together. split: one of them has as many tokens before its
    first row; 0: none has."""
    kinds = list(SEGMENTS)
    if split:
        kinds.insert(PLACE, (BEYOND, split))
    found: list[Segment] = []
    first = page = 0
    while first < rows:
        cycle, kind = divmod(len(found), len(kinds))
        count, position = kinds[kind]
        count = min(count, max_model_len, rows - first)
        if position == split < max_model_len:  # shorter rather than elsewhere
            count = min(count, max_model_len - split)
        position = (position + 5 * cycle) % (max_model_len - count + 1)
        pages = -(-(position + count) // page_size)
        found.append(Segment(first, first + count, position, list(range(page, page + pages))))
        first, page = first + count, page + pages
    return found


@dataclass(frozen=True)
class ReferenceRows:
    """What the reference bucket gives every distinct row, on scratch weights.

    tables: of logits and log-probabilities; written: keys and values, by pool. sound: rows [N] of
    sequences without NaN.
    """

    tables: list[Tensor]
    written: list[Tensor]
    sound: Tensor

    @property
    def comparable(self) -> bool:
        """Whether there are finite rows to compare with."""
        return bool(self.sound.any())


class ModelProbe:
    """Passes of up to ``rows`` rows, on pages of their own, and what the reference bucket gives
    the same rows.

    The first few hundred rows are distinct; the others repeat them on other pages. known: the
    reference rows; computed by ``compute_reference`` where they are not known. took: seconds of the
    fastest pass that was compared, by rows. pause: called before every pass. Its memory lasts as
    long as the probe.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        rows: int,
        known: ReferenceRows | None = None,
        pause: Callable[[], None] = lambda: None,
    ):
        assert config.page_size and config.max_model_len
        page_size, reference = config.page_size, runner.buckets.reference
        self._runner, self._pause = runner, pause
        self.took: dict[int, float] = {}
        self._page_size = page_size
        self._distinct = min(runner.buckets.sizes[-1], -(-DISTINCT_ROWS // reference) * reference)
        self._rows = rows = max(rows, self._distinct)
        split = longest_split(runner)
        distinct = segments(self._distinct, page_size, config.max_model_len, split)
        self._pages = distinct[-1].pages[-1] + 1
        self._copies = -(-rows // self._distinct)
        self.num_pages = self._copies * self._pages
        self._segments = [
            replace(
                segment,
                first=segment.first + copy * self._distinct,
                end=min(segment.end + copy * self._distinct, rows),
                pages=[page + copy * self._pages for page in segment.pages],
            )
            for copy in range(self._copies)
            for segment in distinct
            if segment.first + copy * self._distinct < rows
        ]
        places = [
            (segment.position + row - segment.first, segment.pages)
            for segment in self._segments
            for row in range(segment.first, segment.end)
        ]
        slots = [pages[p // page_size] * page_size + p % page_size for p, pages in places]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(runner.vocab_size, (self._distinct,), generator=generator)
        positions = torch.tensor([position for position, _ in places])
        packed = torch.stack([ids.repeat(self._copies)[:rows], positions, torch.tensor(slots)])
        self._packed = packed.to(runner.device)
        self._slots = self._packed[2]
        self._cache = runner.pages(self.num_pages)
        self._pools = [p.flatten(0, 1).flatten(1) for p in (*self._cache.k, *self._cache.v)]
        self.known = known
        self._fill_pages()
        if known is not None:
            self._write_known(known)

    def _write_known(self, known: ReferenceRows) -> None:
        """The keys and values of all rows, as the reference bucket writes them."""
        own = self._slots[: self._distinct]
        for pool, written in zip(self._pools, known.written, strict=True):
            pool.index_copy_(0, own, written)
        self._copy_pages()

    def compute_reference(
        self, recording: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> ReferenceRows:
        """Compute the rows in passes of the reference bucket, after contexts of random KV.

        recording: around every pass.
        """
        self._fill_pages()
        reference = self._runner.buckets.reference
        every = torch.arange(reference, device=self._runner.device)
        parts = []
        for first in range(0, self._distinct, reference):
            with recording():
                logits, _ = self._forward(first, reference, 0, every, canonical=True)
            parts.append([part[: self._distinct - first] for part in self._reduce(logits)])
        tables = [torch.cat(table) for table in zip(*parts, strict=True)]
        own = self._slots[: self._distinct]
        written = [pool.index_select(0, own) for pool in self._pools]
        # A NaN in keys or values reaches other rows of its sequence, and which ones depends on the
        # order of passes: such sequences are not compared.
        numbers = (values(rows, self._runner.model.dtype) for rows in written)
        finite = torch.stack([rows.isfinite().all(dim=1) for rows in numbers]).all(dim=0)
        sound = torch.cat(
            [
                finite[p.first : p.end].all().expand(p.end - p.first)
                for p in self._segments
                if p.first < self._distinct
            ]
        )
        self.known = ReferenceRows(tables, written, sound)
        self._copy_pages()
        return self.known

    @property
    def distinct(self) -> int:
        """Rows of the passes that ``run_tokens`` runs."""
        return self._distinct

    def run_tokens(self, rows: int, tokens: Callable[[int, int], Tensor]) -> None:
        """A pass of the first ``rows`` distinct rows with ``tokens(vocab_size, rows)``."""
        assert rows <= self._distinct
        own = self._packed[0].clone()
        self._packed[0, :rows] = tokens(self._runner.vocab_size, rows).to(own)
        self._forward(0, rows, 0, self._logit_rows(rows), canonical=True)
        self._packed[0] = own
        if self.known is not None:
            self._write_known(self.known)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """A pass of each size, for what only a first pass does."""
        self._copy_pages()
        for rows in sizes:
            self._forward(0, rows, 0, self._logit_rows(rows), canonical=True)

    def difference(self, rows: int, repeat: int) -> str | None:
        """What in a canonical pass of ``rows`` rows differs from the reference bucket.

        repeat: how many such passes there were; each begins with other sequences, so that
        neighbours differ, and every second one has padding.
        """
        known = self.known
        assert known is not None
        first, padding = self._begin(rows, repeat)
        place = self._rows_from(first, rows - padding)
        slots = self._slots[place]
        place = place % self._distinct
        for pool in self._pools:  # so that this pass must write what is compared
            pool.index_fill_(0, slots, 0)
        kept = self._logit_rows(rows)
        logits, seconds = self._forward(first, rows, padding, kept, canonical=True)
        self.took[rows] = min(seconds, self.took.get(rows, seconds))
        wrong = self._compare(known, logits, kept, place, slots)
        for pool, written in zip(self._pools, known.written, strict=True):
            pool.index_copy_(0, slots, written[place])
        return wrong

    def seconds(self, rows: int, repeat: int, canonical: bool) -> float:
        """Of a pass of ``rows`` rows, in fast mode unless ``canonical``."""
        first, padding = self._begin(rows, repeat)
        return self._forward(first, rows, padding, self._logit_rows(rows), canonical)[1]

    def _begin(self, rows: int, repeat: int) -> tuple[int, int]:
        """First row and padding of the pass of this number."""
        segment = self._segments[repeat * 4 % len(self._segments)]
        return segment.first, rows // 4 * (repeat % 2)

    def _compare(
        self, known: ReferenceRows, logits: Tensor, kept: Tensor, place: Tensor, slots: Tensor
    ) -> str | None:
        """What of a pass over the rows ``place`` of the tables, written to ``slots``, differs."""

        def differs(found: Tensor, table: Tensor, rows: Tensor) -> bool:
            expected = table[rows]
            if same_bits(found, expected):
                return False
            unlike = unequal_bits(found, expected).any(dim=1)
            return bool((unlike & known.sound[rows]).any())

        live = kept < len(place)
        rows = place[kept[live]]
        names = ("logits", "log-probabilities")
        for name, found, table in zip(names, self._reduce(logits), known.tables, strict=True):
            if differs(found[live], table, rows):
                return name
        for pool, written in zip(self._pools, known.written, strict=True):
            if differs(pool.index_select(0, slots), written, place):
                return "keys and values"
        return None

    def _fill_pages(self) -> None:
        """Finite noise, different on every page of the distinct rows."""
        generator = torch.Generator().manual_seed(1)
        scale = torch.rand(self._pages, 1, 1, 1, generator=generator) + 0.5
        scale = scale.to(self._runner.device, self._runner.model.dtype)
        for pool in (*self._cache.k, *self._cache.v):
            noise = torch.randn(pool.shape[1:], generator=generator).to(scale)
            own = pool[: self._pages]
            filled = torch.mul(noise, scale, out=own if own.dtype == noise.dtype else None)
            own.copy_(stored(filled, own.dtype))

    def _copy_pages(self) -> None:
        """Copy the pages of the distinct rows to those of the rows that repeat them."""
        for pool in (*self._cache.k, *self._cache.v):
            copies = pool.view(self._copies, self._pages, *pool.shape[1:])
            copies[1:] = copies[:1]

    def _rows_from(self, first: int, count: int) -> Tensor:
        """``count`` rows of the probe from ``first`` on, cyclically."""
        place = torch.arange(first, first + count, device=self._runner.device)
        return place % self._rows

    def _logit_rows(self, rows: int) -> Tensor:
        """Rows of a pass that are unembedded: all, or in a large pass as many as the reference
        bucket has, evenly spread; other counts may have other bits."""
        count = min(rows, self._runner.buckets.reference)
        return torch.arange(count, device=self._runner.device) * rows // count

    def _forward(
        self, first: int, rows: int, padding: int, kept: Tensor, canonical: bool
    ) -> tuple[Tensor, float]:
        """Logits of ``kept`` of ``rows`` rows from ``first`` on, the last of them padding, and
        seconds."""
        place = self._rows_from(first, rows - padding)
        packed = torch.tensor([0, 0, -1], device=place.device)[:, None].repeat(1, rows)
        packed[:, : len(place)] = self._packed[:, place]
        self._pause()
        batch = Batch(packed[0], packed[1], packed[2], self._metadata(first, len(place)), [])
        begun = self._clocks()
        with self._runner.on_pages(self._cache):
            logits = self._runner.forward(batch, kept, canonical)
        # Whichever is less: a pass is not charged with waiting for another process.
        return logits, min(end - start for start, end in zip(begun, self._clocks(), strict=True))

    def _metadata(self, first: int, rows: int) -> AttentionMetadata:
        """Segments of ``rows`` rows from ``first`` on; the first and the last may be cut."""
        spans: list[tuple[int, int]] = []
        tables: list[list[int]] = []
        number = next(n for n, segment in enumerate(self._segments) if first < segment.end)
        while rows > 0:
            segment = self._segments[number % len(self._segments)]
            begin = segment.first if spans else max(first, segment.first)
            count = min(segment.end - begin, rows)
            position = segment.position + begin - segment.first
            spans.append((position, position + count))
            tables.append(segment.pages)
            rows -= count
            number += 1
        return AttentionMetadata.of(spans, tables, self._page_size, self._runner.device)

    def _clocks(self) -> tuple[float, float]:
        """Time of day and, on a CPU, time that this process has had."""
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
            return time.perf_counter(), time.perf_counter()
        return time.perf_counter(), time.process_time()

    def _reduce(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is compared of logits [R, V]: a checksum of each row's bits [R, 1], to save memory,
        and log-probabilities of a few tokens [R, COLUMNS], which share one sum."""
        columns = (
            torch.linspace(0, logits.shape[1] - 1, COLUMNS, device=logits.device).round().long()
        )
        chosen = self._runner.kernels.log_softmax(logits).index_select(1, columns)
        return row_checksums(logits.float())[:, None], chosen
