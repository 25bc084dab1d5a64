"""Passes at fixed addresses: all tensors of a pass in one bucket lie where they did the last time.

So whatever a pass holds, every launch has the same arguments, and a graph of them can be replayed.
The host sends one buffer; page tables stay on the device, and only differences are sent. Knows
rows and pages, no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.runner.batch import Batch, embeddings, pack_rows
from tinyspec.runner.device_queue import overwrite, to_device
from tinyspec.scheduler.passes import Pass
from tinyspec.scheduler.sequence_table import Array, SequenceTable

# Of all rows that may give logits: passes with fewer than a part of them compute that part.
LOGIT_ROWS_PART = 8
# As many rows as the sequence table has at first, of which it has a power of two.
LEAST_TABLE_ROWS = 16


class PassShape(NamedTuple):
    """What every launch of a pass follows from: rows, rows that give logits, and whether it is
    canonical."""

    bucket: int
    logit_rows: int
    canonical: bool


class Section(NamedTuple):
    """Where numbers lie in a buffer of int64, and whether they are int32."""

    first: int
    length: int
    narrow: bool = False

    @property
    def end(self) -> int:
        return self.first + (-(-self.length // 2) if self.narrow else self.length)

    def of(self, values: Array) -> Array:
        found = values[self.first : self.end]
        return found.view(np.int32)[: self.length] if self.narrow else found

    def of_tensor(self, values: Tensor) -> Tensor:
        found = values[self.first : self.end]
        return found.view(torch.int32)[: self.length] if self.narrow else found


class Layout:
    """The buffer of a pass.

    tokens, positions, slots: of the rows. sources: where each row's token is, in the memory of
    ``FixedBatches``. keep: rows that give logits. table_rows, lengths: of each segment; first_rows:
    likewise, and how many rows there are. places, pages: differences of page tables.
    """

    def __init__(self, bucket: int, segments: int, differences: int):
        self.size = 0

        def section(count: int, narrow: bool = False) -> Section:
            found = Section(self.size, count, narrow)
            self.size = found.end
            return found

        self.bucket = bucket
        self.segments = segments
        self.tokens, self.positions, self.slots = (section(bucket) for _ in range(3))
        self.sources, self.keep = section(bucket), section(bucket)
        self.table_rows, self.places = section(segments), section(differences)
        self.pages = section(differences, narrow=True)
        self.first_rows = section(segments + 1, narrow=True)
        self.lengths = section(segments, narrow=True)


@dataclass
class FixedPass:
    """A pass as numbers on the host. values: as ``Layout`` says. more: differences of page tables
    that have no place there. embeds: as in ``Batch``. follows: whether tokens of the pass before
    are among its own."""

    shape: PassShape
    values: Array
    more: tuple[Array, Array]
    embeds: list[tuple[int, Tensor]]
    follows: bool


class PageTables:
    """The page tables of the running sequences on the device, a row for every row of the sequence
    table, written where they differ from before.

    on_device [rows, width] int32, at one address; ``width`` pages are the most of a sequence.

    What ``differences`` returned must be written, or ``forget`` called, before the next pass.
    """

    def __init__(self, rows: int, width: int, device: torch.device):
        self._there = np.zeros((rows, width), np.int32)
        # One number more, which nothing reads: for differences that fill up a fixed number of them.
        self._memory = torch.zeros(rows * width + 1, dtype=torch.int32, device=device)
        self.on_device = self._memory[:-1].view(rows, width)

    def differences(self, table: SequenceTable, rows: Array) -> tuple[Array, Array]:
        """Places in the memory [n] int64 and page numbers [n] int32 that bring ``rows`` of
        ``table`` up to date."""
        most, width = self._there.shape
        used = int(table.num_pages[rows].max(initial=0))
        assert used <= width and int(rows.max(initial=0)) < most, (used, rows)
        pages = table.pages[rows, :used]
        n, column = (pages != self._there[rows, :used]).nonzero()
        row, values = rows[n], pages[n, column]
        self._there[row, column] = values
        return row * np.int64(width) + column, values

    @property
    def nowhere(self) -> int:
        """The place that nothing reads."""
        return self._there.size

    def write(self, places: Tensor, pages: Tensor) -> None:
        """Write differences that lie on the device; those at the place ``nowhere`` are none."""
        self._memory.index_copy_(0, places, pages)

    def write_from_host(self, places: Array, pages: Array) -> None:
        """Write differences, if there are any."""
        if len(places):
            device = self._memory.device
            self.write(to_device(places, device), to_device(pages, device))

    def forget(self) -> None:
        """Differences may not have been written: the next ones are all that is in use."""
        self._there.fill(-1)


class FixedBatches:
    """The memory of the passes of one engine, which run one after the other.

    fit, fit_canonical: the bucket that holds so many rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        fit: Callable[[int], int],
        fit_canonical: Callable[[int], int],
        device: torch.device,
    ):
        assert config.max_rows and config.max_model_len and config.page_size
        self._fit, self._fit_canonical = fit, fit_canonical
        self._most_segments, self._rows = config.max_sequences, config.max_rows
        self._page_size = config.page_size
        self._width = -(-config.max_model_len // config.page_size)
        self._device = device
        self._layouts: dict[int, Layout] = {}

    @cached_property
    def tables(self) -> PageTables:
        """The page tables on the device."""
        rows = max(LEAST_TABLE_ROWS, 1 << (self._most_segments - 1).bit_length())
        return PageTables(rows, self._width, self._device)

    @cached_property
    def _memory(self) -> Tensor:
        """[n] int64: tokens of the pass before, then a pass as ``Layout`` says."""
        size = self._rows + self._layout(self._rows).size
        return torch.zeros(size, dtype=torch.int64, device=self._device)

    @cached_property
    def _input_ids(self) -> Tensor:
        return torch.zeros(self._rows, dtype=torch.int64, device=self._device)

    @cached_property
    def _page_table(self) -> Tensor:
        segments = min(self._rows, self._most_segments)
        shape = segments, self._width
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _layout(self, bucket: int) -> Layout:
        if bucket not in self._layouts:
            segments = min(bucket, self._most_segments)
            # A sequence begins a page, and its rows may fill some more.
            differences = segments + -(-bucket // self._page_size)
            self._layouts[bucket] = Layout(bucket, segments, differences)
        return self._layouts[bucket]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all memory that passes share."""
        memory = self._memory, self._input_ids, self._page_table, self.tables.on_device
        return tuple(tensor.data_ptr() for tensor in memory)

    def _logit_rows(self, bucket: int, canonical: bool, wanted: int) -> int:
        """Few different numbers: rows that give logits are as many as sequences, or a part of that,
        or more while drafts are verified."""
        fit = self._fit_canonical if canonical else self._fit
        most = min(bucket, self._most_segments)
        few = max(most // LOGIT_ROWS_PART, 1)
        return fit(next((rows for rows in (few, most) if wanted <= rows), bucket))

    def pack(
        self, work_pass: Pass, wanted: Array, newest: Array | None, canonical: bool
    ) -> FixedPass:
        """As ``ModelRunner.pack``."""
        bucket, works = work_pass.bucket, work_pass.works
        layout, count = self._layout(bucket), len(works)
        assert count <= layout.segments, (count, layout.segments)
        shape = PassShape(bucket, self._logit_rows(bucket, canonical, len(wanted)), canonical)
        values = np.zeros(layout.size, np.int64)
        first_rows = layout.first_rows.of(values)
        rows = values[: layout.slots.end].reshape(3, bucket)
        pack_rows(work_pass, self._page_size, rows, first_rows[: count + 1])
        first_rows[count + 1 :] = works.num_rows
        layout.lengths.of(values)[:count] = works.ends
        layout.table_rows.of(values)[:count] = works.rows
        layout.keep.of(values)[: len(wanted)] = wanted
        sources = layout.sources.of(values)
        sources[:] = np.arange(self._rows, self._rows + bucket)
        if newest is not None:
            sources[newest[0]] = newest[1]
        # Last: what is returned counts as written.
        places, pages = self.tables.differences(work_pass.table, works.rows)
        room = layout.places.length
        layout.places.of(values)[:] = self.tables.nowhere
        layout.places.of(values)[: len(places)] = places[:room]
        layout.pages.of(values)[: len(places)] = pages[:room]
        more = places[room:], pages[room:]
        return FixedPass(shape, values, more, embeddings(work_pass), newest is not None)

    def send(self, packed: FixedPass, tokens: Tensor | None) -> None:
        """Send a pass to the device. tokens [n]: of the pass before, where ``newest`` asks for
        them."""
        if packed.follows:
            assert tokens is not None and len(tokens) <= self._rows
            # A row of a sequence that has no token is dropped later.
            torch.clamp(tokens, min=0, out=self._memory[: len(tokens)])
        self.tables.write_from_host(*packed.more)
        overwrite(self._memory[self._rows :][: len(packed.values)], packed.values)

    def batch(self, shape: PassShape) -> tuple[Batch, Tensor]:
        """The pass that was sent, and its rows that give logits."""
        layout, bucket = self._layouts[shape.bucket], shape.bucket
        sent = self._memory[self._rows :]
        ids, page_table = self._input_ids[:bucket], self._page_table[: layout.segments]
        source = layout.sources.of_tensor(sent)
        torch.index_select(self._memory[: self._rows + bucket], 0, source, out=ids)
        self.tables.write(layout.places.of_tensor(sent), layout.pages.of_tensor(sent))
        rows = layout.table_rows.of_tensor(sent)
        torch.index_select(self.tables.on_device, 0, rows, out=page_table)
        metadata = AttentionMetadata(
            page_table=page_table,
            cu_seqlens_q=layout.first_rows.of_tensor(sent),
            seq_lens=layout.lengths.of_tensor(sent),
            page_size=self._page_size,
            max_seqlen_q=bucket,
            max_seqlen_k=self._width * self._page_size,
        )
        positions, slots = layout.positions.of_tensor(sent), layout.slots.of_tensor(sent)
        keep = layout.keep.of_tensor(sent)[: shape.logit_rows]
        return Batch(ids, positions, slots, metadata), keep
