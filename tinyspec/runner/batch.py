"""A pass as tensors: packed rows, their slots, their attention metadata. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.scheduler.passes import Pass


@dataclass
class Batch:
    """The rows of one pass, padded to its bucket; padding rows write no KV and attend to none.

    input_ids, positions, slot_mapping: [bucket] int64, slot -1 for padding.
    first_rows: pass row of every work's first row. embeds: (first row, [n, hidden]) of rows that
    enter the model as embeddings instead of ids.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata
    first_rows: list[int]
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, work_pass: Pass, page_size: int, device: torch.device) -> Batch:
        """Pack the works of ``work_pass`` one after the other."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        works = work_pass.works
        for work in works:
            pages = work.sequence.pages
            places = range(work.start, work.end)
            ids += work.token_ids
            positions += places
            # Rows on shared pages run for their logits only.
            frozen = min(max(work.sequence.frozen - work.start, 0), work.count)
            slots += [-1] * frozen
            slots += [pages[p // page_size] * page_size + p % page_size for p in places[frozen:]]
            starts.append(len(ids))
        padding = work_pass.bucket - len(ids)
        packed = torch.tensor(
            [ids + [0] * padding, positions + [0] * padding, slots + [-1] * padding],
            dtype=torch.int64,
            device="cpu",
        ).to(device)
        spans = [(work.start, work.end) for work in works]
        tables = [work.sequence.pages for work in works]
        metadata = AttentionMetadata.of(spans, tables, page_size, device)
        embeds = [
            (first, given[work.start : work.end])
            for first, work in zip(starts[:-1], works, strict=True)
            if (given := work.sequence.request.embeds) is not None and work.start < len(given)
        ]
        return cls(packed[0], packed[1], packed[2], metadata, starts[:-1], embeds)
