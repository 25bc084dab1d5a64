"""Deferred rotation: an attention module that leaves RoPE to the kernel that writes its keys.

Told by the source, not by a list of models: a forward that does nothing with rotated q and k but
hand them to the attention interface gives the same when it hands them over as they are, with the
cos and sin that they want. Knows no model; knows the rotations that the kernel can do, by the
function of transformers that does each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tinyspec.model.attention import AttentionContext, Note
from tinyspec.model.cpu.norms import is_rms_norm
from tinyspec.model.deferrable import ROTATE, essence, hands_over, of_family, source_of, text_of
from tinyspec.model.wrappers import own_forward


class Rope(NamedTuple):
    """A rotation that the kernel can do.

    lay: what transformers' cos or sin becomes, per element of the rotated part of a head, in the
    dtype to turn in. rounds: whether the result has q's dtype where that of cos is
    wider.
    """

    interleaved: bool
    lay: Callable[[Tensor], Tensor]
    rounds: bool = False


def _pairs(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1)


# By the model whose ``apply_rotary_pos_emb`` it is.
ROPES = {
    "llama": Rope(False, Tensor.contiguous),
    "gpt_neox": Rope(False, Tensor.contiguous),
    "phi3": Rope(False, Tensor.contiguous),
    "nemotron": Rope(False, Tensor.contiguous),
    "olmo": Rope(False, Tensor.contiguous, rounds=True),
    "esm": Rope(False, Tensor.float, rounds=True),
    "gpt_oss": Rope(False, lambda x: torch.cat((x, x), dim=-1)),
    "glm": Rope(True, _pairs),
    "helium": Rope(True, _pairs),
    "ernie4_5": Rope(True, lambda x: _pairs(x).float(), rounds=True),
    "cohere": Rope(True, Tensor.float, rounds=True),
}
# Whose attention ``PagedAttention`` does.
STANDARD = (
    *(("llama", "LlamaAttention"), ("mistral", "MistralAttention"), ("qwen2", "Qwen2Attention")),
    *(("qwen3", "Qwen3Attention"), ("gemma2", "Gemma2Attention")),
)


@cache
def _references() -> dict[str | None, Rope]:
    return {essence(of_family(family, ROTATE)): rope for family, rope in ROPES.items()}


@cache
def _standard() -> set[str]:
    """What the attentions do whose place ``PagedAttention`` takes."""
    forwards = [of_family(family, name).forward for family, name in STANDARD]
    return {text_of(tree) for tree in map(source_of, forwards) if tree is not None}


def _plain(function: Any) -> Any:
    """The function that the kernels library made a module of, so that its own can replace it."""
    if isinstance(function, nn.Module) and "forward" not in vars(function):
        cells: tuple[Any, ...] = getattr(type(function).forward, "__closure__", None) or ()
        return cells[0].cell_contents if len(cells) == 1 else None
    return function


def _rope(module: nn.Module) -> Rope | None:
    """How the kernel turns what ``module`` would; None where it cannot, or the module must."""
    accelerated = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    if own_forward(module, accelerated) is not None or not hasattr(module, "layer_idx"):
        return None
    forward: Any = type(module).forward
    tree = source_of(forward)
    if tree is None or not hands_over(tree):
        return None
    found = essence(_plain(forward.__globals__.get(ROTATE)))
    return None if found is None else _references().get(found)


def _standard_norm(norm: nn.Module, head_dim: int) -> bool:
    return is_rms_norm(norm) and list(norm.weight.shape) == [head_dim]  # type: ignore[union-attr, arg-type]


def layout(module: nn.Module) -> Literal["fused", "deferred"] | None:
    """Which stand-in an attention module can have: ``PagedAttention``, one of its own kind that
    leaves the rotation to the kernel, or none, which leaves it to the attention interface."""
    rope = _rope(module)
    if rope is None:
        return None
    tree = source_of(type(module).forward)
    assert tree is not None
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    head_dim: Any = getattr(module, "head_dim", None)
    fused = rope == ROPES["llama"] and text_of(tree) in _standard()
    return "fused" if fused and all(_standard_norm(n, head_dim) for n in norms) else "deferred"


class _Deferred(nn.Module):
    """What a stand-in has besides its original's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # No method of its own: a module that holds itself is freed late.
        return self.run_deferred(self, *args, **kwargs)  # type: ignore[operator]


@cache
def _class(original: type) -> type[nn.Module]:
    return type(original.__name__, (_Deferred, original), {})


def deferred(module: nn.Module, context: AttentionContext) -> nn.Module | None:
    """A stand-in that runs ``module``'s own forward, on everything that is its own, but leaves the
    rotation to the kernel; None where ``layout`` is."""
    rope = _rope(module)
    if rope is None:
        return None
    forward: Any = type(module).forward
    scope = {**forward.__globals__, ROTATE: _deferring(module, rope, context)}
    run = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__)
    run.__kwdefaults__ = forward.__kwdefaults__
    kind: Any = type(module)
    stand_in = object.__new__(_class(kind))
    vars(stand_in).update(vars(module), tinyspec_context=context, run_deferred=run)
    for call in ("forward", "_compiled_call_impl"):
        vars(stand_in).pop(call, None)
    return stand_in


def _deferring(module: nn.Module, rope: Rope, context: AttentionContext) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` of a stand-in: notes how q and k want to be turned."""
    rotate = type(module).forward.__globals__[ROTATE]
    layer: Any = module.layer_idx

    def deferring(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        segments = context.segments if context.serves() else None
        if segments is None:
            return rotate(q, k, cos, sin)
        # Once per pass, which all layers share that are handed the same.
        key = (rope, q.dtype, id(cos), id(sin))
        if key not in segments.derived:
            fits = list(cos.shape[:2]) == [1, q.shape[2]]
            fits = fits and (rope.rounds or cos.dtype == q.dtype)
            laid = (rope.lay(cos[0]), rope.lay(sin[0])) if fits else None
            # With what it was made of, lest another come to have its id.
            segments.derived[key] = laid, cos, sin
        laid = segments.derived[key][0]
        if laid is None:
            return rotate(q, k, cos, sin)
        assert context.note is None, "what was left unrotated was attended to by nobody"
        context.note = Note(layer, laid[0], laid[1], rope.interleaved)
        return q, k

    return deferring
