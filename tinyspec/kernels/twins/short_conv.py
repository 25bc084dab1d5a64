"""Twin of the short convolution: numbers of each row by themselves, in one order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.layers import write_rows


class _Places(NamedTuple):
    """Of the rows of a pass and those before them, tap by tap, oldest first, [taps * R]. slots: in
    the pages; with rings rows of the pass. held: which of them lie in rings, and where. none: which
    are before the first of their sequence; None: nowhere any."""

    slots: Tensor
    held: tuple[Tensor, Tensor] | None
    none: Tensor | None


def _places(metadata: AttentionMetadata, rows: int, taps: int, ring: int) -> _Places:
    """Once per pass; ring: of so many tokens, or 0."""
    key = "places", rows, taps, ring
    if key not in metadata.derived:
        ends, size = metadata.cu_seqlens_q[1:], metadata.page_size
        row = torch.arange(rows, dtype=torch.int32, device=ends.device)
        segment = torch.searchsorted(ends, row, right=True)
        padding = segment >= len(ends)
        segment.clamp_(max=len(ends) - 1)
        own = metadata.seq_lens[segment] - (ends[segment] - row)
        back = torch.arange(taps - 1, -1, -1, dtype=torch.int32, device=ends.device)
        position = (own - back[:, None]).masked_fill_(padding, -1).long()
        empty = position < 0
        position.clamp_(min=0)
        held = None
        if ring:
            assert metadata.checkpoints is not None
            given = row - back[:, None] >= metadata.cu_seqlens_q[segment]
            slots = torch.where(given, row - back[:, None], row).long()
            stored = (~given & ~empty).flatten().nonzero().squeeze(-1)
            there = metadata.checkpoints.owners[segment] * ring + position % ring
            held = (stored, there.flatten()[stored]) if len(stored) else None
        else:
            slots = metadata.page_table[segment, position // size].long() * size + position % size
        none = empty.flatten().nonzero().squeeze(-1)
        found = _Places(slots.flatten(), held, none if len(none) else None)
        metadata.derived[key] = found
    places: _Places = metadata.derived[key]
    return places


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
    ring: bool = False,
) -> Tensor:
    """Convolution of each row with the K - 1 before it in its sequence, which are in the pages,
    each channel by itself; every row is written to its slot.

        y[r] = bias + sum over j of weight[:, j] * x[position of r - (K - 1 - j)],  j = 0 .. K - 1

    x [R, C], weight [C, K], read in the dtype of x, bias [C] or None, pool [N, page_size, 1, C]
    in the dtype of x, slot_mapping [R] int64, -1 to skip -> [R, C]. ring: the pool [N, L, C] is of
    ``metadata.checkpoints``, and only read, for rows before the segments. Summed in fp32, oldest
    first, rounded once. Before the first row of a sequence there are zeros.
    """
    stored = pool.view(-1, pool.shape[-1])
    if not ring:
        write_rows(stored, x, slot_mapping, metadata.derived)
    taps = weight.to(x.dtype).float().T
    places = _places(metadata, len(x), len(taps), pool.shape[1] if ring else 0)
    rows = (x if ring else stored).index_select(0, places.slots)
    if places.held is not None:
        chosen, before = places.held
        rows.index_copy_(0, chosen, stored.index_select(0, before))
    if places.none is not None:
        rows.index_fill_(0, places.none, 0)
    total, *parts = rows.float().view(len(taps), *x.shape).mul_(taps[:, None])
    if bias is not None:
        total = total + bias.float()
    for part in parts:
        total = total + part
    return total.to(x.dtype)
