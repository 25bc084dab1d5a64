"""Twin of the short convolution: numbers of each row by themselves, in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.layers import written_rows


def _places(
    metadata: AttentionMetadata, rows: int, taps: int, ring: int
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """[taps, R], oldest first: of every row the slots of the positions up to its own, and [taps, R,
    1] whether there is none: once per pass. ring: of so many tokens, not 0: rows of the pass in
    place of slots, and of each tap which lie before their segments, with their places in rings."""
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
        none = position < 0
        position.clamp_(min=0)
        held = []
        if ring:
            assert metadata.checkpoints is not None
            given = row - back[:, None] >= metadata.cu_seqlens_q[segment]
            slots = torch.where(given, row - back[:, None], row).long()
            there = metadata.checkpoints.owners[segment] * ring + position % ring
            for stored, places in zip(~given & ~none, there, strict=True):
                chosen = stored.nonzero().squeeze(-1)
                held.append((chosen, places[chosen]))
        else:
            slots = metadata.page_table[segment, position // size].long() * size + position % size
        metadata.derived[key] = slots, none[..., None], held
    return metadata.derived[key]


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
        written, slots = written_rows(slot_mapping, metadata.derived)
        stored.index_copy_(0, slots, x if written is None else x[written])
    taps = weight.to(x.dtype).float().T
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if bias is not None:
        total += bias.float()
    places, none, held = _places(metadata, len(x), len(taps), pool.shape[1] if ring else 0)
    for n, tap in enumerate(taps):
        rows = (x if ring else stored).index_select(0, places[n]).float()
        if ring:
            chosen, before = held[n]
            rows.index_copy_(0, chosen, stored.index_select(0, before).float())
        total += rows.masked_fill_(none[n], 0) * tap
    return total.to(x.dtype)
