"""Modules that run beside a served model, with weights of their own: what their bits depend on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import nn

from tinyspec.determinism.fingerprint import asking_for_gradients, digest_weights


@dataclass(frozen=True, eq=False)
class Beside:
    """name: of the part of the fingerprint. settings: what else their results depend on."""

    name: str
    modules: nn.Module
    settings: str

    def digest(self) -> str:
        """Of weights, structure and settings."""
        parts = (
            digest_weights(self.modules),
            str(self.modules),
            self.settings,
            asking_for_gradients(self.modules),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()
