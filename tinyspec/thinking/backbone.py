"""The parts of a causal LM that thinking needs: its decoder layers, norm, positions, embeddings.

Structure decides, not names of model types. Does not know what is built from the parts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tinyspec.errors import UnsupportedModelError

PARTS = ("layers", "norm", "rotary_emb", "embed_tokens")


@dataclass(frozen=True)
class Backbone:
    """layers: decoder layers, called with hidden states [B, T, d] and positions' cosines and
    sines; head: the unembedding."""

    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module
    embed_tokens: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: Any) -> Backbone:
        """Raises UnsupportedModelError naming what is missing."""
        name = type(model).__name__
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise UnsupportedModelError(f"{name} cannot think: it has no unembedding")
        decoder = decoder_of(model)
        parts: dict[str, Any] = {part: getattr(decoder, part, None) for part in PARTS}
        missing = [part for part, module in parts.items() if not isinstance(module, nn.Module)]
        if missing:
            lacks = ", ".join(missing)
            raise UnsupportedModelError(
                f"{name} cannot think: {type(decoder).__name__} has no {lacks}; models with "
                f"{', '.join(PARTS)} can (Llama, Qwen, Gemma 3, Mistral, ...)"
            )
        if not isinstance(parts["layers"], nn.ModuleList) or len(parts["layers"]) < 2:
            raise UnsupportedModelError(f"{name} cannot think: it needs two decoder layers or more")
        for index, layer in enumerate(parts["layers"]):
            if "position_embeddings" not in inspect.signature(layer.forward).parameters:
                raise UnsupportedModelError(
                    f"{name} cannot think: its layer {index} ({type(layer).__name__}) takes no "
                    "position_embeddings"
                )
        return cls(head=head, **parts)

    @property
    def vocab_size(self) -> int:
        weight = self.embed_tokens.weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0]


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that has the decoder layers."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def layer_type(layer: nn.Module) -> str | None:
    """The kind of attention that a layer says it has, where positions depend on it."""
    attention = getattr(layer, "self_attn", None)
    for owner in (attention, layer):
        found = getattr(owner, "layer_type", None) or getattr(owner, "attention_type", None)
        if isinstance(found, str):
            return found
    return None


def positions(rotary: nn.Module, hidden: torch.Tensor, kind: str | None) -> object:
    """Cosines and sines for hidden states [B, T, d] at positions from 0."""
    ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return rotary(hidden, ids, kind)
    return rotary(hidden, ids)
