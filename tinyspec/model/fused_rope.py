"""RoPE left to the KV write: a stand-in that runs an attention module's own forward, whose
``apply_rotary_pos_emb`` hands q and k on as they are and leaves cos and sin in the context.

Knows the forms of RoPE that the kernel has; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext, PendingRope

# How transformers' modeling files call the function that rotates q and k.
ROTATE = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]


def twice(x: Tensor) -> Tensor:
    """One number for both halves of a head."""
    return torch.cat((x, x), dim=-1)


def pairs(x: Tensor) -> Tensor:
    """The first half, for neighbours each."""
    return x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1)


class Rope(NamedTuple):
    """A form of RoPE that the kernel has.

    interleaved: neighbours form the pairs, not halves. spread: makes one number per element of the
    rotated part of a head out of transformers' cos or sin. dtype: to rotate in.
    """

    interleaved: bool
    spread: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def angles(self, x: Tensor) -> Tensor:
        """cos or sin [1, R, n] of transformers' -> [R, rot]."""
        return self.spread(x[0]).to(self.dtype)


FORMS = ((False, Tensor.contiguous), (False, twice), (True, Tensor.contiguous), (True, pairs))


class DeferredRope:
    """Stands for ``apply_rotary_pos_emb`` in one module's forward, and leaves RoPE to the kernel.

    whole: q and k reach the attention interface as they are returned here; where not, other parts
    of the head are joined to them first. left: whether RoPE was ever left to the kernel.
    """

    def __init__(self, rotate: Rotate, rope: Rope, whole: bool, context: AttentionContext):
        self.rotate, self.rope, self.whole = rotate, rope, whole
        self.context = context
        self.left = False

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k as they are in a pass whose rows have these angles, else rotated."""
        context, rope = self.context, self.rope
        metadata = context.metadata if context.serves() else None
        if metadata is None or list(cos.shape[:2]) != [1, q.shape[2]]:
            return self.rotate(q, k, cos, sin, *args, **kwargs)
        # Once per pass for all layers that are given the same.
        key = rope, id(cos), id(sin)
        if key not in metadata.derived:
            # Keeps cos and sin alive: id() is the key.
            metadata.derived[key] = rope.angles(cos), rope.angles(sin), cos, sin
        angles = metadata.derived[key][:2]
        context.leave_rope(PendingRope(self, q, k, self.whole, angles, rope.interleaved))
        self.left = True
        return q, k


def rotate_of(module: nn.Module) -> Rotate | None:
    """The ``apply_rotary_pos_emb`` that a module's forward calls, or None."""
    forward: Any = type(module).forward
    calls = ROTATE in forward.__code__.co_names
    return forward.__globals__.get(ROTATE) if calls else None


class _Rewired(nn.Module):
    """What a stand-in has besides its original's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # No method of its own: a module that holds itself is freed late.
        return self.tinyspec_forward(self, *args, **kwargs)  # type: ignore[operator]


@cache
def _class(original: type) -> type[nn.Module]:
    return type(original.__name__, (_Rewired, original), {})


def rewired(module: nn.Module, context: AttentionContext, rotate: Any) -> nn.Module:
    """A module that shares everything with ``module`` and runs its forward, with ``rotate`` for
    ``apply_rotary_pos_emb`` and with another context."""
    forward: Any = type(module).forward
    scope = {**forward.__globals__, ROTATE: rotate}
    code, name = forward.__code__, forward.__name__
    run = FunctionType(code, scope, name, forward.__defaults__, forward.__closure__)
    run.__kwdefaults__ = forward.__kwdefaults__
    kind: Any = type(module)
    stand_in = object.__new__(_class(kind))
    vars(stand_in).update(vars(module), tinyspec_context=context)
    vars(stand_in).update(tinyspec_forward=run, tinyspec_rope=rotate)
    for call in ("forward", "_compiled_call_impl"):
        vars(stand_in).pop(call, None)
    return stand_in


def deferred(module: nn.Module, context: AttentionContext, rope: Rope, whole: bool) -> nn.Module:
    """``module`` with its RoPE, found to be ``rope``, left to the KV write."""
    rotate: Any = rotate_of(module)
    return rewired(module, context, DeferredRope(rotate, rope, whole, context))
