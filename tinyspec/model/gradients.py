"""Gradients of canonical passes: values by what generation runs, derivatives by plain torch.

Every function here gives the bits of a pass without gradients, as it runs the same code with the
gradient mode off; its backward is an ordinary one at these very values. What is not here is
differentiated by torch itself, whose operators compute the same with gradients and without, but
for products, which may be cut in another way: ``Products`` is on while a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from tinyspec.kernels.twins.layers import norm_and_rotate
from tinyspec.model.quantized import is_packed

# Rows of a sequence that attend at a time where a mask has to say to what.
BLOCK = 256
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Product(torch.autograd.Function):
    """``run(x)``, whose result is x @ weight.T + bias, whatever computes it, and in which dtype."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return run(x).detach()  # no view: the model may write to it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        found: list[Tensor | None] = [None] * 4
        with torch.autocast(grad.device.type, enabled=False):
            if of_x:
                found[1] = (rows @ weight.to(rows.dtype)).view(x.shape)
            if of_weight:
                found[2] = rows.T @ x.reshape(-1, x.shape[-1]).to(rows.dtype)
            if of_bias:
                found[3] = rows.sum(0)
        return tuple(found)  # torch casts them to the dtypes of x, weight and bias


def product(
    run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """``run(x)``: rows x [..., in] times weight [out, in], plus bias [out]; with gradients of all
    three where they are asked for."""
    if not torch.is_grad_enabled():
        return run(x)
    found: Tensor = _Product.apply(run, x, weight, bias)
    return found


class _Recomputed(torch.autograd.Function):
    """``run`` of tensors; the gradients are those of ``plain``, the same function by torch, under
    the same autocast."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], plain: Callable[..., Any], known: bool, *given: Any
    ) -> Any:
        kind = given[0].device.type
        on = torch.is_autocast_enabled(kind)
        ctx.plain, ctx.autocast = plain, torch.autocast(kind, enabled=on, cache_enabled=False)
        out = run(*given)
        ctx.save_for_backward(*given, *(out if known else ()))
        if known:
            return out[0].detach()
        return tuple(x.detach() for x in out) if isinstance(out, tuple) else out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        known = saved[len(asked) :]
        given = [
            None if x is None else x.detach().requires_grad_(asks)
            for x, asks in zip(saved, asked, strict=False)
        ]
        wanted = [x for x, asks in zip(given, asked, strict=True) if asks and x is not None]
        with torch.enable_grad(), ctx.autocast:
            out = ctx.plain(*given, *known)
            outputs = out if isinstance(out, tuple) else (out,)
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            of, weighed = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(of, wanted, weighed, allow_unused=True))
        return None, None, None, *(next(found) if asks else None for asks in asked)


def recomputed(
    run: Callable[..., Any], plain: Callable[..., Any], *given: Tensor | None, known: bool = False
) -> Any:
    """``run(*given)``, with the gradients of ``plain`` where they are asked for. Both return a
    tensor or a tuple of tensors, and compute the same up to rounding. known: only the first result
    of ``run`` is returned, and ``plain`` is given them all, behind its own arguments."""
    if not torch.is_grad_enabled():
        return run(*given)
    return _Recomputed.apply(run, plain, known, *given)


class _KnownAttention(torch.autograd.Function):
    """Flash attention of a CPU whose result and log-sum-exp are known: its backward alone."""

    @staticmethod
    def forward(ctx: Any, scale: float, mask: Tensor | None, *given: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask, *given)
        return given[3].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, *given = ctx.saved_tensors
        form = {"attn_mask": mask, "scale": ctx.scale}
        found = flash_attention_backward(grad, *given, 0.0, mask is None, **form)
        return None, None, *found, None, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_packed(weight):  # its own class's matter
        return F.linear(input, weight, bias)
    return product(partial(F.linear, weight=weight, bias=bias), input, weight, bias)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    found: Tensor = recomputed(torch.matmul, torch.matmul, input, other)
    return found


# By what models call them.
_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
}


class Products(TorchFunctionMode):
    """Products of the block run as without gradients: torch folds a batch of rows into a matrix or
    not by whether the weight asks for a gradient, and bits follow from that."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _PRODUCTS.get(func, func) if torch.is_grad_enabled() else func
        return run(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Segment:
    """Of one sequence, rows ``first`` to ``end`` of a pass, which attend to ``keys`` keys at most:
    those of these rows, and of rows of the sequence before them."""

    first: int
    end: int
    keys: int


class PagedCalls(NamedTuple):
    """The two kernels of an attention call on the pages of a pass: the KV write of (q, k, v), which
    returns the rotated q, and attention of that. cache, slots: where the write puts k. tells_lse:
    whether attention can tell the log-sum-exp of its scores."""

    write: Callable[..., Tensor]
    read: Callable[..., Tensor]
    cache: Tensor
    slots: Tensor
    tells_lse: bool

    def written(self, *given: Tensor, **form: Any) -> tuple[Tensor, Tensor]:
        """The rotated q and k."""
        q = self.write(*given, **form)
        return q, self.cache.flatten(0, 1).index_select(0, self.slots.clamp(min=0))


@dataclass
class Tape:
    """What attention of one differentiable pass is given of the pass before it, and leaves to the
    next, by the number of the call: keys and values [M, Hkv, D], of which the last are those of the
    sequence that goes on. segments: in the order of their rows; only the first may go on.
    """

    segments: list[Segment]
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    after: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self,
        number: int,
        calls: PagedCalls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        norm: dict[str, Any],
        scores: dict[str, Any],
    ) -> Tensor:
        """Attention call ``number`` by ``calls``; the others as for ``AttentionContext.attend``."""
        names = [name for name in ("q_weight", "k_weight") if name in norm]
        form = {name: held for name, held in norm.items() if name not in names}

        def written(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            return calls.written(q, k, v, **dict(zip(names, weights, strict=True)), **form)

        def rotated(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            named: dict[str, Any] = dict(zip(names, weights, strict=True))
            return norm_and_rotate(q, k, angles, **named, **form)

        q, k = recomputed(written, rotated, q, k, v, *(norm[name] for name in names))
        k, v = (x[: self.segments[-1].end] for x in (k, v))
        if (more := self.segments[0].keys - self.segments[0].end) > 0:
            pairs = zip(self.before[number], (k, v), strict=True)
            k, v = (torch.cat((x[-more:], y)) for x, y in pairs)
        self.after.setdefault(number, (k, v))  # not where it is computed again
        rest = {name: held for name, held in scores.items() if name != "sinks"}

        sinks = scores.get("sinks")
        known = calls.tells_lse and not rest.get("softcap") and sinks is None

        def paged(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
            if not known:
                return calls.read(q, sinks=sinks, **rest)
            lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
            return calls.read(q, lse=lse, **rest), lse

        plain = partial(segment_attention, segments=self.segments, **rest)
        out: Tensor = recomputed(paged, plain, q, k, v, sinks, known=known)
        return out


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *known: Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As paged attention, by torch's operators: q [R, Hq, D]; k, v [M, Hkv, D] of the segments'
    keys one after the other, sinks [Hq] or None -> [R, Hq, D], 0 behind the last segment. known:
    this very result and the log-sum-exp [R, Hq], which are not computed again then."""
    rows = [segment.end - segment.first for segment in segments]
    parts = (x.split([segment.keys for segment in segments]) for x in (k, v))
    *queries, padding = q.split([*rows, len(q) - sum(rows)])
    plain = not (window or chunk or softcap) and sinks is None
    found = []
    for segment, q_part, k_part, v_part in zip(segments, queries, *parts, strict=True):
        first, before = segment.first, segment.keys - len(q_part)
        whole = plain and not before
        for block in (q_part,) if whole else q_part.split(BLOCK):
            end, stop = first + len(block), before + len(block)  # of rows, and of positions
            low = max(0, before - window + 1) if window else before // chunk * chunk if chunk else 0
            seen = None if whole else _seen(before, stop, low, window, chunk, q.device)
            keys = (x if whole else x[low:stop] for x in (k_part, v_part))
            given = (block, *keys, *(x[first:end] for x in known))
            heads = [x.transpose(0, 1)[None] for x in given]
            out = _attention(heads, seen, scale, softcap, sinks)
            found.append(out.squeeze(0).transpose(0, 1))
            first, before = end, stop
    return torch.cat([*found, torch.zeros_like(padding)])


def _seen(start: int, stop: int, low: int, window: int, chunk: int, device: torch.device) -> Tensor:
    """Which keys, at positions from ``low`` to ``stop``, rows from ``start`` to there attend to."""
    key = torch.arange(low, stop, device=device)
    row = key[start - low :, None]
    seen = key <= row
    if window:
        seen &= key > row - window
    return seen & (key >= row // chunk * chunk) if chunk else seen


def _attention(
    heads: list[Tensor], seen: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """q [1, Hq, n, D], k and v [1, Hkv, m, D], and of what is known the result and its log-sum-exp
    [1, Hq, n] -> [1, Hq, n, D]; seen [n, m], None: causal."""
    q, k, v, *known = heads
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    if known:
        mask = None
        if seen is not None:
            mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        out: Tensor = _KnownAttention.apply(scale, mask, q, k, v, *known)
        return out
    if not softcap and sinks is None:
        causal = seen is None
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=scale)
    assert seen is not None
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        more = sinks.float().view(1, -1, 1, 1).expand(-1, -1, q.shape[2], 1)
        scores = torch.cat((scores, more), dim=-1)
    return (scores.softmax(-1)[..., : len(seen[0])] @ v.float()).to(q.dtype)
