"""Token types of a call, which are all zero where a tokenizer gave them for a prompt of text.

Where the model's own forward computes the same with them as without, the call is served without
them. Others stay arguments that only transformers' own ``generate`` serves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Tokens of the forward that is looked at.
FEW = 3


class TokenTypes:
    """Of ``model``, which is its own inside ``locked``."""

    def __init__(self, model: PreTrainedModel, locked: Callable[[], AbstractContextManager[None]]):
        self._model, self._locked = model, locked
        self._inert: dict[str, bool] = {}

    def take(self, arguments: dict[str, Any]) -> None:
        """Take those out of a call's arguments that change nothing."""
        for name in TOKEN_TYPES:
            given = arguments.get(name)
            if isinstance(given, Tensor) and not given.any() and self._is_inert(name):
                del arguments[name]

    def _is_inert(self, name: str) -> bool:
        if name not in self._inert:
            self._inert[name] = self._found_inert(name)
        return self._inert[name]

    def _found_inert(self, name: str) -> bool:
        if name not in inspect.signature(self._model.forward).parameters:
            return False
        ids = torch.zeros(1, FEW, dtype=torch.long, device=self._model.device)
        with self._locked(), torch.no_grad():
            with_types, without = self._model(ids, **{name: ids}), self._model(ids)
        return torch.equal(with_types.logits, without.logits)
