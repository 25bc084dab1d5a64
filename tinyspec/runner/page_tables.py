"""The page tables of the running sequences on the device, written where they differ from before.

A row for every row of the sequence table. Knows neither passes nor what is in a page.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.sequence_table import Array, SequenceTable


class PageTables:
    """on_device [rows, width] int32, at one address; ``width`` pages are the most of a sequence.

    What ``differences`` returned must be written, or ``forget`` called, before the next pass.
    """

    def __init__(self, rows: int, width: int, device: torch.device):
        self._there = np.zeros((rows, width), np.int32)
        # One number more, which nothing reads: for differences that fill up a fixed number of them.
        self._memory = torch.zeros(rows * width + 1, dtype=torch.int32, device=device)
        self.on_device = self._memory[:-1].view(rows, width)

    def differences(self, table: SequenceTable, rows: Array) -> tuple[Array, Array]:
        """Places in the memory [n] int64 and page numbers [n] int32 that bring ``rows`` of
        ``table`` up to date."""
        most, width = self._there.shape
        used = int(table.num_pages[rows].max(initial=0))
        assert used <= width and int(rows.max(initial=0)) < most, (used, rows)
        pages = table.pages[rows, :used]
        n, column = (pages != self._there[rows, :used]).nonzero()
        row, values = rows[n], pages[n, column]
        self._there[row, column] = values
        return row * np.int64(width) + column, values

    @property
    def nowhere(self) -> int:
        """The place that nothing reads."""
        return self._there.size

    def write(self, places: Tensor, pages: Tensor) -> None:
        """Write differences that lie on the device; those at the place ``nowhere`` are none."""
        self._memory.index_copy_(0, places, pages)

    def write_from_host(self, places: Array, pages: Array) -> None:
        """Write differences, if there are any."""
        if len(places):
            device = self._memory.device
            self.write(to_device(places, device), to_device(pages, device))

    def forget(self) -> None:
        """Differences may not have been written: the next ones are all that is in use."""
        self._there.fill(-1)
