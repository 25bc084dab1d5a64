"""Runs the two thinking blocks: first tokens of thoughts, whole thoughts, states.

What a chunk gives is its own, whatever it shares a batch with. Knows chunks and tokens, neither
requests nor pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.determinism.fingerprint import ExtraModules
from tinyspec.determinism.results import code_digest
from tinyspec.determinism.rows import BatchFunction
from tinyspec.errors import refuse
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import unwrap
from tinyspec.thinking.model import IGNORED, ThinkingModel

logger = logging.getLogger("tinyspec")
# Chunks of the batch that says what a chunk's bits are, and of those that may give the same.
REFERENCE = 8
SIZES = (1, 8, 16, 32, 64)


class ChunkBatches:
    """functions: makes all that runs in batches, to be looked at.

    reference: chunks of a batch that decides bits; 1 where chunks of a batch mix. proven: whether
    this is known, so that a chunk's results hang on nothing else.
    """

    def __init__(self, functions: Callable[[], list[BatchFunction]]):
        self._functions = functions
        self.reference, self.proven = REFERENCE, False
        self._same = {REFERENCE: True}

    def prove(self) -> None:
        """Find whether what a chunk gives is its own; if not, each runs alone."""
        for function in self._functions():
            if not function.keeps_places(REFERENCE):
                logger.info("thoughts are made one chunk at a time: %s mixes chunks", function.name)
                self.reference = 1
                break
        self.proven = True

    def run(
        self, function: Callable[..., Tensor], *given: Tensor, fills: tuple[Any, ...]
    ) -> Tensor:
        """``function`` of all parts of ``given``, [N, ...] each; fills: what pads a batch."""
        found, start, count = [], 0, len(given[0])
        while start < count:
            size = self._size(count - start)
            parts = [tensor[start : start + size] for tensor in given]
            short = size - len(parts[0])
            if short:
                parts = [_padded(*pair, short) for pair in zip(parts, fills, strict=True)]
            found.append(function(*parts)[: size - short])
            start += size
        return torch.cat(found)

    def _size(self, count: int) -> int:
        """Of the next batch, where so many chunks are left."""
        if not self.proven:
            return min(count, SIZES[-1])
        if self.reference == 1:
            return 1
        enough = next((s for s in SIZES if s >= count and self._is_same(s)), None)
        return enough or max(size for size in SIZES if size <= count and self._is_same(size))

    def _is_same(self, size: int) -> bool:
        """Whether batches of ``size`` give the bits of the reference; looked at once."""
        if size not in self._same:
            self._same[size] = all(f.agrees(size, REFERENCE) for f in self._functions())
        return self._same[size]


def _padded(part: Tensor, fill: Any, count: int) -> Tensor:
    return torch.cat([part, part.new_full((count, *part.shape[1:]), fill)])


# States that are kept, by their thoughts.
KEPT_STATES = 256
# In the place of a token: its logits were not finite.
NOT_FINITE = -1


def unwrapped(model: Any) -> tuple[Any, ThinkingModel | None]:
    """The transformers model inside of wrappers, and the thinking model that it is the backbone of,
    if there is one. Raises as ``unwrap``."""
    thinking = model if isinstance(model, ThinkingModel) else None
    return unwrap(model if thinking is None else thinking.backbone), thinking


class Thinker:
    """The blocks of one model. batches: of the chunks that run at once."""

    _torch_state: TorchState

    def __init__(self, model: ThinkingModel, settings: EngineConfig):
        self.config = config = model.thinking_config
        if settings.max_rows is None or settings.max_rows < config.chunk_size:
            allowed = f"at least the model's chunk_size={config.chunk_size}"
            raise refuse("max_rows", settings.max_rows, allowed)
        self.model = model
        self.batches = ChunkBatches(self._functions)
        self._states: dict[tuple[int, ...], Tensor] = {}

    @property
    def extra_modules(self) -> ExtraModules:
        """The blocks, as they stand in the fingerprint."""
        return ExtraModules(self.model.blocks, f"{self.config} {code_digest('thinking')}")

    def forget_states(self) -> None:
        """Make them anew."""
        self._states.clear()

    def serve(self, model: ThinkingModel, torch_state: TorchState) -> None:
        """The shadow whose blocks run from now on, in the state of its passes.

        Raises ValueError for blocks on another device, or of another dtype, than the backbone."""
        kinds = {(tensor.dtype, tensor.device) for tensor in model.backbone.parameters()}
        for name, tensor in model.blocks.named_parameters():
            if (tensor.dtype, tensor.device) not in kinds:
                allowed = "dtype and device of its backbone"
                raise refuse(name.split(".")[0], f"{tensor.dtype} on {tensor.device}", allowed)
        self.model = model
        self.forget_states()
        self._torch_state = torch_state
        # The blocks may mix chunks now, or not any more.
        proven, self.batches = self.batches.proven, ChunkBatches(self._functions)
        if proven:
            with suppress(Exception):  # the next request that asks for it raises
                self.prove()

    def prove(self) -> None:
        """Find, once, whether what a chunk of a batch gives is its own; if not, each runs alone."""
        if not self.batches.proven:
            with self._torch_state():
                self.batches.prove()
            self.forget_states()  # until now batches were of any size

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
        first = partial(self._token, place=chunks.shape[1] - 1)
        return self.batches.run(first, chunks, fills=(0,)).tolist()

    def thoughts(self, chunks: Tensor, firsts: list[int]) -> list[list[int]]:
        """Whole thoughts that begin with ``firsts``: the end token is the last, unless it was cut;
        NOT_FINITE ends one as well."""
        given = torch.tensor(firsts, dtype=torch.int64, device=chunks.device)
        end = self.config.end_token_id  # no thought goes on behind what pads a batch
        found: list[list[int]]
        found = self.batches.run(self._whole, chunks, given, fills=(0, end)).tolist()
        ends = (end, NOT_FINITE)
        lengths = [next((n for n, t in enumerate(ids, 1) if t in ends), len(ids)) for ids in found]
        return [ids[:length] for ids, length in zip(found, lengths, strict=True)]

    def states(self, thoughts: list[list[int]]) -> list[Tensor]:
        """The state [c, d] of each thought that is not trivial; those of the latest are kept."""
        keys = [tuple(ids) for ids in thoughts]
        missing = [key for key in dict.fromkeys(keys) if key not in self._states]
        if missing:
            self._states |= zip(missing, self._made(missing), strict=True)
        states = [self._states[key] for key in keys]
        for key in list(self._states)[: max(0, len(self._states) - KEPT_STATES)]:
            del self._states[key]
        return states

    def _made(self, thoughts: list[tuple[int, ...]]) -> list[Tensor]:
        end, most = self.config.end_token_id, self.config.max_thought_tokens
        padded = [[*ids, *[IGNORED] * (most - len(ids))] for ids in thoughts]
        ids = torch.tensor(padded, dtype=torch.int64, device=self.model.device)
        found = self.batches.run(self.model.states, ids, fills=(end,))
        return [state.clone() for state in found]

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
