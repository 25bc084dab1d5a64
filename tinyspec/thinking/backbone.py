"""The parts of a causal LM that thinking needs: its decoder layers, norm, positions, embeddings.
And the two blocks: T makes a thought of a chunk, C makes a state of a thought.

Structure decides, not names of model types. Each block is a copy of one of the backbone's own
decoder layers, run densely over a few vectors: causal in T, seeing both ways in C. They have no KV
cache, and know neither tokens nor the backbone.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tinyspec.errors import UnsupportedModelError
from tinyspec.thinking.config import ThinkingConfig

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
        get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head, decoder, reason = get_head(), decoder_of(model), ""
        parts: dict[str, Any] = {part: getattr(decoder, part, None) for part in PARTS}
        lacks = ", ".join(n for n, module in parts.items() if not isinstance(module, nn.Module))
        layers = parts["layers"]
        if head is None:
            reason = "it has no unembedding"
        elif lacks:
            reason = f"{type(decoder).__name__} has no {lacks}; models with {', '.join(PARTS)} can "
            reason += "(Llama, Qwen, Gemma 3, Mistral, ...)"
        elif not isinstance(layers, nn.ModuleList) or len(layers) < 2:
            reason = "it needs two decoder layers or more"
        else:
            for index, layer in enumerate(layers):
                if "position_embeddings" not in inspect.signature(layer.forward).parameters:
                    kind = type(layer).__name__
                    reason = f"its layer {index} ({kind}) takes no position_embeddings"
                    break
        if reason:
            raise UnsupportedModelError(f"{type(model).__name__} cannot think: {reason}")
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


class DenseLayer(nn.Module):
    """A copy of a decoder layer, over [B, T, d] at positions from 0."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, causal: bool):
        super().__init__()
        self.layer = deepcopy(layer)
        self.rotary_emb = deepcopy(rotary)
        self.causal = causal
        self._kind = layer_type(layer)
        for module in self.layer.modules():
            config = getattr(module, "config", None)
            if config is not None:
                # The copy's own config. Plain matrix products: every row's result at a fixed shape
                # is the row's own, and a mask may say anything.
                config._attn_implementation = "eager"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, d] to the same."""
        length = hidden.shape[1]
        ahead = torch.finfo(hidden.dtype).min if self.causal else 0.0
        mask = hidden.new_full((1, 1, length, length), ahead).triu(1)
        found = self.layer(
            hidden,
            attention_mask=mask,
            position_embeddings=positions(self.rotary_emb, hidden, self._kind),
        )
        return found[0] if isinstance(found, tuple) else found


class ThinkingBlock(nn.Module):
    """T: a causal layer over a chunk's hidden states and the thought so far, then logits."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.block = DenseLayer(backbone.layers[-1], backbone.rotary_emb, causal=True)
        self.norm = deepcopy(backbone.norm)
        self.head = deepcopy(backbone.head)

    def forward(self, chunk: torch.Tensor, thought: torch.Tensor) -> torch.Tensor:
        """Logits [B, t + 1, V] for the tokens of a thought.

        chunk: [B, c, d] hidden states. thought: [B, t, d], embeddings of its first t tokens.
        """
        hidden = self.block(torch.cat([chunk, thought.to(chunk.dtype)], 1))
        return self.head(self.norm(hidden[:, chunk.shape[1] - 1 :]))


class CompressionBlock(nn.Module):
    """C: an encoder layer over a thought; its last vectors are the state of the next chunk."""

    def __init__(self, backbone: Backbone, config: ThinkingConfig):
        super().__init__()
        self.block = DenseLayer(backbone.layers[0], backbone.rotary_emb, causal=False)
        self._chunk_size = config.chunk_size

    def forward(self, thought: torch.Tensor) -> torch.Tensor:
        """[B, state_tokens, d] embeddings of a padded thought to a state [B, c, d]."""
        return self.block(thought)[:, -self._chunk_size :]
