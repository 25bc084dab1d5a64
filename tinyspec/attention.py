"""Attention of a patched model: reads and writes pages, by the pass that the runner has set.

Two doors to the same kernels: ``PagedAttention`` takes the place of an attention module of the
standard layout; ``paged_attention_function`` serves every module that calls transformers' attention
interface. Neither knows requests; what a pass needs stands in one ``AttentionContext``.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinyspec.kernels import Kernels
from tinyspec.kernels.segments import Segments

# The name under which transformers knows paged attention. No mask function goes by it, so models
# build no masks: causality comes from the segments.
IMPLEMENTATION = "tinyspec"


class Note(NamedTuple):
    """How a layer's q and k, handed over as they are, want to be turned: cos and sin [R, rot]."""

    layer: int
    cos: Tensor
    sin: Tensor
    interleaved: bool


class AttentionContext:
    """What attention layers share: the kernels, the pool, the pass that is running, in which
    thread. Another thread's forward has no business with it."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.segments: Segments | None = None
        self.thread = 0
        self.slot_mapping: Tensor | None = None
        self.note: Note | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        norm: dict[str, Any],
        **scores: Any,
    ) -> Tensor:
        """Write k and v [R, Hkv, D] of a layer to their slots; attend with q [R, Hq, D]."""
        if self.segments is None or self.kernels is None or self.thread != get_ident():
            raise RuntimeError(
                "this model's attention is served by tinyspec: generate through its Engine, or "
                "close that to use the model by itself"
            )
        note, self.note = self.note, None
        if note is not None and note.layer == layer:
            rope = note.cos, note.sin
            norm = {"interleaved": True} if note.interleaved else norm
        cos, sin = rope or (None, None)
        k_cache, v_cache = self.k[layer], self.v[layer]
        q = self.kernels.fused_kv_write(
            q, k, v, cos, sin, k_cache, v_cache, self.slot_mapping, **norm
        )
        return self.kernels.paged_attention(q, k_cache, v_cache, self.segments, **scores)


class PagedAttention(nn.Module):
    """Attention with separate q, k, v projections, optional q/k norm and standard RoPE, over pages.

    Shares the projections of the module that it stands in for, under the same names.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: Any
    k_norm: Any

    def __init__(self, original: nn.Module, context: AttentionContext):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))
        self.context = context
        self.config: Any = original.config
        self.layer_idx: int = original.layer_idx  # type: ignore[assignment]
        self.head_dim: int = original.head_dim  # type: ignore[assignment]
        # What the original's forward reads: Mistral leaves the window to the config.
        read = type(original).forward.__code__
        window = self.config.sliding_window if "sliding_window" in read.co_consts else None
        if "sliding_window" in read.co_names:
            window = original.sliding_window
        capped = "attn_logit_softcapping" in read.co_names
        self.scores = {
            "scale": original.scaling,
            "window": window or 0,
            "softcap": (original.attn_logit_softcapping if capped else None) or 0.0,
        }
        # Of its own: the projections are shared, and may be in another mode.
        self.training = original.training

    def _norm(self) -> dict[str, Any]:
        """Norms of q and k, with the weights that they have now."""
        if not hasattr(self, "q_norm"):
            return {}
        q, k = self.q_norm, self.k_norm
        return {"q_weight": q.weight, "k_weight": k.weight, "eps": q.variance_epsilon}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, R, hidden]; position_embeddings cos and sin [1, R, rot]."""
        rows = hidden_states.shape[1]
        q = self.q_proj(hidden_states).view(rows, -1, self.head_dim)
        k = self.k_proj(hidden_states).view(rows, -1, self.head_dim)
        v = self.v_proj(hidden_states).view(rows, -1, self.head_dim)
        rope = (position_embeddings[0][0], position_embeddings[1][0])
        out = self.context.attend(self.layer_idx, q, k, v, rope, self._norm(), **self.scores)
        return self.o_proj(out.view(1, rows, -1)), None


def paged_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, R, D], key and value [1, Hkv, R, D]."""
    context: AttentionContext = module.tinyspec_context  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = context.attend(
        layer,
        q,
        k,
        v,
        None,
        {},
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


class RopeTable(nn.Module):
    """cos and sin of every position, computed once by the model's own rotary module.

    A row's rotation then depends on its position alone, whatever shares the pass.
    """

    def __init__(self, rotary: nn.Module, positions: int, like: Tensor):
        super().__init__()
        place = torch.arange(positions, device=like.device)[None]
        with torch.no_grad():
            cos, sin = rotary(like, position_ids=place)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos[0].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0].contiguous(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [1, R] -> cos and sin [1, R, rot]."""
        rows = position_ids[0]
        return self.cos.index_select(0, rows)[None], self.sin.index_select(0, rows)[None]
