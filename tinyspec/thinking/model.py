"""A causal LM with its two thinking blocks: training's parallel forward, saving, loading.

How an engine reads a prompt with it stands in engine/; the plain sequential way in
benchmarks/coin_reader/reading.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils import ModelOutput

from tinyspec.errors import refuse
from tinyspec.thinking.backbone import Backbone, CompressionBlock, ThinkingBlock, decoder_of
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.thinking.taps import tapped

FILE = "thinking.safetensors"
# As in torch's cross entropy and transformers' labels.
IGNORED = -100


@dataclass
class ThinkingOutput(ModelOutput):
    """loss: answer_loss + thought_loss, the mean over the answers' tokens, and the sum over a
    prompt's chunks, in the mean of B prompts (Eq. 6 of arXiv 2602.08332). logits: [B, L, V].
    thought_logits: [B, K, m, V]."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    thought_logits: torch.Tensor | None = None
    answer_loss: torch.Tensor | None = None
    thought_loss: torch.Tensor | None = None


class ThinkingModel(nn.Module):
    """backbone: a causal LM of transformers; thinking, compression: T and C."""

    def __init__(self, backbone: nn.Module, config: ThinkingConfig):
        super().__init__()
        parts = Backbone.of(backbone)
        # That the blocks are made for.
        self.thinking_config = config.of(len(parts.layers), parts.vocab_size)
        self.backbone = backbone
        self.thinking = ThinkingBlock(parts)
        self.compression = CompressionBlock(parts, self.thinking_config)

    @classmethod
    def from_backbone(cls, backbone: nn.Module, config: ThinkingConfig) -> ThinkingModel:
        """T and C begin as copies of the backbone's layers. Raises UnsupportedModelError for a
        backbone without decoder layers, ValueError for layers that it does not have."""
        return cls(backbone, config)

    @property
    def config(self) -> Any:
        """The backbone's, as trainers expect it."""
        return self.backbone.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def layers(self) -> tuple[nn.Module, nn.Module]:
        """The layers at L_in and L_out, as they are now."""
        layers, config = decoder_of(self.backbone).layers, self.thinking_config
        return layers[config.layer_in], layers[config.layer_out]

    def tapped(
        self, states: torch.Tensor | None, read: Callable[[torch.Tensor], None]
    ) -> AbstractContextManager[None]:
        """While a forward runs, ``states`` [B, T, d] are added behind L_in, and ``read`` is given
        the hidden states behind L_out."""
        add = None if states is None else lambda hidden: hidden + states.to(hidden.dtype)
        layer_in, layer_out = self.layers
        return tapped((layer_in, add), (layer_out, read))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., t] to [..., t, d] by the backbone's own embedding."""
        return self.backbone.get_input_embeddings()(token_ids)  # type: ignore[operator]

    def states(self, thoughts: torch.Tensor) -> torch.Tensor:
        """States [N, c, d] of thoughts [N, m], which IGNORED pads; zero for a trivial one."""
        config = self.thinking_config
        ends = thoughts.new_full((len(thoughts), config.state_tokens), config.end_token_id)
        ends[:, : thoughts.shape[1]] = thoughts.where(thoughts >= 0, config.end_token_id)
        trivial = ends[:, 0] == config.end_token_id
        states = self.compression(self.embed(ends))
        return states.masked_fill(trivial[:, None, None], 0.0)

    def forward(
        self,
        input_ids: torch.Tensor,
        thoughts: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ThinkingOutput:
        """Teacher-forced: every chunk at once, with the states of the gold thoughts before it.

        input_ids: [B, L], padded on the right. thoughts: [B, K, m] with K <= L // c, their end
        tokens included, padded with IGNORED; a chunk of IGNORED alone is not thought about. labels:
        [B, L], IGNORED where no answer stands; rows of the answer get no state. Others go to the
        backbone.
        """
        states = None
        if thoughts is not None:
            self._check(input_ids, thoughts)
            batch, chunks, _ = thoughts.shape
            states = self._added(thoughts, labels, input_ids.shape[1])
        read: list[torch.Tensor] = []
        with self.tapped(states, read.append):
            logits = self.backbone(input_ids=input_ids, use_cache=False, **kwargs).logits
        found = ThinkingOutput(logits=logits)
        if thoughts is not None:
            size = self.thinking_config.chunk_size
            hidden = read[0][:, : chunks * size].reshape(batch * chunks, size, -1)
            flat = thoughts.flatten(0, 1)
            before = self.embed(flat[:, :-1].clamp(min=0))
            found.thought_logits = self.thinking(hidden, before).unflatten(0, (batch, chunks))
            found.thought_loss = _loss(found.thought_logits, thoughts) / batch
        if labels is not None:
            told = (labels[:, 1:] != IGNORED).sum().clamp(min=1)
            found.answer_loss = _loss(logits[:, :-1], labels[:, 1:]) / told
        losses = [loss for loss in (found.answer_loss, found.thought_loss) if loss is not None]
        if losses:
            found.loss = torch.stack(losses).sum()
        return found

    def _added(
        self, thoughts: torch.Tensor, labels: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """What is added at L_in, [B, length, d]: each chunk's state stands on the next chunk."""
        batch, chunks, _ = thoughts.shape
        size = self.thinking_config.chunk_size
        states = self.states(thoughts.flatten(0, 1)).reshape(batch, chunks * size, -1)
        added = states.new_zeros((batch, length, states.shape[-1]))
        added[:, size : size + chunks * size] = states[:, : length - size]
        if labels is not None:
            added = added.masked_fill((labels != IGNORED)[..., None], 0.0)
        return added

    def _check(self, input_ids: torch.Tensor, thoughts: torch.Tensor) -> None:
        config, (count, length), shape = self.thinking_config, input_ids.shape, list(thoughts.shape)
        chunks, tokens = length // config.chunk_size, config.max_thought_tokens
        if len(shape) != 3 or shape[0] != count or shape[1] > chunks or shape[2] > tokens:
            allowed = f"[{count}, chunks, tokens]; {length} tokens have {chunks} whole chunks of "
            allowed += f"{config.chunk_size}, and max_thought_tokens={tokens}"
            raise refuse("thoughts.shape", shape, allowed)

    @property
    def blocks(self) -> nn.ModuleDict:
        """T and C."""
        return nn.ModuleDict({"thinking": self.thinking, "compression": self.compression})

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """The backbone's own files, and beside them T and C (safetensors) and their config."""
        path = Path(folder)
        self.backbone.save_pretrained(path)  # type: ignore[operator]
        self.thinking_config.save(path)
        blocks = {name: tensor.contiguous() for name, tensor in self.blocks.state_dict().items()}
        save_file(blocks, path / FILE, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **kwargs: Any) -> ThinkingModel:
        """From what ``save_pretrained`` wrote; others go to transformers' from_pretrained. Raises
        ValueError naming tensors of T and C that do not fit the backbone."""
        path = Path(folder)
        config = ThinkingConfig.load(path)
        model = cls(AutoModelForCausalLM.from_pretrained(path, **kwargs), config)
        try:
            model.blocks.load_state_dict(load_file(path / FILE))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path / FILE} does not fit this backbone: {reason}") from error
        return model.eval()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy, summed over labels that are not IGNORED."""
    kept = labels != IGNORED
    return cross_entropy(logits[kept].float(), labels[kept], reduction="sum")
