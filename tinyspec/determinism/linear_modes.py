"""How the linears of one engine's model run so that results hold: by the linear kernel, or in tiles
of rows or transposed. Knows modules, not what is proven of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tinyspec.model.cpu_linears import CpuLinear
from tinyspec.model.linears import distinct_linears, is_plain, kernel_stand_ins, linear_kinds
from tinyspec.model.moe import kernel_experts
from tinyspec.runner.model_runner import ModelRunner


class LinearModes:
    """Of one served model; all linears are as they were when this was made, at first."""

    def __init__(self, runner: ModelRunner):
        self._served, self._runner = runner.served, runner
        self._num_swapped = len(self._served.swapped)
        self._tiles: dict[str, dict[int, int]] = {}

    def serve(self, names: Collection[str]) -> tuple[str, ...]:
        """Let the linear kernel serve the plain linears among ``names``; the names of those."""
        if not names:
            return ()
        model = self._served.model
        before = {name: model.get_submodule(name) for name in names}
        linear = self._served.autocast.casting(self._runner.kernels.linear)
        self._served.swap(kernel_stand_ins(model, linear, names))
        self._runner.drop_graphs()
        return tuple(n for n in names if model.get_submodule(n) is not before[n])

    def tile(self, tiles: dict[str, dict[int, int]]) -> None:
        """Run linears of these kinds in tiles of so many rows (or TRANSPOSED), by the rows of a
        canonical pass."""
        if self._tiles == tiles:
            return
        self._tiles = tiles
        self._served.tiles.unbind()
        model, kinds = self._served.model, linear_kinds(self._served.model)
        for name, heights in tiles.items():
            modules = map(model.get_submodule, kinds[name])
            self._served.tiles.bind(filter(is_plain, modules), heights)
        self._runner.drop_graphs(canonical=True)

    def can_tile(self, name: str, rows: int) -> bool:
        """Whether a linear is a plain one, and its rows a whole number of tiles."""
        module, bound = self._served.model.get_submodule(name), self._served.tiles.bound
        plain = is_plain(module) or any(module is other for other in bound)
        return plain and rows % self._runner.buckets.reference == 0

    def apart(self, sizes: Iterable[int]) -> list[int]:
        """Those of ``sizes`` whose canonical passes run another way than plain ones: some linears,
        or experts."""
        model, tiled = self._served.model, {n for held in self._tiles.values() for n in held}
        most = [module.tinyspec_rows for module in kernel_experts(model).values()]
        linears = [m for m in distinct_linears(model).values() if isinstance(m, CpuLinear)]
        return [
            rows
            for rows in sizes
            if rows in tiled
            or any(rows > each for each in most)
            or any(linear.differs_in_plain_passes(rows) for linear in linears)
        ]

    def restore(self) -> None:
        """Every linear as it was when the engine was made."""
        self._served.tiles.unbind()
        self._served.undo(self._num_swapped)
        self._tiles = {}
        self._runner.drop_graphs()
