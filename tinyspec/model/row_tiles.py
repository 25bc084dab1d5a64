"""Linear layers in tiles of rows, all of one height.

Where a layer's rows at some bucket differ from the reference bucket's, a canonical pass runs that
layer tile by tile, each of the reference bucket's rows. Other passes run it whole. Knows modules,
not why or when a pass is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class RowTiles:
    """The layers of one model that run in tiles while ``on``. bound: they, and how each runs."""

    def __init__(self) -> None:
        self.on = False
        self.bound: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []

    def bind(self, modules: Iterable[nn.Module], height: int) -> None:
        """Run ``modules`` in tiles of ``height`` rows where a larger pass is a multiple of it."""
        for module in modules:
            tiled = self._tiled(module.forward, height)
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
        self, forward: Callable[[Tensor], Tensor], height: int
    ) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            """x [..., R, in] -> [..., R, out]."""
            rows = x.shape[-2]
            if not self.on or rows <= height or rows % height:
                return forward(x)
            if x.numel() > rows * x.shape[-1]:
                return torch.cat([forward(part) for part in x.split(height, dim=-2)], dim=-2)
            # Cut as [R, in]: where the weight asks for no gradient, torch multiplies a part of
            # [1, R, in] as a batch, which is up to thirty times slower and has other bits.
            parts = x.reshape(rows, x.shape[-1]).split(height)
            out = torch.cat([forward(part[None]) for part in parts], dim=1)
            return out.view(*x.shape[:-1], out.shape[-1])

        return run
