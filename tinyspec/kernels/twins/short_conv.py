"""Twin of the short convolution: numbers of each row by themselves, in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.layers import written_rows


def _places(metadata: AttentionMetadata, rows: int, taps: int) -> tuple[Tensor, Tensor]:
    """[taps, R], oldest first: of every row the slots of the positions up to its own, and [taps, R,
    1] whether there is none: once per pass."""
    key = "places", rows, taps
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
        slots = metadata.page_table[segment, position // size].long() * size + position % size
        metadata.derived[key] = slots, none[..., None]
    return metadata.derived[key]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """Convolution of each row with the K - 1 before it in its sequence, which are in the pages,
    each channel by itself; every row is written to its slot.

        y[r] = bias + sum over j of weight[:, j] * x[position of r - (K - 1 - j)],  j = 0 .. K - 1

    x [R, C], weight [C, K], read in the dtype of x, bias [C] or None, pool [N, page_size, 1, C]
    in the dtype of x, slot_mapping [R] int64, -1 to skip -> [R, C]. Summed in fp32, oldest first,
    rounded once. Before the first row of a sequence there are zeros.
    """
    held = pool.view(-1, pool.shape[-1])
    rows, slots = written_rows(slot_mapping, metadata.derived)
    held.index_copy_(0, slots, x if rows is None else x[rows])
    taps = weight.to(x.dtype).float().T
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if bias is not None:
        total += bias.float()
    for tap, slots, none in zip(taps, *_places(metadata, len(x), len(taps)), strict=True):
        total += held.index_select(0, slots).float().masked_fill_(none, 0) * tap
    return total.to(x.dtype)
