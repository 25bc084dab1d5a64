"""Whether a tile's result keeps its bits without the masked keys at its end.

torch's call reads and multiplies keys that the mask hides. A masked key adds exactly 0 to each sum,
so leaving it out changes bits only where the number of keys decides how sums are cut: on CPUs with
AVX2 and with AVX-512 at 8 and 16 keys, never at multiples of 32 (18,468 cases of three dtypes, head
sizes of 32 to 256 and 4 to 512 query rows). Compared before use; where it does not hold, tiles are
attended to whole.
"""

from __future__ import annotations

from functools import cache

import torch

from tinyspec.kernels.twins.attention_mask import MASKED
from tinyspec.kernels.twins.attention_plan import QUERY_UNIT, TILE
from tinyspec.kernels.twins.attention_tiles import HEAD_UNIT, flash_attention

KEYS_UNIT = 32
# Query rows at which torch begins to multiply more of them at a time.
_LARGER = (192, 768)


@cache
def cut_keeps_bits(dtype: torch.dtype, dim: int, least: int) -> bool:
    """Whether flash attention over the first 32, 64 and 96 keys of a tile has the bits of one over
    all 128, those behind masked.

    dim: of a head. least: query rows that a call has at least.
    """
    wide = dim if dtype == torch.float32 else dim + -dim % HEAD_UNIT
    generator = torch.Generator().manual_seed(wide)
    most = _LARGER[-1]
    values = torch.randn(
        2, most + 2 * TILE, wide, dtype=torch.float32, device="cpu", generator=generator
    )
    q, k, v = values.to(dtype)[None].split((most, TILE, TILE), dim=2)
    for rows in (least, QUERY_UNIT, *_LARGER):
        for keys in range(KEYS_UNIT, TILE, KEYS_UNIT):
            # The last of these keys is hidden as well.
            mask = torch.zeros(1, 1, rows, TILE, dtype=torch.float32, device="cpu")
            mask[..., keys - 1 :] = MASKED
            whole, cut = (
                flash_attention(
                    q[:, :, :rows], k[:, :, :n], v[:, :, :n], 0.0, attn_mask=mask[..., :n]
                )
                for n in (TILE, keys)
            )
            if not all(map(torch.equal, whole, cut)):
                return False
    return True
