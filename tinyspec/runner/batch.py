"""A pass as tensors: packed rows, their slots, their attention metadata. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.passes import Pass, spread
from tinyspec.scheduler.sequence_table import Array, highest


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
    def of(cls, work_pass: Pass, page_size: int, device: torch.device) -> Batch:
        """Pack the works of ``work_pass`` one after the other."""
        table, works = work_pass.table, work_pass.works
        packed = np.zeros((3, work_pass.bucket), np.int64)
        first_rows = np.empty(len(works) + 1, np.int32)
        pack_rows(work_pass, page_size, packed, first_rows)
        width = highest(table.num_pages[works.rows])
        page_table = np.ascontiguousarray(table.pages[works.rows][:, :width])

        def tensor(values: Array) -> Tensor:
            return to_device(values, device)

        ids, positions, slot_mapping = map(tensor, packed)
        metadata = AttentionMetadata(
            page_table=tensor(page_table),
            cu_seqlens_q=tensor(first_rows),
            seq_lens=tensor(works.ends.astype(np.int32)),
            page_size=page_size,
            max_seqlen_q=1 if works.single else highest(works.counts),
            max_seqlen_k=highest(works.ends),
        )
        return cls(ids, positions, slot_mapping, metadata, embeddings(work_pass))


def pack_rows(work_pass: Pass, page_size: int, packed: Array, first_rows: Array) -> None:
    """Write token, position and slot of every row to ``packed`` [3, bucket], which is 0, and the
    first row of every work, then how many rows there are, to ``first_rows`` [works + 1]."""
    table, works = work_pass.table, work_pass.works
    row, position, counts, total = works.rows, works.starts, works.counts, works.num_rows
    first_rows[0], first_rows[1:] = 0, works.cu_rows
    if not works.single:
        row, position = row.repeat(counts), spread(position, counts)
    page, offset = np.divmod(position, page_size)
    slots = table.pages[row, page] * np.int64(page_size) + offset
    # Rows on shared pages run for their logits only.
    slots[position < table.frozen[row]] = -1
    packed[0, :total], packed[1, :total] = table.ids[row, position], position
    packed[2, :total], packed[2, total:] = slots, -1


def embeddings(work_pass: Pass) -> list[tuple[int, Tensor]]:
    """(first row, embeddings) of the works that are given as such, or begin so."""
    works = work_pass.works
    if not work_pass.table.places("has_embeds", works.rows):
        return []
    firsts = works.cu_rows - works.counts
    spans = zip(firsts.tolist(), works.starts.tolist(), works.ends.tolist(), strict=True)
    return [
        (first, given[start:end])
        for (first, start, end), sequence in zip(spans, work_pass.sequences, strict=True)
        if (given := sequence.request.embeds) is not None and start < len(given)
    ]
