"""The rows of a pass whose prompts are thought about: which get states, and which are read.

Knows positions and states, neither blocks nor what becomes of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinyspec.runner.device_queue import to_device
from tinyspec.runner.layer_taps import TapRows
from tinyspec.scheduler.passes import Pass
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array


@dataclass
class Span:
    """Positions ``first`` to ``end - 1`` of a sequence, whose hidden states are read; work: the
    number of its work in the pass."""

    work: int
    sequence: Sequence
    first: int
    end: int


@dataclass(eq=False)
class ThinkingRows:
    """Of one pass. spans: in the order of ``rows.read``. hidden: [m, d] of these rows, or None."""

    rows: TapRows
    spans: list[Span]
    hidden: Tensor | None = None

    @classmethod
    def of(cls, work_pass: Pass, device: torch.device) -> ThinkingRows | None:
        """None where the pass has no such rows."""
        works = work_pass.works
        places = work_pass.table.places("thinking", works.rows)
        firsts = works.cu_rows - works.counts
        added: list[Array] = []
        states: list[Tensor] = []
        read: list[Array] = []
        spans: list[Span] = []
        for n in places:
            sequence = work_pass.table.sequences[works.rows[n]]
            thoughts = sequence.request.thoughts
            start, end = int(works.starts[n]), int(works.ends[n])
            row = int(firsts[n]) - start  # of position 0
            for position, state in thoughts.added(start, end):
                added.append(np.arange(position, position + len(state)) + row)
                states.append(state)
            first, last = thoughts.read(start, end)
            if first < last:
                read.append(np.arange(first, last) + row)
                spans.append(Span(n, sequence, first, last))
        if not added and not read:
            return None
        values = torch.cat(states) if states else torch.empty((0, 0), device=device)
        return cls(TapRows(_rows(added, device), values, _rows(read, device)), spans)


def _rows(parts: list[Array], device: torch.device) -> Tensor:
    found = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return to_device(found, device)
