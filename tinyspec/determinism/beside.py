"""Modules that run beside a served model, with weights of their own: what their bits depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from tinyspec.determinism.fingerprint import asking_for_gradients, digest_weights
from tinyspec.determinism.model_state import function_settings, functions


@dataclass(frozen=True, eq=False)
class Beside:
    """name: of the part of the fingerprint. modules: gives them as they are now, in one module.
    settings: what else their results depend on. on_change: called where weights changed."""

    name: str
    modules: Callable[[], nn.Module]
    settings: str
    on_change: Callable[[], None]

    def digest(self, ignored: Collection[str] = ()) -> str:
        """Of weights, structure and settings; ignored: names of attributes that are none."""
        modules = self.modules()
        parts = (
            digest_weights(modules, ignored),
            functions(modules),
            function_settings(modules, ignored),
            self.settings,
            asking_for_gradients(modules),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()
