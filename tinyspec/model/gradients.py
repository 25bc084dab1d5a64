"""Gradients of canonical passes: values by what generation runs, derivatives by plain torch.

Every function here gives the bits of a pass without gradients, as it runs the same code with the
gradient mode off; its backward is an ordinary one at these very values. What is not here is
differentiated by torch itself, whose operators compute the same with gradients and without, but
for products, which may be cut in another way: ``Products`` is on while a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.kernels.twins.layers import norm_and_rotate
from tinyspec.model.quantized import is_packed

# Rows of a sequence that attend at a time where a mask has to say to what.
BLOCK = 256
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Of what is asked (of each tensor that was given), those tensors and the gradients of the results:
# the gradients of the tensors.
Backward = Callable[[Sequence[bool], Sequence[Any], Sequence[Tensor]], Sequence[Tensor | None]]


class _Evaluated(torch.autograd.Function):
    """``run`` of tensors, with the gradients of ``backward``, under the same autocast."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backward: Backward, *given: Any) -> Any:
        kind = given[0].device.type
        on = torch.is_autocast_enabled(kind)
        ctx.autocast = torch.autocast(kind, enabled=on, cache_enabled=False)
        ctx.gradients = backward
        ctx.save_for_backward(*given)
        out = run(*given)  # no views are returned: the model may write to them
        return tuple(x.detach() for x in out) if isinstance(out, tuple) else out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.autocast:
            return None, None, *ctx.gradients(ctx.needs_input_grad[2:], ctx.saved_tensors, grads)


def evaluated(run: Callable[..., Any], backward: Backward, *given: Tensor | None) -> Any:
    """``run(*given)``, a tensor or a tuple of tensors, with the gradients of ``backward`` where
    they are recorded."""
    return _Evaluated.apply(run, backward, *given) if torch.is_grad_enabled() else run(*given)


def product(
    run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """``run(x)``: rows x [..., in] times weight [out, in], plus bias [out], whatever computes it,
    and in which dtype; with gradients of all three where they are asked for."""
    found: Tensor = evaluated(lambda x, *_: run(x), of_product, x, weight, bias)
    return found


def of_product(
    asked: Sequence[bool], given: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    (x, weight, _), (grad,) = given, grads
    rows = grad.reshape(-1, grad.shape[-1])
    return [  # torch casts them to the dtypes of what was given
        (rows @ weight.to(rows.dtype)).view(x.shape) if asked[0] else None,
        rows.T @ x.reshape(-1, x.shape[-1]).to(rows.dtype) if asked[1] else None,
        rows.sum(0) if asked[2] else None,
    ]


def recomputed(run: Callable[..., Any], plain: Callable[..., Any], *given: Tensor | None) -> Any:
    """``run(*given)``, with the gradients of ``plain`` where they are asked for. Both return a
    tensor or a tuple of tensors, and compute the same up to rounding."""

    def backward(
        asked: Sequence[bool], given: Sequence[Tensor | None], grads: Sequence[Tensor]
    ) -> list[Tensor | None]:
        pairs = zip(given, asked, strict=True)
        leaves = [None if x is None else x.detach().requires_grad_(asks) for x, asks in pairs]
        with torch.enable_grad():
            out = plain(*leaves)
        outputs = zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
        of, weighed = zip(*(pair for pair in outputs if pair[0].requires_grad), strict=True)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        torch.autograd.backward(of, weighed, inputs=wanted)
        return [None if x is None else x.grad for x in leaves]

    return evaluated(run, backward, *given)


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


@dataclass
class Tape:
    """What attention of one differentiable pass is given of the pass before it, and leaves to the
    next, by the number of the call: keys and values [M, Hkv, D], of which the last are those of the
    sequence that goes on; of a short convolution its rows [M, C]. segments: in the order of their
    rows; only the first may go on.
    """

    segments: list[Segment]
    before: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)
    after: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)

    def attend(
        self,
        number: int,
        write: Callable[..., Tensor],
        written: Callable[[], Tensor],
        read: Callable[..., Tensor],
        tells_lse: bool,
        given: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None,
        norm: dict[str, Any],
        scores: dict[str, Any],
    ) -> Tensor:
        """Attention call ``number`` by the two kernels: ``write`` of q, k and v, which returns the
        rotated q, after which ``written`` tells the rotated k, and ``read``, attention of that q.
        tells_lse: whether ``read`` can tell the log-sum-exp of its scores, at which a backward
        begins. given: q, k and v; the others as for ``AttentionContext.attend``."""
        norm, scores = dict(norm), dict(scores)
        weights, sinks = [norm.pop(f"{x}_weight", None) for x in "qk"], scores.pop("sinks", None)

        def run(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            return write(q, k, v, *weights, **norm), written()

        def plain(q: Tensor, k: Tensor, v: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
            return norm_and_rotate(q, k, angles, *weights, **norm)

        q, k = recomputed(run, plain, *given, *weights)
        k, v = (x[: self.segments[-1].end] for x in (k, given[2]))
        if (more := self.segments[0].keys - self.segments[0].end) > 0:
            pairs = zip(self.before[number], (k, v), strict=True)
            k, v = (torch.cat((x[-more:], y)) for x, y in pairs)
        self.after.setdefault(number, (k, v))  # not where it is computed again

        known: tuple[Tensor, ...] = ()
        if tells_lse and sinks is None and not scores.get("softcap"):
            lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
            with torch.no_grad():
                known = read(q, lse=lse, **scores), lse

        def paged(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *known: Tensor) -> Tensor:
            return known[0] if known else read(q, sinks=sinks, **scores)

        attention = partial(segment_attention, segments=self.segments, **scores)
        out: Tensor = recomputed(paged, attention, q, k, v, sinks, *known)
        return out

    def convolve(
        self,
        number: int,
        run: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Short convolution ``number`` by the kernel, ``run``; weight [C, K] and bias [C]."""
        rows, reach = x[: self.segments[-1].end], weight.shape[1] - 1
        before = rows[:0]
        if (more := self.segments[0].keys - self.segments[0].end) > 0:
            (before,) = self.before["convolution", number]
            before = before[len(before) - min(more, reach) :]
        self.after.setdefault(("convolution", number), (torch.cat((before, rows)),))

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
            found, taps = [], weight[:, None].to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            for segment in self.segments:
                own = x[segment.first : segment.end]
                own = torch.cat((before, own)) if segment is self.segments[0] else own
                behind = F.pad(own, (0, 0, reach, 0)).T[None]
                out = F.conv1d(behind, taps, bias, groups=len(weight))[0].T
                found.append(out[-(segment.end - segment.first) :])
            return torch.cat([*found, torch.zeros_like(x[self.segments[-1].end :])])

        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor) -> Tensor:
            return run(x, weight, bias)

        out: Tensor = recomputed(kernel, plain, x, weight, bias, before)
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
    rows, causal = [segment.end - segment.first for segment in segments], CausalMask(window, chunk)
    parts = (x.split([segment.keys for segment in segments]) for x in (k, v))
    *queries, padding = q.split([*rows, len(q) - sum(rows)])
    plain = not (window or chunk or softcap) and sinks is None
    found = []
    for segment, q_part, k_part, v_part in zip(segments, queries, *parts, strict=True):
        start, seen, row_first = segment.keys - len(q_part), None, segment.first
        whole = plain and not start
        for block in (q_part,) if whole else q_part.split(BLOCK):
            stop = start + len(block)
            low = max(0, causal.lowest_key(start))
            if not whole:
                row = torch.arange(start, stop, device=q.device)[:, None]
                key = torch.arange(low, stop, device=q.device)
                seen = (key <= row) & (key >= causal.lowest_key(row))
            given = (block, k_part[low:stop], v_part[low:stop])
            of_rows = (x[row_first : row_first + len(block)] for x in known)
            found.append(_attention(*given, seen, scale, softcap, sinks, *of_rows))
            start, row_first = stop, row_first + len(block)
    return torch.cat([*found, torch.zeros_like(padding)])


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    *known: Tensor,
) -> Tensor:
    """q [n, Hq, D], k and v [m, Hkv, D] -> [n, Hq, D]; seen [n, m], None: causal. known: as for
    ``segment_attention``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    q, k, v, *there = (x.transpose(0, 1)[None] for x in (q, k, v, *known))
    if there:
        mask = None
        if seen is not None:
            mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        form: dict[str, Any] = {"attn_mask": mask, "scale": scale}

        def backward(_: Any, given: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Any]:
            found = flash_attention_backward(*grads, *given, 0.0, mask is None, **form)
            return [*found, None, None]

        out: Tensor = evaluated(lambda q, k, v, out, lse: out, backward, q, k, v, *there)
        return out.squeeze(0).transpose(0, 1)
    if seen is None or not (softcap or sinks is not None):
        found = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale)
        return found.squeeze(0).transpose(0, 1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        more = sinks.float().view(1, -1, 1, 1).expand(-1, -1, q.shape[2], 1)
        scores = torch.cat((scores, more), dim=-1)
    found = scores.softmax(-1)[..., : k.shape[2]] @ v.float()
    return found.to(q.dtype).squeeze(0).transpose(0, 1)
