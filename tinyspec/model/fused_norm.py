"""RMSNorm by the kernel that also adds the residual, within a layer and across to the next one.

A layer's last sum is the next layer's input. The layer computes that one's first norm in the same
launch and keeps it for the norm that is called with the very tensor; any other gets the norm of its
own input. Either way the bits are the same: the kernel norms the sum as it is rounded. Knows norms
and hidden states, not layers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from tinyspec.kernels.backend import Kernels
from tinyspec.model.attention import AttentionContext
from tinyspec.model.equivalence import eps_name
from tinyspec.model.stand_in import FusedModule, standing_in


class _Ahead(NamedTuple):
    """What ``norm`` gives ``hidden``, computed before it was called."""

    norm: nn.Module
    hidden: Tensor
    normed: Tensor


class ResidualStream:
    """The hidden states of one model between its norms; context: of its passes."""

    def __init__(self, context: AttentionContext):
        self.context = context
        self._ahead: _Ahead | None = None

    @property
    def kernels(self) -> Kernels:
        """Those that passes call."""
        assert self.context.kernels is not None
        return self.context.kernels

    def leave(self, norm: nn.Module, hidden: Tensor, normed: Tensor) -> None:
        """Keep ``normed`` for the next norm, should it be ``norm`` of ``hidden``."""
        self._ahead = _Ahead(norm, hidden, normed)

    def take(self, norm: nn.Module, hidden: Tensor) -> Tensor | None:
        """What was left for this call, or None; nothing is left afterwards."""
        ahead, self._ahead = self._ahead, None
        left = ahead is not None and ahead.norm is norm and ahead.hidden is hidden
        return ahead.normed if ahead is not None and left else None


class FusedNorm(FusedModule):
    """An RMSNorm by the kernel; unit_offset: the weight's distance from one is what is stored."""

    weight: Tensor
    tinyspec_stream: ResidualStream
    tinyspec_unit_offset: bool

    def bypassed(self) -> tuple[nn.Module, ...]:
        return (self,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., H] -> their norm."""
        left = self.tinyspec_stream.take(self, hidden_states)
        return self._run(hidden_states, None)[0] if left is None else left

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual [..., H], and the sum."""
        return self._run(x, residual)

    def add_ahead(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual [..., H]; its norm is kept for the next call of ``forward``."""
        normed, summed = self._run(x, residual)
        self.tinyspec_stream.leave(self, summed, normed)
        return summed

    def _run(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        eps: float = getattr(self, eps_name(self))
        run = self.tinyspec_stream.kernels.add_rms_norm
        return run(x, residual, self.weight, eps, unit_offset=self.tinyspec_unit_offset)


def fused_norm(norm: nn.Module, stream: ResidualStream, unit_offset: bool) -> FusedNorm:
    """The stand-in of a norm."""
    own = {"tinyspec_stream": stream, "tinyspec_unit_offset": unit_offset}
    return standing_in(norm, FusedNorm, **own)
