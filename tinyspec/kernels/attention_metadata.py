"""The rows of one pass, grouped by sequence: what attention needs to know.

Knows nothing of requests, drafts or canonical passes: a prompt chunk, a decode row and the rows of
a verify are all segments, so one reduction serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass
class AttentionMetadata:
    """Segment s is the rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``: consecutive tokens of one
    sequence, the last of them at position ``seq_lens[s] - 1``. Rows after the last are padding.

    page_table:   [S, P] int32, a sequence's pages in order; entries past its last page are 0.
    cu_seqlens_q: [S + 1] int32, first row of every segment.
    seq_lens:     [S] int32, context length including the segment's own rows.
    page_size:    tokens per page.
    max_seqlen_q, max_seqlen_k: rows of the longest segment, tokens of the longest context.
    exact:        whether the pass is canonical; in others a backend may use a faster reduction.
    derived:      what a backend computes once per pass and reuses in every layer.
    """

    page_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    exact: bool = True
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        exact: bool = True,
    ) -> AttentionMetadata:
        """One segment per sequence: its tokens at positions ``first`` to ``end - 1``, for every
        (first, end) of ``spans``; ``page_tables``: its pages in order, enough for ``end`` tokens.
        """
        counts = [end - first for first, end in spans]
        lengths = [end for _, end in spans]
        width = max(map(len, page_tables))

        def column(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)

        return cls(
            page_table=column([[*pages, *[0] * (width - len(pages))] for pages in page_tables]),
            cu_seqlens_q=column(list(accumulate(counts, initial=0))),
            seq_lens=column(lengths),
            page_size=page_size,
            max_seqlen_q=max(counts),
            max_seqlen_k=max(lengths),
            exact=exact,
        )
