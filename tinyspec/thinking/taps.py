"""Adds states to a decoder layer's output and reads another's, while a forward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Tap:
    """What the second layer gave: hidden states [B, T, d]."""

    hidden: torch.Tensor


def replace_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """A layer's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden states among a layer's output."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def tapped(layer_in: nn.Module, layer_out: nn.Module, states: torch.Tensor | None) -> Iterator[Tap]:
    """states: [B, T, d] to add to the output of ``layer_in``; None adds nothing."""
    tap = Tap()

    def add(_module: nn.Module, _args: Any, output: Any) -> Any:
        if states is None:
            return output
        hidden = hidden_of(output)
        return replace_hidden(output, hidden + states.to(hidden.dtype))

    def read(_module: nn.Module, _args: Any, output: Any) -> None:
        tap.hidden = hidden_of(output)

    handles = [layer_in.register_forward_hook(add), layer_out.register_forward_hook(read)]
    try:
        yield tap
    finally:
        for handle in handles:
            handle.remove()
