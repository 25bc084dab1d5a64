"""What attention a model calls: heads of every layer and the keys that its rows see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerShape:
    """Heads of one attention layer, and the softcap of its scores (0: none)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float = 0.0


@dataclass(frozen=True)
class Reach:
    """The keys that a row sees: those of its window, of its chunk, or (both 0) all before it."""

    window: int = 0
    chunk: int = 0


@dataclass
class AttentionCall:
    """One call of attention in a forward."""

    module: nn.Module
    shape: LayerShape
    reach: Reach


@dataclass
class Survey:
    """All attention calls of a forward, in order; whether the model heeds ``logits_to_keep``."""

    calls: list[AttentionCall]
    keeps_logits: bool
