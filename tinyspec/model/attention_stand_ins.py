"""Which stand-in an attention module gets: the first that gives the bits of the module itself.

Every distinct module is run as it is and as its stand-ins, on the model's device, with the same
random rows and weights and with the arguments that the model calls it with; the KV write is the
twin. Compared is what reaches attention, and what the module makes of attention's output. A module
without an equal stand-in is served through transformers' attention interface. Knows no model by
name; what 64 rows do not show, ``AttentionContext`` checks in every pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap
from itertools import product
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.errors import named
from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.model.attention import (
    AttentionCall,
    AttentionContext,
    ModuleCall,
    PendingRope,
    UnlikeAtLoad,
    fused_attention,
)
from tinyspec.model.scratch_weights import scratch_weights
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import Autocast
from tinyspec.model.trial import ROWS, alike, begin_pass, described, kind_of, probe_rows, tell
from tinyspec.model.wrappers import own_forward, runs_class_forward

# How transformers' modeling files call the function that rotates q and k.
ROTATE = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]
# What stand-ins raise in modules that they do not fit.
OF_OTHERS = TypeError, ValueError, UnlikeAtLoad


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
        context.leave_rope(PendingRope(self, q, k, angles))
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


Make = Callable[[nn.Module, AttentionContext], nn.Module]


class Trial:
    """One call of an attention module, made by its stand-ins with random rows."""

    def __init__(self, call: AttentionCall, given: ModuleCall, autocast: Autocast):
        hidden = given.hidden
        self.call = call
        self.rows = probe_rows(tuple(hidden.shape[2:]), hidden.dtype, hidden.device)[None]
        self.given = given.of(self.rows)
        self.context = AttentionContext(autocast)
        self.context.kernels = replace(backend.load("torch"), paged_attention=self._attend)
        self._reached: tuple[Any, ...] = ()
        self._raised: list[Exception] = []

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, **scores: Any
    ) -> Tensor:
        given = (scores["scale"], scores.get("softcap", 0.0), scores.get("sinks"))
        self._reached = (q, k, v, *given)
        return probe_rows(tuple(q.shape[1:]), q.dtype, q.device)

    def run(self, module: nn.Module) -> tuple[Any, ...] | None:
        """What reached attention, and what the module returned; None if it also keeps something, or
        changes a table that it is given."""
        context, shape, like = self.context, self.call.shape, self.rows
        cache = (1, ROWS, shape.num_kv_heads, shape.head_dim)
        context.hold(*(context.autocast.cast(like.new_zeros(cache)) for _ in range(2)))
        context.layers = [replace(self.call, module=module, reach=CausalMask())]
        args, kwargs, *_ = self.given
        kwargs = {k: dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
        tables = [vars(module), *(x for x in kwargs.values() if isinstance(x, dict))]
        before = _contents(tables)
        begin_pass(context, like.device)
        try:
            returned = module(*args, **kwargs)
            context.check()
        finally:
            context.end()
        return (*self._reached, returned) if _contents(tables) == before else None

    def attempt(self, make: Make) -> tuple[Any, ...] | None:
        """``run`` of a stand-in; None where it cannot stand in."""
        try:
            stand_in = make(self.call.module, self.context)
            found = self.run(stand_in)
        except Exception as error:  # of whatever kind
            self._raised.append(error)
            return None
        rope = vars(stand_in).get("tinyspec_rope")
        unused = isinstance(rope, DeferredRope) and not rope.left
        return None if unused else found

    def first_equal(self, makes: list[Make]) -> Make | None:
        """The first stand-in with the bits of the module itself; the log tells what was raised."""
        expected = self.attempt(_itself)
        equal = (make for make in makes if _same(self.attempt(make), expected))
        found = None if expected is None else next(equal, None)
        if found is None:
            for error in self._raised:
                if not isinstance(error, OF_OTHERS):
                    tell(type(self.call.module).__name__, f"trying it raised {named(error)}")
        return found


def _contents(tables: list[dict[str, Any]]) -> list[list[tuple[str, int]]]:
    return [[(name, id(value)) for name, value in table.items()] for table in tables]


def _itself(module: nn.Module, context: AttentionContext) -> nn.Module:
    own = rewired(module, context, rotate_of(module))
    # One that reads its number here, without a cache, may do something else in other layers.
    vars(own).pop("layer_idx", None)
    return own


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return alike(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


def fused(trial: Trial) -> list[Make]:
    """``PagedAttention``, for modules that have its parts."""
    module, call = trial.call.module, trial.call
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    own = any(isinstance(norm, nn.Module) and own_forward(norm) is not None for norm in norms)
    if own or not all(hasattr(module, part) for part in parts):
        return []
    return [partial(fused_attention, scale=call.scale, softcap=call.shape.softcap)]


def rope_left_out(trial: Trial) -> list[Make]:
    """The module's own forward with RoPE left to the KV write, for modules that rotate."""
    if rotate_of(trial.call.module) is None:
        return []
    dtypes = dict.fromkeys((trial.rows.dtype, torch.float32))
    return [
        partial(deferred, rope=Rope(interleaved, spread, dtype), whole=whole)
        for whole, dtype, (interleaved, spread) in product((True, False), dtypes, FORMS)
    ]


Way = Callable[[Trial], list[Make]]
# In order of preference.
WAYS: tuple[Way, ...] = (fused, rope_left_out)


def stand_ins(
    calls: list[AttentionCall], given: dict[nn.Module, list[ModuleCall]], context: AttentionContext
) -> dict[nn.Module, nn.Module]:
    """The stand-ins of modules that have one.

    calls: of attention, in a forward; given: those of the modules that make them. Modules of one
    kind that are called in the same way are tried once; one that is called twice has no stand-in.
    """
    tried: dict[Hashable, Make | None] = {}
    made: dict[nn.Module, nn.Module] = {}
    for call in calls:
        module, arguments = call.module, given[call.module]
        if len(arguments) != 1 or not runs_class_forward(module):
            continue
        if not isinstance(arguments[0].hidden, Tensor):
            continue
        key = (
            kind_of(module),
            *map(described, arguments[0][:2]),
            call.shape,
            call.scale,
            call.reach,
        )
        if key not in tried:
            trial = Trial(call, arguments[0], context.autocast)
            makes = [make for way in WAYS for make in way(trial)]
            tried[key] = None
            if makes:
                with scratch_weights(module):
                    tried[key] = trial.first_equal(makes)
            rotates = arguments[0].kwargs.get("position_embeddings") is not None
            if tried[key] is None and rotates and rotate_of(module) is None:
                tell(type(module).__name__, f"it does not rotate by {ROTATE}", logging.INFO)
        if (make := tried[key]) is not None:
            made[module] = make(module, context)
    return made
