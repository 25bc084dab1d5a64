"""Linears in tiles of rows: where a row count has other bits, several that have the right ones.

A linear that breaks a bucket in which the rest of the model agrees need not cost the bucket: in a
canonical pass its rows run tile by tile, each of a row count proven to agree with the reference
bucket. Other passes run it whole. Knows modules, and nothing of why or when a pass is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn


class RowTiles:
    """The linears of one model that run in tiles while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self._bound: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []

    def bind(self, modules: Iterable[nn.Module], counts: Collection[int]) -> None:
        """Run ``modules`` in tiles of the row counts ``counts``, which are all alike."""
        for module in modules:
            # On the instance: modules, parameters and their names stay what they are.
            tiled = self._tiled(module.forward, counts)
            module.__dict__["forward"] = tiled
            self._bound.append((module, tiled))

    def unbind(self) -> None:
        """Give all modules their own forward back."""
        self.suspend()
        self._bound = []

    def suspend(self) -> None:
        """Give all modules their own forward back, until ``resume``."""
        for module, tiled in self._bound:
            if vars(module).get("forward") is tiled:
                del module.__dict__["forward"]

    def resume(self) -> None:
        """Bind the same modules again."""
        for module, tiled in self._bound:
            module.__dict__["forward"] = tiled

    def _tiled(
        self, forward: Callable[[Tensor], Tensor], counts: Collection[int]
    ) -> Callable[[Tensor], Tensor]:
        plans: dict[int, list[int]] = {}

        def run(x: Tensor) -> Tensor:
            """x [..., R, in] -> [..., R, out]."""
            if not self.on:
                return forward(x)
            rows = x.shape[-2]
            tiles = plans.get(rows)
            if tiles is None:
                tiles = plans[rows] = split_rows(rows, counts)
            if len(tiles) < 2:
                return forward(x)
            if x.numel() > rows * x.shape[-1]:
                return torch.cat([forward(part) for part in x.split(tiles, dim=-2)], dim=-2)
            # Cut as [R, in]: a part of [1, R, in] torch multiplies as a batch where the weight asks
            # for no gradient, which takes up to thirty times as long and has other bits.
            parts = x.reshape(rows, x.shape[-1]).split(tiles)
            out = torch.cat([forward(part[None]) for part in parts], dim=1)
            return out.view(*x.shape[:-1], out.shape[-1])

        return run


def split_rows(rows: int, counts: Collection[int]) -> list[int]:
    """``rows`` as a sum of the largest of ``counts``; empty where they do not come out even."""
    tiles: list[int] = []
    for count in sorted(counts, reverse=True):
        times, rows = divmod(rows, count)
        tiles += [count] * times
    return [] if rows else tiles
