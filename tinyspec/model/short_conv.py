"""Short convolutions (LFM2) over the pages of the pass that is running.

A row needs the gated inputs of a few rows before it; these lie in pages as keys do, so whatever
cuts off, shares or copies pages does so with them. Knows no model by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model.attention import AttentionContext
from tinyspec.model.shadow import standing_in
from tinyspec.model.trial import ROWS, by_kind, close, probe_rows
from tinyspec.model.wrappers import runs_class_forward


class PagedShortConv(nn.Module):
    """out_proj(c * conv(b * x)), of in_proj's thirds b, c and x."""

    in_proj: nn.Module
    conv: nn.Conv1d
    out_proj: nn.Module

    tinyspec_context: AttentionContext
    tinyspec_number: int

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, R, hidden]."""
        b, c, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        weight, bias = self.conv.weight.flatten(1), self.conv.bias
        mixed = self.tinyspec_context.convolve(self.tinyspec_number, b * x, weight, bias)
        return self.out_proj((c * mixed)[None])


def _has_parts(module: Any) -> bool:
    conv, *linears = (getattr(module, name, None) for name in ("conv", "in_proj", "out_proj"))
    return (
        isinstance(conv, nn.Conv1d)
        and conv.groups == conv.in_channels == conv.out_channels
        and conv.padding == (conv.kernel_size[0] - 1,)
        and (conv.stride, conv.dilation, conv.padding_mode) == ((1,), (1,), "zeros")
        and all(isinstance(linear, nn.Module) for linear in linears)
        and runs_class_forward(module)
    )


def _tried(context: AttentionContext, module: Any) -> int | None:
    """The channels of a module whose stand-in gives what it gives rows of one sequence, up to
    rounding; None of another."""
    trial, like = AttentionContext(context.autocast), module.conv.weight
    trial.kernels = backend.load("torch")
    channels, device = module.conv.in_channels, like.device
    rows = probe_rows((channels,), like.dtype, device)[None]
    if like.dtype == torch.float16:  # three of their products are multiplied
        rows = rows / 64
    trial.hold(rows=trial.autocast.cast(rows.new_zeros(1, ROWS, 1, channels)))
    place = torch.arange(ROWS, device=device)
    own = module(hidden_states=rows)
    trial.begin(AttentionMetadata.of([(0, ROWS)], [[0]], ROWS, device), place, place)
    found = stand_in_of(module, trial, 0)(hidden_states=rows)
    trial.check()
    return channels if close(found, own) else None


def stand_in_of(module: nn.Module, context: AttentionContext, number: int) -> nn.Module:
    """Of short convolution ``number`` of a pass."""
    own = {"tinyspec_context": context, "tinyspec_number": number}
    return standing_in(module, PagedShortConv, **own)


def conv_stand_ins(
    model: nn.Module, context: AttentionContext, causes: list[str]
) -> tuple[dict[nn.Module, nn.Module], list[int]]:
    """The stand-ins of short convolutions, in order of the modules, and their channels; causes: as
    of ``by_kind``."""
    found = by_kind(filter(_has_parts, model.modules()), partial(_tried, context), causes)
    made = {module: stand_in_of(module, context, n) for n, (module, _) in enumerate(found)}
    return made, [channels for _, channels in found]
