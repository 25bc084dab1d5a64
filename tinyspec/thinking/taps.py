"""Adds states to a decoder layer's output and reads another's, while a forward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tinyspec.runner.layer_taps import hidden_of, with_hidden


class Tap:
    """What the second layer gave: hidden states [B, T, d]."""

    hidden: torch.Tensor


@contextmanager
def tapped(layer_in: nn.Module, layer_out: nn.Module, states: torch.Tensor | None) -> Iterator[Tap]:
    """states: [B, T, d] to add to the output of ``layer_in``; None adds nothing."""
    tap = Tap()

    def add(_module: nn.Module, _args: Any, output: Any) -> Any:
        if states is None:
            return output
        hidden = hidden_of(output)
        return with_hidden(output, hidden + states.to(hidden.dtype))

    def read(_module: nn.Module, _args: Any, output: Any) -> None:
        tap.hidden = hidden_of(output)

    handles = [layer_in.register_forward_hook(add), layer_out.register_forward_hook(read)]
    try:
        yield tap
    finally:
        for handle in handles:
            handle.remove()
