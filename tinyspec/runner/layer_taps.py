"""Adds states behind one decoder layer of a pass and reads hidden states behind another.

Hooks are in place only while a pass runs that was asked for it, so that other passes, and graphs of
them, know nothing of it. Rows without a state keep their bits. Knows rows, not what states are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class TapRows:
    """Rows of one pass. added [n] int64, states [n, d]: what is added to the hidden states of which
    rows. read [m] int64: rows whose hidden states are wanted."""

    added: Tensor
    states: Tensor
    read: Tensor


class LayerTaps:
    """The taps of one model, behind the layers ``layer_in`` and ``layer_out`` of ``layers``, which
    may be replaced meanwhile.

    hidden: [m, d], what the newest pass that was asked has read.
    """

    def __init__(self, layers: nn.ModuleList, layer_in: int, layer_out: int):
        self._layers, self._in, self._out = layers, layer_in, layer_out
        self._rows: TapRows | None = None
        self.hidden: Tensor | None = None

    @property
    def asked(self) -> bool:
        """Whether the next pass adds or reads."""
        return self._rows is not None

    def ask(self, rows: TapRows | None) -> None:
        """Let the next pass add and read; None: let it not."""
        self._rows = rows

    def take(self) -> Tensor | None:
        """What the pass has read."""
        hidden, self.hidden = self.hidden, None
        return hidden

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The pass that was asked runs in the block."""
        rows, self._rows = self._rows, None
        assert rows is not None

        def add(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = hidden_of(output)
            index = rows.added
            summed = hidden[0].index_select(0, index) + rows.states.to(hidden.dtype)
            changed = hidden.index_copy(1, index, summed[None])
            return with_hidden(output, changed)

        def read(_module: nn.Module, _args: Any, output: Any) -> None:
            self.hidden = hidden_of(output)[0].index_select(0, rows.read)

        handles = []
        if len(rows.added):
            handles.append(self._layers[self._in].register_forward_hook(add))
        if len(rows.read):
            handles.append(self._layers[self._out].register_forward_hook(read))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def hidden_of(output: Any) -> Tensor:
    """The hidden states [batch, rows, d] among a layer's output."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    assert found.dim() == 3 and isinstance(found, torch.Tensor)
    return found


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """A layer's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
