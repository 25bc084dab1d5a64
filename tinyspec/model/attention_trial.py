"""Which stand-in an attention module gets: the first that gives the bits of the module itself.

Every distinct module is run as it is and as its stand-ins, on the model's device, with the same
random rows and weights and with the arguments that the model calls it with; the KV write is the
twin. Compared is what reaches attention, and what the module makes of attention's output. A module
without an equal stand-in is served through transformers' attention interface. Knows no model by
name; what 64 rows do not show, ``AttentionContext`` checks in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinyspec.kernels import backend
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.model.attention import AttentionContext, PagedAttention
from tinyspec.model.attention_calls import AttentionCall, GivenCall, Layer, Reach
from tinyspec.model.equivalence import (
    ROWS,
    described,
    kind_of,
    probe_rows,
    same_bits,
    with_scratch_weights,
)
from tinyspec.model.fused_rope import deferred, rewired, rope_of, rotate_of, sharing
from tinyspec.model.wrappers import own_forward

Make = Callable[[nn.Module, AttentionContext], nn.Module]


class Outcome(NamedTuple):
    """What one run of a module showed: tensors that reached attention, how scores are made, what
    the module returned."""

    reached: tuple[Tensor, ...]
    scores: tuple[Any, ...]
    returned: Any

    def same(self, other: Outcome | None) -> bool:
        """Whether both are the same, bit for bit."""
        return other is not None and all(map(_same, self, other))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


class Trial:
    """One call of an attention module, to be made by its stand-ins."""

    def __init__(self, call: AttentionCall, given: GivenCall):
        self.call = call
        self.context = AttentionContext()
        kernels = backend.load("torch")
        self.context.kernels = replace(kernels, paged_attention=self._attend)
        self._given = given
        self._reached: list[Any] = []
        self.rotated: list[tuple[Any, ...]] = []

    def own(self, numbered: bool) -> Outcome | None:
        """What the module itself does. numbered: it may read its ``layer_idx``."""
        module = self.call.module
        rotate = rotate_of(module)

        def listening(*args: Any, **kwargs: Any) -> Any:
            self.rotated.append((*args, *kwargs.values()))
            return rotate(*args, **kwargs)  # type: ignore[misc]

        self.rotated.clear()
        if rotate is None:
            copy = sharing(module, self.context)
        else:
            copy = rewired(module, self.context, listening)
        if not numbered:
            vars(copy).pop("layer_idx", None)
        return self.run(copy)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: AttentionMetadata,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._reached.append(((q, k, v), (scale, softcap, sinks)))
        return probe_rows(tuple(q.shape[1:]), q.dtype, q.device)

    def run(self, module: nn.Module) -> Outcome | None:
        """None where the module raises, or leaves something behind."""
        given = self._arguments()
        if given is None:
            return None
        args, kwargs, like = given
        context, shape = self.context, self.call.shape
        cache = (1, ROWS, shape.num_kv_heads, shape.head_dim)
        context.k, context.v = [like.new_zeros(cache)], [like.new_zeros(cache)]
        context.layers = [Layer("", id(module), Reach())]
        rows = torch.arange(ROWS, device=like.device)
        ends = torch.tensor([0, ROWS], dtype=torch.int32, device=like.device)
        page = ends.new_zeros(1, 1)
        self._reached.clear()
        context.begin(AttentionMetadata(page, ends, ends[1:], ROWS, ROWS, ROWS), rows, rows)
        before = [dict(vars(module)), *(dict(x) for x in kwargs.values() if isinstance(x, dict))]
        try:
            returned = module(*args, **kwargs)
            context.check()
        except Exception:  # whatever it is: this stand-in cannot be one
            return None
        finally:
            context.end()
        after = [vars(module), *(x for x in kwargs.values() if isinstance(x, dict))]
        if not all(map(_unchanged, before, after)):
            return None
        ((reached, scores),) = self._reached
        return Outcome(reached, scores, returned)

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], Tensor] | None:
        """The arguments, with random rows for the hidden states, and these."""
        args: dict[Any, Any] = dict(enumerate(self._given.args))
        kwargs = self._given.kwargs
        kwargs = {k: dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
        for held in (args, kwargs):
            for name, x in held.items():
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3:
                    rows = held[name] = probe_rows(tuple(x.shape[2:]), x.dtype, x.device)[None]
                    return tuple(args.values()), kwargs, rows
        return None


def _unchanged(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[name] is before[name] for name in before)


Way = Callable[[Trial], Iterator[Make]]


def fused(trial: Trial) -> Iterator[Make]:
    """``PagedAttention``, for modules that have its parts."""
    module, call = trial.call.module, trial.call
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
    own = any(isinstance(norm, nn.Module) and own_forward(norm) is not None for norm in norms)
    if all(hasattr(module, part) for part in parts) and not own:
        yield partial(PagedAttention, scale=call.scale, softcap=call.shape.softcap)


def rope_left_out(trial: Trial) -> Iterator[Make]:
    """The module's own forward with RoPE left to the KV write, for modules that rotate once."""
    rotate = rotate_of(trial.call.module)
    if rotate is not None and [len(args) for args in trial.rotated] == [4]:
        rope = rope_of(rotate, *trial.rotated[0])
        if rope is not None:
            for whole in (True, False):
                yield partial(deferred, rope=rope, whole=whole)


# In order of preference.
WAYS: tuple[Way, ...] = (fused, rope_left_out)


def choose(trial: Trial, ways: tuple[Way, ...]) -> tuple[Make | None, bool]:
    """The first equal stand-in, and whether it is good for modules with another ``layer_idx``."""
    own = trial.own(numbered=False)
    alike = own is not None
    own = own or trial.own(numbered=True)
    if own is None:
        return None, alike
    makes = (make for way in ways for make in way(trial))
    found = (make for make in makes if own.same(_run(trial, make)))
    return next(found, None), alike


def _run(trial: Trial, make: Make) -> Outcome | None:
    try:
        stand_in = make(trial.call.module, trial.context)
    except Exception:  # it lacks what this stand-in needs
        return None
    return trial.run(stand_in)


def stand_ins(
    calls: list[AttentionCall], given: dict[int, list[GivenCall]], ways: tuple[Way, ...] = WAYS
) -> dict[int, Make]:
    """By a module's id, how to make its stand-in, of the modules that have one.

    calls: of attention, in a forward; given: those of the modules that make them.
    """
    tried: dict[Hashable, Make | None] = {}
    found: dict[int, list[Make | None]] = {key: [] for key in given}
    for call in calls:
        makes, arguments = found[id(call.module)], given[id(call.module)]
        one = arguments[len(makes)] if len(makes) < len(arguments) else None
        makes.append(_way(call, one, ways, tried) if one is not None else None)
    return {
        key: makes[0]
        for key, makes in found.items()
        if makes and makes[0] is not None and all(make is makes[0] for make in makes)
    }


def _way(
    call: AttentionCall,
    given: GivenCall,
    ways: tuple[Way, ...],
    tried: dict[Hashable, Make | None],
) -> Make | None:
    module = call.module
    forward = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    if own_forward(module, forward) is not None:
        return None
    key = (kind_of(module), *map(described, given), call.shape, call.scale, call.reach)
    if key not in tried:
        trial = Trial(call, given)
        make, alike = with_scratch_weights(module, partial(choose, trial, ways))
        if not alike:
            return make
        tried[key] = make
    return tried[key]
