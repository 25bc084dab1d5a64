"""Which rows of a pass the attention twin's calls take query rows from, and give results to.

Knows numbers of rows and heads; no positions and no pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.kernels.twins.index_tensors import counts_up, integers


class Layout(NamedTuple):
    """Where the query rows of a call are taken from, and its results go to.

    height: pass rows that a block's query rows are taken from; a short block repeats its last row.
    gather: [T * parts * height] the groups of heads, counted through the pass, that are every
            tile's query rows; in_order: whether this is 0, 1, 2, ...
    rows:   [n] the pass rows that the call computes, ascending.
    picked: [n * parts * group] where these have their heads in the result [B, parts, queries]; None
            where that is 0, 1, 2, ...
    """

    height: int
    gather: Tensor
    in_order: bool
    rows: Tensor
    picked: Tensor | None


# Decode rows keep their places from step to step.
@lru_cache(maxsize=16)
def layout_of(
    blocks: tuple[tuple[int, int], ...],
    owners: tuple[int, ...],
    queries: int,
    group: int,
    parts: int,
) -> Layout:
    """The layout of a call for ``blocks`` (first row, rows); owners: block of every tile."""
    height = -(-queries // group)
    known = torch.tensor(blocks, dtype=torch.int64, device="cpu")
    rows = known[:, :1] + torch.minimum(integers(range(height)), known[:, 1:] - 1)
    gather = rows[list(owners), None] * parts + integers(range(parts))[:, None]
    own = sorted((row, n * parts * queries, count) for n, (row, count) in enumerate(blocks))
    query = integers([place + n * group for _, place, count in own for n in range(count)])
    heads = integers(range(group)) + integers(range(parts))[:, None] * queries
    picked = (query[:, None, None] + heads).flatten()
    return Layout(
        height=height,
        gather=gather.flatten(),
        in_order=counts_up(gather.flatten()),
        rows=integers([first + n for first, _, count in own for n in range(count)]),
        picked=None if counts_up(picked) else picked,
    )
