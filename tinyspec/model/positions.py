"""Learned position embeddings and rotary tables by the positions of the running pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext
from tinyspec.model.stand_in import share


class GivenPositions(nn.Module):
    """A learned position embedding that would derive positions from the cache: given the pass's."""

    def __init__(self, original: nn.Module, context: AttentionContext):
        super().__init__()
        share(self, original)
        self.register_parameter("weight", original.weight)  # type: ignore[arg-type]
        self._original = [original]  # not a child: the parameters are listed once
        self._context = context
        self.training = original.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original's embeddings at the positions of the pass."""
        original = self._original[0]
        own = original._parameters["weight"]
        original._parameters["weight"] = self._parameters["weight"]  # may have been replaced
        try:
            # Hooks, which are shared, run around this.
            return original.forward(*args, **{**kwargs, "position_ids": self._context.positions})
        finally:  # a probe's does not stay
            original._parameters["weight"] = own


class RopeTable(nn.Module):
    """The outputs of a rotary module for all positions, computed once by that module.

    A row's rotation then depends on its position alone, not on other rows of the pass. One table
    for each set of further arguments (a layer type).
    """

    def __init__(self, rotary: nn.Module, positions: int, like: Tensor):
        super().__init__()
        share(self, rotary)
        self._original = [rotary]  # not a child: not listed among the modules
        self._like = like
        self._positions = torch.arange(positions, device=like.device)[None]
        self._tables: dict[tuple[Any, ...], tuple[Tensor, ...] | Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """Attributes of the rotary module, which some models read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)

    def _table(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | Tensor:
        key = *args, *sorted(kwargs.items())
        found = self._tables.get(key)
        if found is None:
            with torch.no_grad():
                made = self._original[0].forward(self._like, self._positions, *args, **kwargs)
            found = made[0] if isinstance(made, Tensor) else tuple(part[0] for part in made)
            self._tables[key] = found
        return found

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...] | Tensor:
        """position_ids [1, R] -> the rotary module's output: mostly cos and sin [1, R, rot]."""
        if position_ids.dim() != 2:  # several per token, as of images
            return self._original[0].forward(x, position_ids, *args, **kwargs)
        rows = position_ids[0]
        table = self._table(*args, **kwargs)
        if isinstance(table, Tensor):
            return table.index_select(0, rows)[None]
        return tuple(part.index_select(0, rows)[None] for part in table)
