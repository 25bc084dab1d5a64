"""Twin of linear: tiles of sixteen rows, each one call of one shape.

The last tile is padded with zeros, so for a given weight every call has the same shape, whatever
the number of rows. Required is only that *at sixteen rows* a row's bits do not depend on its place
and its neighbours. Measured with ``position_invariant`` of the probes on cancelling inputs over 147
to 201 shapes (K and N from 1 to 8192, odd ones too, both layouts of the weight, with bias and
without; 1, 2, 4 and 8 threads; AVX-512 with AMX, and limited to AVX2 and SSE4; torch 2.13):

- fp32 by oneDNN: no bit differed.
- fp32 by ``F.linear`` (MKL): bits differed at N = 64, K 100 to 512, with two threads on AVX2, and
  at K = 8192, N = 1 with eight threads. Hence oneDNN, where torch has its operator.
- bf16 and fp16 by ``F.linear``: no bit differed. Both sum in fp32 and round once.

The address of the tile and neighbours of NaN changed nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16
# What inductor emits; private, so a build may lack it.
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One tile [TILE, K] -> [TILE, N]."""
    if _ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; the bits of a row depend on that row, the weight and the bias alone.

    x [R, K], weight [N, K], bias [N] or None, all of one dtype (bf16, fp16 or fp32) -> [R, N] in
    that dtype, summed in fp32 and rounded once.
    """
    rows, width = x.shape
    tiles = x.new_zeros(-(-rows // TILE), TILE, width)
    tiles.view(-1, width)[:rows] = x
    out = x.new_empty(len(tiles), TILE, weight.shape[0])
    for n, tile in enumerate(tiles):
        out[n] = _tile(tile, weight, bias)
    return out.flatten(0, 1)[:rows]
