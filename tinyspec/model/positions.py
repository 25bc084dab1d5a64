"""Learned position embeddings and rotary tables by the positions of the running pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import without_modes


class GivenPositions(nn.Module):
    """A learned position embedding that would derive positions from the cache: given the pass's."""

    tinyspec_context: AttentionContext

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's embeddings at the positions of the pass."""
        given = {**kwargs, "position_ids": self.tinyspec_context.positions}
        found: Tensor = super().forward(*args, **given)
        return found


class RopeTable(nn.Module):
    """The outputs of a rotary module for all positions, computed once by that module.

    A row's rotation then depends on its position alone, not on other rows of the pass. One table
    for each set of further arguments (a layer type).
    """

    tinyspec_like: Tensor
    tinyspec_positions: Tensor
    tinyspec_tables: dict[tuple[Any, ...], tuple[Tensor, ...] | Tensor]
    tinyspec_buffers: dict[str, Tensor | None]

    def renew(self) -> None:
        """The module's buffers were written to or replaced."""
        vars(self)["_buffers"] = dict(self.tinyspec_buffers)
        self.tinyspec_tables.clear()

    def _table(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | Tensor:
        key = *args, *sorted(kwargs.items())
        found = self.tinyspec_tables.get(key)
        if found is None:
            # Not seen by what records a pass: only the first one does this.
            with torch.no_grad(), without_modes():
                # Some write to their buffers while they run, or replace them.
                held = self.tinyspec_buffers.items()
                vars(self)["_buffers"] = {name: x if x is None else x.clone() for name, x in held}
                given = self.tinyspec_like, self.tinyspec_positions
                made = super().forward(*given, *args, **kwargs)
            found = made[0] if isinstance(made, Tensor) else tuple(part[0] for part in made)
            self.tinyspec_tables[key] = found
            vars(self)["_buffers"] = dict(self.tinyspec_buffers)
        return found

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...] | Tensor:
        """position_ids [1, R] -> the rotary module's output: mostly cos and sin [1, R, rot]."""
        if position_ids.dim() != 2:  # several per token, as of images
            whole: Tensor = super().forward(x, position_ids, *args, **kwargs)
            return whole
        rows = position_ids[0]
        table = self._table(*args, **kwargs)
        if isinstance(table, Tensor):
            return table.index_select(0, rows)[None]
        return tuple(part.index_select(0, rows)[None] for part in table)


def given_positions(embedding: nn.Module, context: AttentionContext) -> GivenPositions:
    """The stand-in of a position embedding."""
    return standing_in(embedding, GivenPositions, tinyspec_context=context)


def rope_table(rotary: nn.Module, positions: int, like: Tensor) -> RopeTable:
    """The stand-in of a rotary module, for so many positions of hidden states ``like``."""
    places = torch.arange(positions, device=like.device)[None]
    own: dict[str, Any] = {"tinyspec_positions": places, "tinyspec_tables": {}}
    own |= {"tinyspec_buffers": rotary._buffers}
    made = standing_in(rotary, RopeTable, tinyspec_like=like, **own)
    made.renew()
    return made
