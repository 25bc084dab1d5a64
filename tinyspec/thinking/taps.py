"""Adds states to a decoder layer's output and reads another's, while a forward runs.

In an engine's pass to and from some rows alone: others keep their bits, and other passes, and
graphs of them, know nothing of it. Knows positions and states, not what becomes of the hidden
states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tinyspec.runner.device_queue import to_device
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import Step


@contextmanager
def tapped(*taps: tuple[nn.Module, Callable[[Tensor], Tensor | None] | None]) -> Iterator[None]:
    """Of each (layer, function): the function is given the hidden states [B, T, d] behind the
    layer, which become what it returns, if it returns something. None: no function."""
    with ExitStack() as hooks:
        for layer, function in taps:
            if function is not None:
                hook = partial(_behind, function)
                hooks.enter_context(layer.register_forward_hook(hook))
        yield


def _behind(function: Callable[[Tensor], Tensor | None], *given: Any) -> Any:
    """given: module, arguments and output."""
    *_, output = given
    if not isinstance(output, tuple):
        return function(output)
    changed = function(output[0])
    return None if changed is None else (changed, *output[1:])


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
    def of(cls, step: Step, device: torch.device) -> ThinkingRows | None:
        """None where the pass has no such rows."""
        firsts = step.cu_rows - step.counts
        added: list[Array] = []
        states: list[Tensor] = []
        read: list[Array] = []
        spans: list[Span] = []
        for n in step.table.places("thinking", step.rows):
            sequence = step.table.sequences[step.rows[n]]
            thoughts = sequence.request.thoughts
            start, end = int(step.starts[n]), int(step.ends[n])
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
        return tapped((layer_in, add), (layer_out, self._read if self.spans else None))

    def _add(self, hidden: Tensor) -> Tensor:
        summed = hidden[0].index_select(0, self.added) + self.states.to(hidden.dtype)
        return hidden.index_copy(1, self.added, summed[None])

    def _read(self, hidden: Tensor) -> None:
        self.hidden = hidden[0].index_select(0, self.read)


def _rows(parts: list[Array], device: torch.device) -> Tensor:
    found = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return to_device(found, device)
