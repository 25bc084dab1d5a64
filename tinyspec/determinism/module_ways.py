"""How a model's linears run so that results hold: by the linear kernel, in tiles of rows, with
swapped operands. Knows results, not how they are found.
"""

from __future__ import annotations

from collections.abc import Collection

from tinyspec.config import EngineConfig
from tinyspec.determinism.probes.linears import set_swapped, set_tiles
from tinyspec.kernels import backend
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.linears import kernel_stand_ins
from tinyspec.model.patched_model import PatchedModel
from tinyspec.runner.model_runner import ModelRunner

Counts = dict[str, tuple[int, ...]]


class ModuleWays:
    """Of one engine's model."""

    def __init__(self, patched: PatchedModel, runner: ModelRunner, config: EngineConfig):
        self._patched = patched
        self._runner = runner
        self._config = config
        self._num_swapped = len(patched.swapped)
        self._set: tuple[Counts, Counts] = ({}, {})

    def serve_kinds(self, kinds: Collection[str]) -> tuple[str, ...]:
        """Let the linear kernel serve all plain linears of these kinds, unless the config fixes
        whom it serves; their names."""
        if self._config.linear != "auto":
            return ()
        every = linear_kinds(self._patched.model)
        return self.serve([name for kind in kinds for name in every[kind]])

    def serve(self, names: Collection[str]) -> tuple[str, ...]:
        """Let the linear kernel serve the plain linears among ``names``; the names of those."""
        if not names:
            return ()
        model = self._patched.model
        before = {name: model.get_submodule(name) for name in names}
        linear = backend.load(self._config.backend).linear
        for parent, name, module in kernel_stand_ins(model, linear, only=names):
            self._patched.swap(parent, name, module)
        self._changed()
        return tuple(n for n in names if model.get_submodule(n) is not before[n])

    def set(self, tiles: Counts, swapped: Counts) -> bool:
        """Run linears in tiles of rows and with swapped operands where results say so; whether
        that is new."""
        if self._set == (tiles, swapped):
            return False
        set_tiles(self._runner, tiles)
        set_swapped(self._runner, swapped)
        self._set = tiles, swapped
        self._runner.drop_graphs()
        return True

    def restore(self) -> None:
        """Every linear as it was when the engine was made."""
        self._runner.tiles.unbind()
        self._patched.undo(self._num_swapped)
        set_swapped(self._runner, {})
        self._set = ({}, {})
        self._changed()

    def _changed(self) -> None:
        self._runner.drop_graphs()
