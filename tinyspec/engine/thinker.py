"""Runs the two thinking blocks: first tokens of thoughts, whole thoughts, states.

Batches are of one shape whatever is asked for, padded with zeros, so that what a chunk gives is its
own. Knows chunks and tokens, neither requests nor pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.config import EngineConfig
from tinyspec.determinism.beside import Beside
from tinyspec.determinism.code_digest import syntax_digest
from tinyspec.determinism.probes.batches import BatchFunction, mixing
from tinyspec.errors import refuse
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import unwrap
from tinyspec.runner.layer_taps import LayerTaps
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.thinking.backbone import decoder_of
from tinyspec.thinking.model import IGNORED, ThinkingModel

logger = logging.getLogger("tinyspec")
# What decides the bits of the blocks, beside the wings of every pass.
CODE = ("engine/thinker.py", "thinking/backbone.py", "thinking/blocks.py", "thinking/model.py")
# Chunks of a batch.
BATCH = 8
# In the place of a token: its logits were not finite.
NOT_FINITE = -1


def unwrapped(model: Any) -> tuple[Any, ThinkingModel | None]:
    """The transformers model inside of wrappers, and the thinking model that it is the backbone of,
    if there is one. Raises as ``unwrap``."""
    thinking = model if isinstance(model, ThinkingModel) else None
    return unwrap(model if thinking is None else thinking.backbone), thinking


class Thinker:
    """The blocks of one model. batch: chunks that run at once. layers: the backbone's, which may be
    replaced by stand-ins meanwhile."""

    _runner: ModelRunner
    _torch_state: TorchState

    def __init__(self, model: ThinkingModel, settings: EngineConfig):
        self.config = config = model.thinking_config
        if settings.max_rows is None or settings.max_rows < config.chunk_size:
            allowed = f"at least the model's chunk_size={config.chunk_size}"
            raise refuse("max_rows", settings.max_rows, allowed)
        kinds = {(tensor.dtype, tensor.device) for tensor in model.backbone.parameters()}
        for name in ("thinking", "compression"):
            for tensor in getattr(model, name).parameters():
                if (tensor.dtype, tensor.device) not in kinds:
                    allowed = "dtype and device of its backbone"
                    raise refuse(name, f"{tensor.dtype} on {tensor.device}", allowed)
        self.model = model
        self.layers = decoder_of(model.backbone).layers
        self.batch = BATCH
        self._blocks = nn.ModuleDict()
        self._proven = False

    @property
    def beside(self) -> Beside:
        """The blocks, as they stand in the fingerprint."""
        settings = f"{self.config} {syntax_digest(places=CODE)}"
        return Beside("thinking", self._modules, settings, self._changed)

    def _modules(self) -> nn.Module:
        """The blocks, as they are now."""
        self._blocks["thinking"] = self.model.thinking
        self._blocks["compression"] = self.model.compression
        return self._blocks

    def _changed(self) -> None:
        """The blocks may mix chunks now, or not any more."""
        self.batch = BATCH
        if self._proven:
            self._proven = False
            with suppress(Exception):  # the next request that asks for it raises
                self.prove()

    @property
    def root(self) -> bytes:
        """Of the prefix cache's hashes: what, beside weights, thoughts depend on."""
        return blake2b(f"{self.config} {self.batch}".encode(), digest_size=16).digest()

    def follow(self, runner: ModelRunner) -> None:
        """Add states and read hidden states in the passes of ``runner``."""
        self._runner, self._torch_state = runner, runner.torch_state
        runner.taps = LayerTaps(self.layers, self.config.layer_in, self.config.layer_out)

    def prove(self) -> None:
        """Find, once, whether what a chunk of a batch gives is its own; if not, each runs alone."""
        if self._proven:
            return
        with self._torch_state(), self._evaluating():
            if self.batch > 1 and (mixed := mixing(self._functions(), self.batch)):
                logger.info("thoughts are made one chunk at a time: %s mixes chunks", mixed)
                self.batch = 1
        self._proven = True

    def _functions(self) -> list[BatchFunction]:
        """All that runs on batches."""
        model, config = self.model, self.config
        size, most = config.chunk_size, config.max_thought_tokens
        like = next(model.compression.parameters())
        width = like.new_empty((0, model.config.get_text_config().hidden_size))
        return [
            BatchFunction("T's first token", lambda x: self._logits(x, size - 1), size, width),
            BatchFunction("T", lambda x: self._logits(x, size + most - 2), size + most - 1, width),
            BatchFunction("C", model.compression, config.state_tokens, width),
        ]

    def first_tokens(self, chunks: Tensor) -> list[int]:
        """[N, c, d] hidden states of chunks -> the first token of each one's thought."""
        with self._evaluating():
            return self._in_batches(self._first, chunks).tolist()

    def thoughts(self, chunks: Tensor, firsts: list[int]) -> list[list[int]]:
        """Whole thoughts that begin with ``firsts``: the end token is the last, unless it was cut;
        NOT_FINITE ends one as well."""
        given = torch.tensor(firsts, dtype=torch.int64, device=chunks.device)
        with self._evaluating():
            found: list[list[int]] = self._in_batches(self._whole, chunks, given).tolist()
        ends = (self.config.end_token_id, NOT_FINITE)
        lengths = [next((n for n, t in enumerate(ids, 1) if t in ends), len(ids)) for ids in found]
        return [ids[:length] for ids, length in zip(found, lengths, strict=True)]

    def states(self, thoughts: list[list[int]]) -> list[Tensor]:
        """The state [c, d] of each thought that is not trivial."""
        most = self.config.max_thought_tokens
        padded = [ids + [IGNORED] * (most - len(ids)) for ids in thoughts]
        device = self.model.device
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        with self._evaluating():
            found = self._in_batches(self.model.states, ids)
        return [state.clone() for state in found]

    def _first(self, chunks: Tensor) -> Tensor:
        return self._token(chunks, chunks.shape[1] - 1)

    def _whole(self, chunks: Tensor, firsts: Tensor) -> Tensor:
        """[B, c, d], [B] -> [B, m] tokens; anything behind the end token. Passes are of one shape,
        and as many as the longest thought needs."""
        size, most = chunks.shape[1], self.config.max_thought_tokens
        given = chunks.new_zeros((len(chunks), size + most - 1, chunks.shape[2]))
        given[:, :size] = chunks
        tokens = firsts.new_full((len(firsts), most), self.config.end_token_id)
        tokens[:, 0] = firsts
        ended = torch.zeros_like(firsts, dtype=torch.bool)
        for place in range(1, most):
            before = tokens[:, place - 1]
            ended |= (before == self.config.end_token_id) | (before == NOT_FINITE)
            if ended.all():
                break
            before = before.clamp(min=0)
            given[:, size + place - 1] = self.model.embed(before).to(given.dtype)
            tokens[:, place] = self._token(given, size + place - 1)
        return tokens

    def _token(self, given: Tensor, place: int) -> Tensor:
        """[B] greedy tokens by the vector at ``place``."""
        logits = self._logits(given, place).float()
        finite = logits.isfinite().all(-1)
        return logits.argmax(-1).where(finite, NOT_FINITE)

    def _logits(self, given: Tensor, place: int) -> Tensor:
        """[B, V] by the vector at ``place``."""
        block = self.model.thinking
        hidden = block.block(given)[:, place : place + 1]
        return block.head(block.norm(hidden))[:, 0]

    def _in_batches(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """``function`` of the first dimension's parts, each padded to a batch: with zeros, and with
        end tokens, so that no thought goes on there."""
        found = []
        for parts in zip(*(tensor.split(self.batch) for tensor in given), strict=True):
            count = len(parts[0])
            short = self.batch - count
            if short:
                parts = tuple(torch.cat([part, self._padding(part, short)]) for part in parts)
            found.append(function(*parts)[:count])
        return torch.cat(found)

    def _padding(self, part: Tensor, count: int) -> Tensor:
        fill = 0 if part.is_floating_point() else self.config.end_token_id
        return part.new_full((count, *part.shape[1:]), fill)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self._modules().modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
            self._runner.after_pass()  # what modules of the user's count is no change
