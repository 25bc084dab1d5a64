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
from tinyspec.model.attention import AttentionContext
from tinyspec.model.scratch_weights import scratch_weights
from tinyspec.model.shadow import standing_in
from tinyspec.model.trial import ROWS, Trials, begin_pass, close, probe_rows
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


def _channels(context: AttentionContext, module: Any) -> int | None:
    """The channels of a module whose stand-in gives what it gives rows of one sequence, up to
    rounding; None of another."""
    trial, like = AttentionContext(context.autocast), module.conv.weight
    trial.kernels = backend.load("torch")
    channels = module.conv.in_channels
    rows = probe_rows((channels,), like.dtype, like.device)[None]
    if like.dtype == torch.float16:  # three of their products are multiplied
        rows = rows / 64
    trial.hold(rows=trial.autocast.cast(rows.new_zeros(1, ROWS, 1, channels)))
    with scratch_weights(module):
        own = module(hidden_states=rows)
        begin_pass(trial, like.device)
        found = stand_in_of(module, trial, 0)(hidden_states=rows)
    trial.check()
    return channels if close(found, own) else None


def stand_in_of(module: nn.Module, context: AttentionContext, number: int) -> nn.Module:
    """Of short convolution ``number`` of a pass."""
    own = {"tinyspec_context": context, "tinyspec_number": number}
    return standing_in(module, PagedShortConv, **own)


def conv_stand_ins(
    model: nn.Module, context: AttentionContext, trials: Trials
) -> tuple[dict[nn.Module, nn.Module], list[int]]:
    """The stand-ins of short convolutions, in order of the modules, and their channels."""
    made, channels = dict[nn.Module, nn.Module](), list[int]()
    for module in filter(_has_parts, model.modules()):
        if (found := trials.of(module, partial(_channels, context, module))) is not None:
            made[module] = stand_in_of(module, context, len(made))
            channels.append(found)
    return made, channels
