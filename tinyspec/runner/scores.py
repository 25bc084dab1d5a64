"""What rows are sampled from: the model's logits as they are, or rows that were changed, in fp32.

Whether a row is changed follows from its own request, so what it is computed in does as well.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.sequence_table import Array


class Scores:
    """Rows [N, V] of which those at ``places``, ascending, are to be changed.

    raw: the logits in the model's dtype, never written. own: rows in fp32 that may be written,
    None where there are none: all, if the logits are in fp32, else those at ``places``.
    """

    def __init__(self, raw: Tensor, places: Array):
        self.raw, self.places = raw, places
        self.own: Tensor | None = None
        if not len(places):
            return
        if raw.dtype == torch.float32:
            self.own, self._index = raw.clone(), np.arange(len(raw))
        else:
            self.own = raw.index_select(0, to_device(places, raw.device)).float()
            self._index = np.full(len(raw), -1)
            self._index[places] = np.arange(len(places))

    @property
    def whole(self) -> Tensor:
        """[N, V], in which rows that stand ``apart`` are unchanged."""
        return self.raw if self.own is None or self.apart is not None else self.own

    @property
    def apart(self) -> Tensor | None:
        """The changed rows [C, V], where they are of another dtype than the others."""
        return self.own if self.own is not None and len(self.own) < len(self.raw) else None

    def index(self, places: Array) -> Array:
        """Where in ``own`` the rows at ``places`` are."""
        return self._index[places]

    def row(self, place: int) -> Tensor:
        """[1, V]"""
        at = -1 if self.own is None else int(self._index[place])
        rows, at = (self.raw, place) if self.own is None or at < 0 else (self.own, at)
        return rows[at : at + 1]
