"""Learned positions and rotary tables that follow the positions of the pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext


class GivenPositions(nn.Module):
    """A learned embedding of positions that would count from a cache's length: it is told them."""

    def __init__(self, original: nn.Module, context: AttentionContext):
        super().__init__()
        self.register_parameter("weight", original.weight)  # type: ignore[arg-type]
        self._original = [original]  # not a child: the parameters are listed once
        self._context = context
        self.training = original.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the original, at the positions of the pass."""
        return self._original[0](*args, **{**kwargs, "position_ids": self._context.positions})


class RopeTable(nn.Module):
    """What a rotary module says of every position, computed once by that module itself.

    A row's rotation then depends on its position alone, whatever shares the pass. For each of the
    further arguments that the module is called with (a type of layers) there is a table.
    """

    def __init__(self, rotary: nn.Module, positions: int, like: Tensor):
        super().__init__()
        self._rotary = [rotary]  # not a child: nothing of it is to be found here
        self._like = like
        self._place = torch.arange(positions, device=like.device)[None]
        self._tables: dict[tuple[Any, ...], tuple[Tensor, ...] | Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """Settings of the module that it stands for, which some models read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_rotary"][0], name)

    def _table(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | Tensor:
        key = *args, *sorted(kwargs.items())
        found = self._tables.get(key)
        if found is None:
            with torch.no_grad():
                made = self._rotary[0](self._like, self._place, *args, **kwargs)
            found = made[0] if isinstance(made, Tensor) else tuple(part[0] for part in made)
            self._tables[key] = found
        return found

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...] | Tensor:
        """position_ids [1, R] -> what the module says of them: mostly cos and sin [1, R, rot]."""
        if position_ids.dim() != 2:  # rows and columns of pictures beside the tokens' places
            return self._rotary[0](x, position_ids, *args, **kwargs)
        rows = position_ids[0]
        table = self._table(*args, **kwargs)
        if isinstance(table, Tensor):
            return table.index_select(0, rows)[None]
        return tuple(part.index_select(0, rows)[None] for part in table)
