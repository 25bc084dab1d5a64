"""The rows of one pass, grouped by sequence: what attention needs to know.

Knows nothing of requests, drafts or canonical passes: a prompt chunk, a decode row and the rows of
a verify are all segments, and that is why they follow one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class AttentionMetadata:
    """Segment s owns the rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``, consecutive tokens of one
    sequence, the last of them at position ``seq_lens[s] - 1``. Rows behind the last are padding.

    page_table:   [S, P] int32, a sequence's pages in order; entries past its last page are 0.
    cu_seqlens_q: [S + 1] int32, first row of every segment.
    seq_lens:     [S] int32, context length including the segment's own rows.
    page_size:    tokens per page.
    max_seqlen_q, max_seqlen_k: the longest segment, the longest context.
    exact: whether every row must follow the one reduction; where not, a backend may be quicker.
    derived:      what a backend works out once per pass and reads again in every layer.
    """

    page_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    exact: bool = True
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
