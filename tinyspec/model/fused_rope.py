"""RoPE left to the KV write: a stand-in that runs an attention module's own forward, whose
``apply_rotary_pos_emb`` hands q and k on as they are and notes cos and sin.

Knows the forms of RoPE that the kernel has, and finds which of them a function computes by
comparing bits; no model by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinyspec.kernels.twins.kv_write import fused_kv_write
from tinyspec.model.attention import AttentionContext, PendingRope
from tinyspec.model.equivalence import ROWS, probe_rows, same_bits

# How transformers' modeling files call the function that rotates q and k.
ROTATE = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]


class Rope(NamedTuple):
    """A form of RoPE that the kernel has.

    interleaved: neighbours form the pairs, not halves. spread: makes one number per element of the
    rotated part of a head out of transformers' cos or sin. dtype: to rotate in. given: dtype of
    transformers' cos.
    """

    interleaved: bool
    spread: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    given: torch.dtype

    def angles(self, x: Tensor) -> Tensor:
        """cos or sin [1, R, n] of transformers' -> [R, rot]."""
        return self.spread(x[0]).to(self.dtype)


def _twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1)


FORMS = (
    (False, Tensor.contiguous),
    (False, _twice),
    (True, Tensor.contiguous),
    (True, _pairs),
)


def rope_of(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rope | None:
    """The form in which the kernel's twin gives the bits of ``rotate`` for random q and k of these
    shapes, [1, H, ROWS, D], at these angles; None if it has none."""
    if list(cos.shape[:2]) != [1, ROWS] or q.dim() != 4 or q.shape[2] != ROWS:
        return None
    q, k = (probe_rows((x.shape[1], x.shape[3]), x.dtype, x.device) for x in (q, k))
    expected = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for dtype in dict.fromkeys((q.dtype, torch.float32)):
        for interleaved, spread in FORMS:
            rope = Rope(interleaved, spread, dtype, cos.dtype)
            found = _rotated(q, k, rope.angles(cos), rope.angles(sin), interleaved)
            if all(map(same_bits, found, (x[0].transpose(0, 1) for x in expected))):
                return rope
    return None


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """q and k [R, H, D] as the twin of the KV write rotates them."""
    if cos.shape[-1] > q.shape[-1] or cos.shape[-1] % 2:
        return q, k
    k_cache, v_cache = (k.new_empty(1, *k.shape) for _ in range(2))
    slots = torch.arange(len(k), device=k.device)
    q = fused_kv_write(q, k, k, cos, sin, k_cache, v_cache, slots, interleaved=interleaved)
    return q, k_cache[0]


class DeferredRope:
    """Stands for ``apply_rotary_pos_emb`` in one module's forward, and leaves RoPE to the kernel.

    whole: q and k reach the attention interface as they are returned here; where not, other parts
    of the head are joined to them first.
    """

    def __init__(self, rotate: Rotate, rope: Rope, whole: bool, context: AttentionContext):
        self.rotate, self.rope, self.whole = rotate, rope, whole
        self.context = context

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k as they are in a pass whose rows have these angles, else rotated."""
        context, rope = self.context, self.rope
        segments = context.segments if context.serves() else None
        fits = list(cos.shape[:2]) == [1, q.shape[2]] and cos.dtype == rope.given
        if segments is None or not fits:
            return self.rotate(q, k, cos, sin, *args, **kwargs)
        # Once per pass for all layers that are given the same.
        key = rope, id(cos), id(sin)
        if key not in segments.derived:
            # Keeps cos and sin alive: id() is the key.
            segments.derived[key] = (rope.angles(cos), rope.angles(sin)), cos, sin
        angles_cos, angles_sin = segments.derived[key][0]
        context.leave_rope(
            PendingRope(self, q, k, self.whole, angles_cos, angles_sin, rope.interleaved)
        )
        return q, k


def rotate_of(module: nn.Module) -> Rotate | None:
    """The ``apply_rotary_pos_emb`` that a module's forward calls, or None."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return None
    rotate = forward.__globals__.get(ROTATE)
    return rotate if callable(rotate) else None


class _Rewired(nn.Module):
    """What a stand-in has besides its original's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # No method of its own: a module that holds itself is freed late.
        return self.tinyspec_forward(self, *args, **kwargs)  # type: ignore[operator]


@cache
def _class(original: type) -> type[nn.Module]:
    return type(original.__name__, (_Rewired, original), {})


def rewired(module: nn.Module, context: AttentionContext, rotate: Rotate) -> nn.Module:
    """A module that shares everything with ``module`` and runs its forward, with ``rotate`` for
    ``apply_rotary_pos_emb`` and another context."""
    forward: Any = type(module).forward
    scope = {**forward.__globals__, ROTATE: rotate}
    code, name = forward.__code__, forward.__name__
    run = FunctionType(code, scope, name, forward.__defaults__, forward.__closure__)
    run.__kwdefaults__ = forward.__kwdefaults__
    kind: Any = type(module)
    stand_in = sharing(module, context, _class(kind))
    vars(stand_in).update(tinyspec_forward=run, tinyspec_rope=rotate)
    return stand_in


def deferred(module: nn.Module, context: AttentionContext, rope: Rope, whole: bool) -> nn.Module:
    """``module`` with its RoPE, found to be ``rope``, left to the KV write."""
    rotate = rotate_of(module)
    assert rotate is not None
    return rewired(module, context, DeferredRope(rotate, rope, whole, context))


def sharing(
    module: nn.Module, context: AttentionContext, kind: type[nn.Module] | None = None
) -> nn.Module:
    """A module of class ``kind`` (default: ``module``'s) that shares everything with ``module``."""
    other = object.__new__(kind or type(module))
    vars(other).update(vars(module), tinyspec_context=context)
    for call in ("forward", "_compiled_call_impl"):
        vars(other).pop(call, None)
    return other
