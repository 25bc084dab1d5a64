"""The two blocks: T makes a thought of a chunk, C makes a state of a thought.

Each is a copy of one of the backbone's own decoder layers, run densely over a few vectors: causal
in T, seeing both ways in C. They have no KV cache, and know neither tokens nor the backbone.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from tinyspec.thinking.backbone import Backbone, layer_type, positions
from tinyspec.thinking.config import ThinkingConfig


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
        mask = hidden.new_zeros((1, 1, length, length))
        if self.causal:
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.full_like(mask, lowest).triu(1)
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
