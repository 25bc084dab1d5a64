"""What attention a model calls: heads of every layer and the keys that its rows see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """One call of attention in a forward; scale: of its scores."""

    module: nn.Module
    shape: LayerShape
    reach: Reach
    scale: float


class Layer(NamedTuple):
    """Which module a pass's attention call is expected from, and the keys that its rows see."""

    name: str
    module_id: int
    reach: Reach


class GivenCall(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Survey:
    """All attention calls of a forward, in order; whether the model heeds ``logits_to_keep``."""

    calls: list[AttentionCall]
    keeps_logits: bool
