"""Drafts against the tokens that a pass yields for them: compared on the device, where both lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.sequence_table import Array, SequenceTable


class Comparison:
    """What ``accept_truncate`` reads, for the sequences of a pass that have drafts to verify."""

    def __init__(
        self,
        table: SequenceTable,
        rows: Array,
        firsts: Array,
        counts: Array,
        unknown: Array,
        device: torch.device,
    ):
        """rows [S]: of ``table``. firsts, counts [S]: places of their tokens among those sampled.
        unknown [S]: for a newest draft without an id its place among the tokens of the pass before,
        else -1."""
        drafts, lengths = table.num_drafts[rows], table.length[rows]
        place = np.arange(max(int(counts.max()), int(drafts.max())))
        table.make_room(int(lengths.max()) + len(place))
        guesses = table.ids[rows[:, None], lengths[:, None] + place]
        guesses[place >= drafts[:, None]] = -1
        some = np.flatnonzero(unknown >= 0)
        last = np.stack([some, drafts[some] - 1, unknown[some]])
        places = firsts[:, None] + np.minimum(place, counts[:, None] - 1)
        columns = drafts, lengths - 1, table.most[rows] - lengths, table.num_pages[rows]
        self._guesses, self._places, self._excess, self._stops = (
            to_device(x, device)
            for x in (guesses, places, place >= counts[:, None], table.stops[rows])
        )
        packed = to_device(np.stack(columns).astype(np.int32), device)
        self._drafts, self._starts, self._remaining, self._pages = packed.unbind()
        self._last = to_device(last, device) if len(some) else None

    def run(
        self, kernels: Kernels, page_size: int, tokens: Tensor, before: Tensor | None
    ) -> Tensor:
        """Decisions [5, S] int32, in the order of ``AcceptResult``, on the sampled ``tokens``;
        before: tokens of the pass before. A sequence is verified up to its first row without a
        token; where that is its first row, its decision means nothing."""
        targets = tokens[self._places].masked_fill_(self._excess, -1)
        good = (targets >= 0).long().cumprod(1).sum(1).clamp_(min=1).int()
        if self._last is not None:
            assert before is not None
            sequence, place, source = self._last
            self._guesses[sequence, place] = before[source]
        return torch.stack(
            kernels.accept_truncate(
                self._guesses,
                targets,
                good,
                self._drafts,
                self._starts,
                self._remaining,
                self._stops,
                self._pages,
                page_size,
            )
        )
