"""Twin of paged attention: tiles of 128 tokens, each a flash-attention call, merged in order.

Bits depend on the tile, not on the page. A tile's partial result does not depend on how many query
rows or tiles share its call, provided that

- query rows are as many as ``padded_queries`` says and, in fp16, for heads wider than 64 in fp32
  and with a softcap, 16 at least, both of a call and of what torch cuts it into (calls of 4 and 8
  rows differ there, in fp16 with AVX512-FP16 at every head size: measured);
- 16-bit heads come in units of 32;
- keys that are left out behind all contexts of a call leave a multiple of KEYS_UNIT;
- partials are merged one after the other from position 0.

A tile that is masked for a row has weight exactly 0 in that merge, so the tiles that other rows
need, and those that a whole block skips by its window or chunk, change nothing. Nor does what is
not finite in keys and values that a row does not attend to. A row is NaN where it attends to a
value that is not finite.

Of passes that need not be canonical (``exact=False``) the rows for which there is a faster call go
by ``attention_plain`` instead. Does not know requests or passes; calls share only what
``AttentionMetadata.derived`` keeps for the layers of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.twins.attention_plain import PlainCall, plain_calls
from tinyspec.kernels.twins.attention_plan import (
    TILE,
    CausalMask,
    TileCall,
    plan_calls,
    query_blocks,
)
from tinyspec.kernels.twins.attention_tiles import KEYS_UNIT, attend_tiles, cut_keeps_bits


def _least_rows(q: Tensor, softcap: float) -> int:
    """Query rows that a call has at least: fewer change a row's bits.

    fp16 on a CPU with AVX512-FP16 needs 16 at every head size.
    """
    wide = q.dtype != torch.bfloat16 or softcap  # with a softcap scores are multiplied in fp32
    return 16 if q.dtype == torch.float16 or (wide and q.shape[2] > 64) else 4


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's pages.

    q [R, Hq, D], caches [N, page_size, Hkv, D], in q's dtype or as e4m3 codes (uint8) -> [R, Hq, D]
    in q's dtype; padding rows are 0. window: keys a row attends to, its own included (0: all).
    chunk: a row attends to the keys since the last multiple of it, its own included (0: all; Llama
    4); not along with a window. softcap: c * tanh(s / c) on the scaled scores (0: none). sinks
    [Hq]: one more logit per head in the softmax's denominator.
    """
    assert not (window and chunk)
    causal, derived = CausalMask(window, chunk), metadata.derived
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    plain: list[PlainCall] = []
    if not metadata.exact and not softcap and sinks is None:
        if ("plain", causal, group) not in derived:
            derived["plain", causal, group] = plain_calls(metadata, causal, group, q.dtype)
        plain = derived["plain", causal, group]
    found: list[tuple[slice | Tensor, Tensor]] = []
    for call in plain:
        part = call.attend(q, k_cache, v_cache, scale)
        if part is None:
            plain, found = [], []
            break
        found.append((call.rows, part))

    key = "tiles", causal, group, q.shape, softcap > 0, len(plain)
    if key not in derived:
        derived[key] = _tile_calls(metadata, causal, q, kv_heads, plain, softcap)
    for tiles in derived[key]:
        part = attend_tiles(
            q, k_cache, v_cache, tiles, group=group, scale=scale, softcap=softcap, sinks=sinks
        )
        found.append((tiles.rows, part))
    if len(found) == 1 and len(found[0][1]) == len(q):
        return found[0][1]
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for rows, part in found:
        result[rows] = part
    return result


def _tile_calls(
    metadata: AttentionMetadata,
    causal: CausalMask,
    q: Tensor,
    kv_heads: int,
    plain: Sequence[PlainCall],
    softcap: float,
) -> list[TileCall]:
    """Canonical calls for all rows that the ``plain`` ones leave."""
    served = {row for call in plain for row in range(call.rows.start, call.rows.stop)}
    blocks = [block for block in query_blocks(metadata, causal) if block.row not in served]
    if not blocks:
        return []
    group, least = q.shape[1] // kv_heads, _least_rows(q, softcap)
    unit = TILE if softcap or not cut_keeps_bits(q.dtype, q.shape[2], least) else KEYS_UNIT
    size = metadata.page_size
    return plan_calls(blocks, size, causal, group, kv_heads, least=least, unit=unit)
