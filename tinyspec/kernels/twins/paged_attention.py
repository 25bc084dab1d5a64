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

Plain rows (``exact=False``) go by ``plain_attention`` instead. Does not know requests or passes;
calls share only what ``AttentionMetadata.derived`` keeps for the layers of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.kernels.twins.attention_cut import KEYS_UNIT, cut_keeps_bits
from tinyspec.kernels.twins.attention_mask import CausalMask
from tinyspec.kernels.twins.attention_plain import plain_attention
from tinyspec.kernels.twins.attention_plan import TILE, plan_calls, query_blocks
from tinyspec.kernels.twins.attention_tiles import attend_tiles


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
    bounds = window, chunk
    if not metadata.exact and not softcap and sinks is None:
        plain = plain_attention(q, k_cache, v_cache, metadata, scale=scale, bounds=bounds)
        if plain is not None:
            return plain
    kv_heads = k_cache.shape[2]
    group = q.shape[1] // kv_heads
    key = "tiles", bounds, group, q.shape, softcap > 0
    plans = metadata.derived.get(key)
    if plans is None:
        causal, least = CausalMask(*bounds), _least_rows(q, softcap)
        unit = TILE if softcap or not cut_keeps_bits(q.dtype, q.shape[2], least) else KEYS_UNIT
        blocks, size = query_blocks(metadata, causal), metadata.page_size
        plans = plan_calls(blocks, size, causal, group, kv_heads, least=least, unit=unit)
        metadata.derived[key] = plans

    parts = [
        attend_tiles(
            q, k_cache, v_cache, plan, group=group, scale=scale, softcap=softcap, sinks=sinks
        )
        for plan in plans
    ]
    if len(parts) == 1 and len(parts[0]) == len(q):
        return parts[0]
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for plan, part in zip(plans, parts, strict=True):
        result.index_copy_(0, plan.layout.rows, part)
    return result
