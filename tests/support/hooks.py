"""Logits processors, stopping criteria and streamers that users could have written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Backwards(LogitsProcessor):
    """Prefers tokens far from the last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        away = (torch.arange(scores.shape[1]) - input_ids[:, -1:]).abs()
        return scores + away / 50


class Only(LogitsProcessor):
    """Leaves one token: the one behind the last."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = (input_ids[:, -1:] + 1) % scores.shape[1]
        return torch.full_like(scores, -torch.inf).scatter(1, kept, 0.0)


class Until(StoppingCriteria):
    """Ends a row that is ``length`` long."""

    def __init__(self, length: int, plain: bool = False):
        self.length, self.plain = length, plain

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        ended = input_ids.shape[1] >= self.length
        return ended if self.plain else torch.full((len(input_ids),), ended, dtype=torch.bool)


class Sure(StoppingCriteria):
    """Ends a row whose best score is higher than its first: for this the scores are handed on."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return scores[-1].amax(-1) > scores[0].amax(-1)


class AttentionRecorder(BaseStreamer):
    """Keeps what it is put."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.puts.append((tuple(value.shape), value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.puts.append("end")

    @property
    def tokens(self) -> list[int]:
        """All tokens in order, however they were cut."""
        flat: list[int] = []
        for put in self.puts:
            flat += torch.tensor(put[3]).flatten().tolist() if put != "end" else []
        return flat


class BoomError(Exception):
    """Raised by a hook."""


class Boom(BaseStreamer):
    """Processor, criterion, streamer, drafter or allowed-tokens function that raises at its n-th
    call."""

    def __init__(self, error: BaseException, at: int = 3):
        self.error, self.left = error, at

    def _count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        self._count()
        first, second = arguments
        if isinstance(first, int):
            return [3, 4, 5]
        return torch.zeros(len(first), dtype=torch.bool) if second is None else second

    def put(self, value: Tensor) -> None:
        self._count()

    def propose(self, sequences: Any, n: int) -> list[list[int]]:
        self._count()
        return [[1] for _ in sequences]

    def end(self) -> None:
        self.left = 0
        self._count()
