"""Records of attention calls: heads, the keys that a row attends to, the calling module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


@dataclass(frozen=True)
class LayerShape:
    """Heads of one attention layer, the softcap of its scores (0: none), and whether each head has
    a sink."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class Reach:
    """The keys that a row attends to: of its window, of its chunk, or (both 0) all before it."""

    window: int = 0
    chunk: int = 0


@dataclass
class AttentionCall:
    """One attention call of a forward; scale: of the scores."""

    module: nn.Module
    shape: LayerShape
    reach: Reach
    scale: float


class Layer(NamedTuple):
    """What is expected of an attention call of a pass: the calling module, the keys of its rows."""

    name: str
    module: nn.Module
    reach: Reach


class ModuleCall(NamedTuple):
    """The arguments of one call of an attention module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Any:
        """The hidden states [1, R, hidden]."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def of(self, hidden: Tensor) -> ModuleCall:
        """The same call on other hidden states."""
        if self.args:
            return ModuleCall((hidden, *self.args[1:]), self.kwargs)
        return ModuleCall((), {**self.kwargs, "hidden_states": hidden})
