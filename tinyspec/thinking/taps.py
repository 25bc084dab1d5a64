"""Adds states to a decoder layer's output and reads another's, while a forward runs.

In an engine's pass to and from some rows alone: others keep their bits, and other passes, and
graphs of them, know nothing of it. Knows positions and states, not what becomes of the hidden
states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.passes import Pass
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array


@contextmanager
def tapped(
    layer_in: nn.Module,
    layer_out: nn.Module,
    add: Callable[[Tensor], Tensor] | None,
    read: Callable[[Tensor], None] | None,
) -> Iterator[None]:
    """Hidden states [B, T, d] behind ``layer_in`` become what ``add`` makes of them, and ``read``
    is given those behind ``layer_out``."""

    def change(_module: nn.Module, _args: Any, output: Any) -> Any:
        assert add is not None
        return (add(output[0]), *output[1:]) if isinstance(output, tuple) else add(output)

    def see(_module: nn.Module, _args: Any, output: Any) -> None:
        assert read is not None
        read(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        if add is not None:
            hooks.enter_context(layer_in.register_forward_hook(change))
        if read is not None:
            hooks.enter_context(layer_out.register_forward_hook(see))
        yield


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
    """Of one pass. added [n] int64, states [n, d]: what is added to the hidden states of which
    rows. read [m] int64: rows whose hidden states are wanted, those of ``spans`` in order. hidden:
    [m, d] of these, once the pass has run."""

    added: Tensor
    states: Tensor
    read: Tensor
    spans: list[Span]
    hidden: Tensor | None = None

    @classmethod
    def of(cls, work_pass: Pass, device: torch.device) -> ThinkingRows | None:
        """None where the pass has no such rows."""
        works = work_pass.works
        firsts = works.cu_rows - works.counts
        added: list[Array] = []
        states: list[Tensor] = []
        read: list[Array] = []
        spans: list[Span] = []
        for n in work_pass.table.places("thinking", works.rows):
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
        return cls(_rows(added, device), values, _rows(read, device), spans)

    def hooks(self, layer_in: nn.Module, layer_out: nn.Module) -> Any:
        """To be in place while the pass runs."""
        add = self._add if len(self.added) else None
        return tapped(layer_in, layer_out, add, self._read if self.spans else None)

    def _add(self, hidden: Tensor) -> Tensor:
        summed = hidden[0].index_select(0, self.added) + self.states.to(hidden.dtype)
        return hidden.index_copy(1, self.added, summed[None])

    def _read(self, hidden: Tensor) -> None:
        self.hidden = hidden[0].index_select(0, self.read)


def _rows(parts: list[Array], device: torch.device) -> Tensor:
    found = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return to_device(found, device)
