"""Twin of paged attention: tiles of 128 tokens, each a flash-attention call, merged in order.

The tile, not the page, is what the bits see. A tile's partial result does not depend on how many
query rows or tiles share its call, provided the query rows are a multiple of four and, in fp16 and
for heads wider than 64 in fp32 and with a softcap, 16 at least (on Intel CPUs calls of 4 and 8 rows
stand apart there, in fp16 with AVX512-FP16 for every head; measured: ``benchmarks/probe.py``),
16-bit heads come in units of 32, and partials are merged one after the other from position 0. A
tile that is masked for a row has weight exactly 0 in that merge, so the tiles that other rows need,
and those that a window or chunk lets a whole block skip, change nothing.

Rows whose bits are nobody's business (``Segments.exact``) go by ``quick_attention`` instead. Does
not know requests or passes, and shares nothing between calls but what ``Segments.derived`` keeps
for the layers of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyspec.kernels.segments import Segments
from tinyspec.kernels.twins.quick_attention import quick_attention
from tinyspec.kernels.twins.tile_plan import Sight, blocks_of, groups_of
from tinyspec.kernels.twins.tiles import attend_tiles


def _least_rows(q: Tensor, softcap: float) -> int:
    """Query rows that a call has at least: fewer change a row's bits."""
    wide = q.dtype == torch.float32 or softcap  # with a softcap scores are multiplied in fp32
    return 16 if q.dtype == torch.float16 or (wide and q.shape[2] > 64) else 4


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's pages.

    q [R, Hq, D], caches [N, page_size, Hkv, D] -> [R, Hq, D] in q's dtype; padding rows are 0.
    window: keys a row sees, itself included (0: all). chunk: a row sees the keys since the last
    multiple of it, itself included (0: all; Llama 4); not along with a window. softcap: c * tanh(s
    / c) on the scaled scores (0: none). sinks [Hq]: one more logit per head in the softmax's
    denominator.
    """
    assert not (window and chunk)
    sight = Sight(window, chunk)
    if not segments.exact and not softcap and sinks is None:
        return quick_attention(q, k_cache, v_cache, segments, scale=scale, sight=sight)
    group = q.shape[1] // k_cache.shape[2]
    least = _least_rows(q, softcap)
    key = "tiles", sight, group, least
    plans = segments.derived.get(key)
    if plans is None:
        blocks = blocks_of(segments, sight)
        # A multiple of four query rows per call, and ``least`` at least.
        plans = groups_of(blocks, segments, sight, group, unit=4, least=least)
        segments.derived[key] = plans

    result = torch.zeros(q.shape, dtype=q.dtype)
    for plan in plans:
        found = attend_tiles(
            q,
            k_cache,
            v_cache,
            plan,
            group=group,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        # A block's repeated last row is the same row computed again: the same bits, written twice.
        result.index_copy_(0, plan.rows, found)
    return result
