"""A pass as tensors: packed rows, their slots, their attention metadata. Knows no model.

The host writes a pass as numbers in one buffer, which is copied to where the last pass lay: passes
of one shape launch the same Triton kernels whatever they hold, and a graph of the launches can be
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.config import STATE_TILE, EngineConfig
from tinyspec.kernels.backend import AttentionMetadata, Checkpoints
from tinyspec.runner.device_queue import overwrite
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import Step, spread

# Of all rows that may give logits: passes with fewer than a part of them compute that part.
LOGIT_ROWS_PART = 8


class PassShape(NamedTuple):
    """What every launch of a pass follows from: rows, sequences, rows that give logits, and whether
    it runs as canonical ones do."""

    bucket: int
    segments: int
    logit_rows: int
    canonical: bool


# Of one sequence: whose state it has, after how many tokens it is, and up to where it moves.
Owned = tuple[int, int, int]
# Of one sequence: tokens, the position of the first, and the sequence's page table.
Part = tuple[Sequence[int], int, list[int]]


@dataclass
class Batch:
    """The rows of one pass, padded to its bucket; padding rows write no KV and attend to none.

    input_ids, positions, slot_mapping: [bucket] int64, slot -1 for padding. embeds: (first row,
    [n, hidden]) of rows that enter the model as embeddings instead of ids.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        parts: list[Part],
        bucket: int,
        page_size: int,
        device: torch.device,
        states: tuple[list[Owned], int] | None = None,
    ) -> Batch:
        """The rows of ``parts``, one after the other. states: of each, and how long their rings
        are."""
        rows = [
            (token, at, table[at // page_size] * page_size + at % page_size)
            for ids, first, table in parts
            for at, token in enumerate(ids, first)
        ]
        columns = list(zip(*rows, *[(0, 0, -1)] * (bucket - len(rows)), strict=True))
        tokens, positions, slots = torch.tensor(columns, dtype=torch.int64, device=device)
        spans = [(first, first + len(ids)) for ids, first, _ in parts]
        metadata = AttentionMetadata.of(spans, [table for *_, table in parts], page_size, device)
        if states is not None:
            owned, ring = states
            places = [
                owner * ring + at % ring if at >= end - ring else -1
                for (owner, *_), (first, end) in zip(owned, spans, strict=True)
                for at in range(first, end)
            ]
            places += [-1] * (bucket - len(places))
            numbers = torch.tensor(list(zip(*owned, strict=True)), dtype=torch.int32, device="cpu")
            slots_of = torch.tensor(places, dtype=torch.int64, device=device)
            owners, at, to = numbers.to(device).unbind()
            metadata.checkpoints = Checkpoints(owners, at, to, slots_of, STATE_TILE)
        return cls(tokens, positions, slots, metadata)


class PassMemory:
    """Where all passes of one engine lie, one after the other. fixed: whether passes of one shape
    launch the same whatever they hold, as the Triton kernels' do. kept: as of AttentionMetadata.
    ring: places of a sequence's ring, where the model has recurrent layers; else 0. shares: whether
    rows on shared pages write there what others would, instead of running for their logits only.
    shift: rows lie so many places before their token's.
    """

    ring, shares, shift = 0, False, 0

    def __init__(self, config: EngineConfig, buckets: Buckets, device: torch.device, fixed: bool):
        assert config.max_rows and config.max_model_len and config.page_size
        self._page_size, self._max_sequences = config.page_size, config.max_sequences
        self.kept: dict[Any, Any] = {}
        self._buckets = buckets
        rows, segments = config.max_rows, min(config.max_rows, config.max_sequences)
        width = -(-config.max_model_len // config.page_size)
        # Where in it the tokens of the pass before lie.
        self._behind, self._fixed = _size(rows, segments) + _more(rows, segments), fixed
        self._memory = torch.zeros(self._behind + rows, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        # Behind a sequence's last page there may be what others had: nothing reads it.
        self._page_table = torch.zeros((segments, width), dtype=torch.int32, device=device)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all memory that passes share."""
        return tuple(t.data_ptr() for t in (self._memory, self._input_ids, self._page_table))

    def _sizes(self, step: Step, wanted: int) -> tuple[int, int]:
        """Sequences, and rows that give logits, of the shape of a pass: where it is ``fixed`` few
        different numbers. The rows are as many as sequences, or a part of that, or more while
        drafts are verified."""
        if not self._fixed:
            return len(step), max(wanted, 1)
        most = min(step.bucket, self._max_sequences)
        few = max(most // LOGIT_ROWS_PART, 1)
        return most, next((rows for rows in (few, most) if wanted <= rows), step.bucket)

    def pack(self, step: Step, wanted: Array, newest: Array | None) -> None:
        """Fill in the numbers of a pass whose rows ``wanted`` [N] int64 give logits: its works one
        after the other, as ``_parts`` says.

        The rows are gathered before the unembedding and padded to a bucket of their own, which is
        canonical in a canonical pass. newest [2, n]: rows whose tokens are among those of the pass
        before, and where.
        """
        table, bucket = step.table, step.bucket
        # Passes that run the same way have one shape, and one graph.
        canonical = step.canonical or (self._fixed and self._buckets.is_canonical(bucket))
        fit = self._buckets.fit_canonical if canonical else self._buckets.fit
        segments, logit_rows = self._sizes(step, len(wanted))
        step.shape = shape = PassShape(bucket, segments, fit(logit_rows), canonical)
        count, total = len(step), step.num_rows
        more = _more(bucket, segments) if self.ring else 0
        step.values = values = np.zeros(_size(bucket, segments) + more, np.int64)
        (tokens, positions, slots, sources, keep), lengths, first_rows = _parts(values, shape)
        row, position = step.rows, step.starts
        if not step.single:
            row, position = row.repeat(step.counts), spread(position, step.counts)
        tokens[:total], positions[:total] = table.ids[row, position], position - self.shift
        page, offset = np.divmod(position - self.shift, self._page_size)
        slots[:total] = table.pages[row, page] * np.int64(self._page_size) + offset
        if not self.shares:
            slots[:total][position < table.frozen[row]] = -1
        slots[total:] = -1
        sources[:] = np.arange(bucket)
        if newest is not None:
            sources[newest[0]] = newest[1] + self._behind
        keep[: len(wanted)] = wanted
        if self.ring:
            assert step.moves is not None
            states, places = _state_parts(values, shape)
            states[:, :count], places[:] = step.moves, -1
            owners, ends = step.moves[0], step.ends
            if not step.single:
                owners, ends = owners.repeat(step.counts), ends.repeat(step.counts)
            later = position >= ends - self.ring  # there is a place for the last ones
            places[:total][later] = (owners * self.ring + position % self.ring)[later]
        lengths[:count] = step.ends - self.shift
        first_rows[1 : count + 1], first_rows[count + 1 :] = step.cu_rows, total
        width = table.num_pages[step.rows].max()
        step.page_table = np.ascontiguousarray(table.pages[step.rows, :width])
        step.num_logits, step.embeds = len(wanted), _embeddings(step)

    def send(self, step: Step, before: Tensor | None) -> None:
        """Send a pass to the device. before [n]: tokens of the pass before, where some of its own
        are among them; a row of a sequence that has no token is dropped later."""
        if before is not None:
            torch.clamp(before, min=0, out=self._memory[self._behind :][: len(before)])
        overwrite(self._memory[: len(step.values)], step.values)
        if len(step.page_table):
            rows, width = step.page_table.shape
            overwrite(self._page_table[:rows, :width], step.page_table)

    def batch(self, step: Step) -> tuple[Batch, Tensor | None]:
        """The pass that was sent, and which rows give logits; None: all, in order."""
        shape, table = step.shape, self._page_table[: step.shape.segments]
        rows, lengths, first_rows = _parts(self._memory, shape)
        _, positions, slots, sources, keep = rows.unbind()
        ids = self._input_ids[: shape.bucket]
        torch.index_select(self._memory, 0, sources, out=ids)
        if not self._fixed:
            table = table[:, : step.page_table.shape[1]]
        given = table, first_rows, lengths, self._page_size
        metadata = AttentionMetadata(*given, kept=self.kept)
        if self.ring:
            states, places = _state_parts(self._memory, shape)
            metadata.checkpoints = Checkpoints(states[0], states[1], states[2], places, STATE_TILE)
        batch = Batch(ids, positions, slots, metadata, step.embeds)
        all_of_them = step.single and shape.logit_rows == shape.bucket and not shape.canonical
        return batch, None if all_of_them and not self._fixed else keep[: shape.logit_rows]


def _size(bucket: int, segments: int) -> int:
    return 5 * bucket + segments + 1


def _more(bucket: int, segments: int) -> int:
    """And of what ``_state_parts`` says."""
    return bucket + 2 * segments


def _state_parts(values: Any, shape: PassShape) -> tuple[Any, Any]:
    """Behind the ``_parts``: [3, S] int32, whose state each sequence has, after how many tokens it
    is and up to where it moves; and the place of each row in the rings [bucket]."""
    first, end = _size(shape.bucket, shape.segments), shape.segments
    kind: Any = np.int32 if isinstance(values, np.ndarray) else torch.int32
    narrow = values[first + shape.bucket : first + _more(shape.bucket, end)].view(kind)
    return narrow[: 3 * end].reshape(3, end), values[first : first + shape.bucket]


def _parts(values: Any, shape: PassShape) -> tuple[Any, Any, Any]:
    """What ``values`` holds, an array or a tensor of int64. [5, bucket]: tokens, positions, slots,
    where each row's token lies in memory, rows that give logits. As int32: [S] lengths of the
    sequences, [S + 1] the first row of each, and how many there are."""
    rows, end = 5 * shape.bucket, shape.segments
    kind: Any = np.int32 if isinstance(values, np.ndarray) else torch.int32
    narrow = values[rows : _size(shape.bucket, end)].view(kind)
    return values[:rows].reshape(5, shape.bucket), narrow[:end], narrow[end : 2 * end + 1]


def _embeddings(step: Step) -> list[tuple[int, Tensor]]:
    """(first row, embeddings) of the works that are given as such, or begin so."""
    found = []
    for n in step.table.places("has_embeds", step.rows):
        given = step.table.sequences[step.rows[n]].request.embeds
        if (start := int(step.starts[n])) < len(given):
            found.append((int(step.cu_rows[n] - step.counts[n]), given[start : step.ends[n]]))
    return found
