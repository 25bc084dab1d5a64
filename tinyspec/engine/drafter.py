"""Drafters propose tokens for a verify; they see token ids only.

A wrong proposal costs rows but changes no result: committed tokens are always the verifier's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from tinyspec.errors import refuse


@runtime_checkable
class Drafter(Protocol):
    """Anything with this method may be given as ``EngineConfig.drafter``."""

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        """Up to ``n`` tokens to follow each of ``sequences``; an empty list leaves a sequence to
        the fast path."""
        ...


class FastPath:
    """The default: proposes nothing, so drafts come from decode rows on the fast path."""

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        return [[] for _ in sequences]


class NgramDrafter:
    """What followed the same last tokens earlier in the text (prompt lookup decoding)."""

    def __init__(self, longest: int = 3, shortest: int = 1, most: int | None = None):
        self.longest = longest
        self.shortest = shortest
        self.most = most

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        n = n if self.most is None else min(n, self.most)
        return [self._lookup(list(sequence), n) for sequence in sequences]

    def _lookup(self, tokens: list[int], n: int) -> list[int]:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            tail = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tail:
                    return tokens[start + size : start + size + n]
        return []


class ModelDrafter:
    """Greedy continuations by an assistant model with the same vocabulary."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        proposals = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], dtype=torch.int64, device=self.model.device)
            mask = torch.ones_like(ids)
            out = self.model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=n, do_sample=False
            )
            proposals.append(out[0, len(sequence) :].tolist())
        return proposals


def make_drafter(choice: Any, served: PreTrainedModel, field: str = "drafter") -> Drafter:
    """The drafter that ``choice`` names (as ``EngineConfig.drafter``), for the model ``served``.

    Raises ValueError naming ``field``.
    """
    if choice is served:
        raise refuse(field, type(choice).__name__, "another model than the one served")
    if choice is None:
        return FastPath()
    if choice == "ngram":
        return NgramDrafter()
    if isinstance(choice, PreTrainedModel):
        return ModelDrafter(choice)
    if isinstance(choice, Drafter):
        return choice
    raise refuse(field, choice, 'None, "ngram", a model, or anything with propose(sequences, n)')
