"""Linear layers in tiles of rows: a bucket with other bits, cut into row counts that agree.

Where one layer's rows at some bucket differ from the reference bucket's and all other modules'
agree, a canonical pass runs that layer tile by tile, each of a row count proven to agree. Other
passes run it whole. Knows modules, not why or when a pass is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache, partial

import torch
from torch import Tensor, nn


class RowTiles:
    """The layers of one model that run in tiles while ``on``. bound: they, and how each runs."""

    def __init__(self) -> None:
        self.on = False
        self.bound: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []

    def bind(self, modules: Iterable[nn.Module], counts: Collection[int]) -> None:
        """Run ``modules`` in tiles of the row counts ``counts``, whose bits agree."""
        for module in modules:
            tiled = self._tiled(module.forward, counts)
            self.bound.append((module, tiled))
            # On the instance: modules, parameters and their names stay what they are.
            vars(module)["forward"] = tiled

    def holds(self, module: nn.Module) -> bool:
        """Whether ``module`` was bound."""
        return any(bound is module for bound, _ in self.bound)

    def unbind(self) -> None:
        """Remove the tiled forwards."""
        for module, _ in self.bound:
            del vars(module)["forward"]
        self.bound = []

    def _tiled(
        self, forward: Callable[[Tensor], Tensor], counts: Collection[int]
    ) -> Callable[[Tensor], Tensor]:
        tiles_of = cache(partial(split_rows, counts=counts))

        def run(x: Tensor) -> Tensor:
            """x [..., R, in] -> [..., R, out]."""
            if not self.on:
                return forward(x)
            rows = x.shape[-2]
            tiles = tiles_of(rows)
            if len(tiles) < 2:
                return forward(x)
            if x.numel() > rows * x.shape[-1]:
                return torch.cat([forward(part) for part in x.split(tiles, dim=-2)], dim=-2)
            # Cut as [R, in]: where the weight asks for no gradient, torch multiplies a part of
            # [1, R, in] as a batch, which is up to thirty times slower and has other bits.
            parts = x.reshape(rows, x.shape[-1]).split(tiles)
            out = torch.cat([forward(part[None]) for part in parts], dim=1)
            return out.view(*x.shape[:-1], out.shape[-1])

        return run


def split_rows(rows: int, counts: Collection[int]) -> list[int]:
    """``rows`` as a sum of the largest of ``counts``; empty where a remainder is left."""
    tiles: list[int] = []
    for count in sorted(counts, reverse=True):
        times, rows = divmod(rows, count)
        tiles += [count] * times
    return [] if rows else tiles
