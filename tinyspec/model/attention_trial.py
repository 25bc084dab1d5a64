"""Which stand-in an attention module gets: the first that gives the bits of the module itself.

Every distinct module is run as it is and as its stand-ins, on the model's device, with the same
random rows and weights and with the arguments that the model calls it with; the KV write is the
twin. Compared is what reaches attention, and what the module makes of attention's output. A module
without an equal stand-in is served through transformers' attention interface. Knows no model by
name; what 64 rows do not show, ``AttentionContext`` checks in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model.attention import AttentionContext, PagedAttention
from tinyspec.model.attention_calls import AttentionCall, Layer, ModuleCall, Reach
from tinyspec.model.equivalence import (
    ROWS,
    described,
    kind_of,
    probe_rows,
    same_bits,
)
from tinyspec.model.fused_rope import FORMS, DeferredRope, Rope, deferred, rewired, rotate_of
from tinyspec.model.scratch_weights import with_scratch_weights
from tinyspec.model.wrappers import own_forward, runs_class_forward

Make = Callable[[nn.Module, AttentionContext], nn.Module]


class Trial:
    """One call of an attention module, made by its stand-ins with random rows."""

    def __init__(self, call: AttentionCall, given: ModuleCall):
        hidden = given.hidden
        self.call = call
        self.rows = probe_rows(tuple(hidden.shape[2:]), hidden.dtype, hidden.device)[None]
        self.given = given.of(self.rows)
        self.context = AttentionContext()
        self.context.kernels = replace(backend.load("torch"), paged_attention=self._attend)
        self._reached: tuple[Any, ...] = ()

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
        context.k, context.v = [like.new_zeros(cache)], [like.new_zeros(cache)]
        context.layers = [Layer("", module, Reach())]
        args, kwargs = self.given
        kwargs = {k: dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
        tables = [vars(module), *(x for x in kwargs.values() if isinstance(x, dict))]
        before = _contents(tables)
        rows = torch.arange(ROWS, device=like.device)
        metadata = AttentionMetadata.of([(0, ROWS)], [[0]], ROWS, like.device)
        context.begin(metadata, rows, rows)
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
        except Exception:  # of whatever kind
            return None
        rope = vars(stand_in).get("tinyspec_rope")
        unused = isinstance(rope, DeferredRope) and not rope.left
        return None if unused else found

    def first_equal(self, makes: list[Make]) -> Make | None:
        """The first stand-in with the bits of the module itself."""
        expected = self.attempt(_itself)
        equal = (make for make in makes if _same(self.attempt(make), expected))
        return None if expected is None else next(equal, None)


def _contents(tables: list[dict[str, Any]]) -> list[list[tuple[str, int]]]:
    return [[(name, id(value)) for name, value in table.items()] for table in tables]


def _itself(module: nn.Module, context: AttentionContext) -> nn.Module:
    own = rewired(module, context, rotate_of(module))
    # One that reads its number here, without a cache, may do something else in other layers.
    vars(own).pop("layer_idx", None)
    return own


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
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
    return [partial(PagedAttention, scale=call.scale, softcap=call.shape.softcap)]


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
    calls: list[AttentionCall],
    given: dict[int, list[ModuleCall]],
    context: AttentionContext,
    ways: tuple[Way, ...],
) -> dict[int, nn.Module]:
    """The stand-ins of modules that have one, by the module's id.

    calls: of attention, in a forward; given: those of the modules that make them. Modules of one
    kind that are called in the same way are tried once; one that is called twice has no stand-in.
    """
    tried: dict[Hashable, Make | None] = {}
    made: dict[int, nn.Module] = {}
    for call in calls:
        module, arguments = call.module, given[id(call.module)]
        if len(arguments) != 1 or not _may_have_one(module, arguments[0]):
            continue
        key = (kind_of(module), *map(described, arguments[0]), call.shape, call.scale, call.reach)
        if key not in tried:
            trial = Trial(call, arguments[0])
            makes = [make for way in ways for make in way(trial)]
            tried[key] = None
            if makes:
                tried[key] = with_scratch_weights(module, partial(trial.first_equal, makes))
        if (make := tried[key]) is not None:
            made[id(module)] = make(module, context)
    return made


def _may_have_one(module: nn.Module, given: ModuleCall) -> bool:
    """Whether a module runs its class's forward, a plain function, on hidden states."""
    return runs_class_forward(module) and isinstance(given.hidden, Tensor)
