"""RoPE left to the KV write: a stand-in runs an attention module's own forward, in which
``apply_rotary_pos_emb`` returns q and k unrotated and leaves cos and sin to the attention call.

Knows the forms of RoPE that the kernel computes; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext, PendingRope
from tinyspec.model.stand_in import standing_in

# How transformers' modeling files call the function that rotates q and k.
ROTATE = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]


def twice(x: Tensor) -> Tensor:
    """Of a half of the head, for both halves."""
    return torch.cat((x, x), dim=-1)


def pairs(x: Tensor) -> Tensor:
    """Each number of the first half, for two neighbours."""
    return x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1)


@dataclass(frozen=True)
class Rope:
    """A form of RoPE that the kernel computes.

    interleaved: neighbouring dimensions form pairs, not the two halves. spread: transformers' cos
    or sin to one number per rotated dimension. dtype: of the arithmetic.
    """

    interleaved: bool
    spread: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """transformers' cos or sin [1, R, n] -> [R, rot]."""
        return self.spread(x[0]).to(self.dtype)


FORMS = ((False, Tensor.contiguous), (False, twice), (True, Tensor.contiguous), (True, pairs))


class DeferredRope:
    """``apply_rotary_pos_emb`` of one stand-in: leaves the rotation to the KV write.

    whole: the attention interface gets the tensors that are returned here; otherwise the rest of
    the head is joined to them first. left: whether a rotation was ever left.
    """

    def __init__(self, rotate: Rotate, rope: Rope, whole: bool, context: AttentionContext):
        self.rotate, self.rope, self.whole = rotate, rope, whole
        self.context = context
        self.left = False

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k unrotated while a pass runs whose rows have these angles, else rotated."""
        context, rope = self.context, self.rope
        if not context.serves() or list(cos.shape[:2]) != [1, q.shape[2]]:
            return self.rotate(q, k, cos, sin, *args, **kwargs)
        angles = context.angles((cos, sin), layout=rope)
        context.leave_rope(PendingRope(self, q, k, self.whole, angles, rope.interleaved))
        self.left = True
        return q, k


def rotate_of(module: nn.Module) -> Rotate | None:
    """The ``apply_rotary_pos_emb`` that a module's forward calls, or None."""
    forward: Any = unwrap(type(module).forward)
    calls = ROTATE in forward.__code__.co_names
    return forward.__globals__.get(ROTATE) if calls else None


def _rotating(function: Any, rotate: Any) -> Any:
    """``function`` with ``rotate`` in place of ``apply_rotary_pos_emb``, its decorators around it.

    A decorator keeps what it calls in its closure; one that does not calls the function as it was.
    """
    scope, cells = function.__globals__, function.__closure__
    inside = getattr(function, "__wrapped__", None)
    if inside is None:
        scope = {**scope, ROTATE: rotate}
    else:
        own = CellType(_rotating(inside, rotate))
        cells = tuple(own if cell.cell_contents is inside else cell for cell in cells)
    code, name = function.__code__, function.__name__
    made = FunctionType(code, scope, name, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Rewired(nn.Module):
    """Base of stand-ins that run another class's forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # No method of its own: a module that holds itself is freed late.
        return self.tinyspec_forward(self, *args, **kwargs)  # type: ignore[operator]


def rewired(module: nn.Module, context: AttentionContext, rotate: Any) -> nn.Module:
    """A module that shares everything with ``module`` and runs its forward with ``rotate`` in place
    of ``apply_rotary_pos_emb``, and with another context."""
    run = _rotating(type(module).forward, rotate)
    own = {"tinyspec_context": context, "tinyspec_forward": run, "tinyspec_rope": rotate}
    return standing_in(module, _Rewired, **own)


def deferred(module: nn.Module, context: AttentionContext, rope: Rope, whole: bool) -> nn.Module:
    """A stand-in of ``module``, whose rotation is ``rope``, that leaves it to the KV write."""
    rotate: Any = rotate_of(module)
    return rewired(module, context, DeferredRope(rotate, rope, whole, context))
