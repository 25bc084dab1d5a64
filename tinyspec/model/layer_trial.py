"""Which decoder layers run by fused kernels: those whose own forward the twins agree with.

A layer's own forward runs with random rows in the place of what its norms, attention and MLP
return: each of them must get what the stand-in gives it, bit for bit. Its norms, and its MLP with
random rows in the place of its linears, run as they are and as their stand-ins, in the model's
dtype and in fp32, and must agree up to rounding. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.kernels import backend
from tinyspec.kernels.launch import MAX_NORM
from tinyspec.kernels.twins.layers import ACTIVATIONS
from tinyspec.model.attention import AttentionContext, ModuleCall
from tinyspec.model.fused_layer import (
    NORMS,
    PRODUCTS,
    FusedLayer,
    fused_mlp,
    fused_norm,
    is_norm,
    is_pre_norm,
)
from tinyspec.model.introspection import module_calls
from tinyspec.model.shadow import shell, standing_in
from tinyspec.model.trial import SIZES, Trials, alike, close, described, probe_rows
from tinyspec.model.wrappers import has_hooks, runs_class_forward

logger = logging.getLogger("tinyspec")
Form = TypeVar("Form")
OFFSETS = (False, True)
# So many times smaller are the rows of attention and linears: the product of two fits fp16.
SMALLER = 64.0


class _Part(nn.Module):
    """In the place of a part: notes its calls, and returns ``result``."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result
        self.calls: list[ModuleCall] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(ModuleCall(args, kwargs))
        return self.result


def _with(module: nn.Module, **tables: Any) -> nn.Module:
    """The module with other children or parameters."""
    made = shell(module, type(module))
    vars(made).update(tables)
    return made


def _context() -> AttentionContext:
    """One by whose kernels stand-ins run on any device."""
    context = AttentionContext()
    context.kernels = backend.load("torch")
    return context


def norm_offset(norm: nn.Module, like: Tensor) -> bool | None:
    """Whether a norm's weights are stored less one; None where it is no norm of the kernel. like:
    hidden states that it is called with."""
    context = _context()

    def run(x: Tensor, offset: bool | None = None) -> list[Tensor]:
        weight = (1 + x[0, SIZES].tanh() / 4).to(x.dtype)
        made = _with(norm, _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
        return [(made if offset is None else fused_norm(made, context, offset))(x)]

    return _first_close(like, run, OFFSETS)


def mlp_activation(mlp: nn.Module, like: Tensor) -> str | None:
    """The activation of a gated MLP; None where it is none of the kernel. like: hidden states that
    it is called with."""
    context = _context()

    def run(x: Tensor, activation: str | None = None) -> list[Tensor]:
        products = [_Part(x.roll(turn, 1) / SMALLER) for turn in (4, 8, 12)]
        parts = dict(zip(PRODUCTS, products, strict=True))
        made = _with(mlp, _modules={**parts, "act_fn": mlp.act_fn})
        out = (made if activation is None else fused_mlp(made, context, activation))(x)
        return [out, *(call.hidden for part in products for call in part.calls)]

    return _first_close(like, run, ACTIVATIONS)


def _first_close(
    like: Tensor, run: Callable[..., list[Tensor]], forms: Iterable[Form]
) -> Form | None:
    """The first form in which ``run`` gives what it gives without one; None if none does."""
    rows = [_rows(like, dtype) for dtype in dict.fromkeys((like.dtype, torch.float32))]
    own = [x for given in rows for x in run(given)]
    for form in forms:
        found = [x for given in rows for x in run(given, form)]
        if len(found) == len(own) and all(map(close, found, own)):
            return form
    return None


def is_wired(layer: nn.Module, given: ModuleCall) -> bool | None:
    """True where a layer gives its parts, and returns, what its stand-in does, else None."""
    x = _rows(given.hidden, given.hidden.dtype)
    a, b, c, d = (x.roll(turn, 1) / SMALLER for turn in (4, 8, 12, 16))
    norm, attention, second, mlp = parts = _Part(a), _Part((b, None)), _Part(c), _Part(d)
    names = NORMS[0], "self_attn", NORMS[1], "mlp"
    args, kwargs, *_ = given.of(x)
    out = _with(layer, _modules=dict(zip(names, parts, strict=True)))(*args, **kwargs)
    others = {name: held for name, held in kwargs.items() if held is not x}
    gets = _gets(norm, x) and _gets(attention, a, **others)
    gets = gets and _gets(second, x + b) and _gets(mlp, c)
    return (gets and len(args) <= 1 and alike(out, x + b + d)) or None


def _rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    return probe_rows(tuple(like.shape[2:]), dtype, like.device)[None]


def _gets(part: _Part, rows: Tensor, **others: Any) -> bool:
    """Whether a part was called once, with these rows and these very other arguments, but for those
    that stand for nothing."""
    (call,) = part.calls
    more = {k: v for k, v in call.kwargs.items() if v is not call.hidden}
    ids, expected = (
        {name: id(held) for name, held in given.items() if held is not None and held is not False}
        for given in (more, others)
    )
    return len(call.args) <= 1 and alike(call.hidden, rows) and ids == expected


def _may_have_one(module: nn.Module, given: list[ModuleCall]) -> bool:
    """Whether a layer or norm is called once, and it and the parts that would not be called run
    their classes' forwards without hooks, on hidden states [1, R, H] of the dtype of the norms."""
    hidden: Any = given[0].hidden if given else None
    parts = [module]
    if module._modules:
        parts += [module.get_submodule(name) for name in (*NORMS, "mlp", "mlp.act_fn")]
    if any(has_hooks(part) or not runs_class_forward(part) for part in parts):
        name = type(module).__name__
        logger.info("%s keeps its own forward: it or a part has hooks or another forward", name)
        return False
    one = isinstance(hidden, Tensor) and hidden.dim() == 3 and len(hidden) == len(given) == 1
    norms: list[Any] = [part.weight for part in parts if is_norm(part)]
    return one and all(n.dtype == hidden.dtype and len(n) <= MAX_NORM for n in norms)


def layer_stand_ins(
    model: PreTrainedModel, context: AttentionContext, last: int
) -> dict[nn.Module, nn.Module]:
    """Those of layers, of their norms and MLPs, and of the norms behind them, as they are called in
    a forward of rows at positions from 0 to ``last``."""
    layers = [module for module in model.modules() if is_pre_norm(module)]
    if not layers:
        return {}
    inside = {part for layer in layers for part in layer.modules()}
    norms = [module for module in model.modules() if module not in inside and is_norm(module)]
    calls = module_calls(model, [*layers, *norms], last)
    trials, made, kept = Trials(), dict[nn.Module, nn.Module](), set[type]()

    def tried(module: nn.Module, find: Callable[..., Form], given: Any) -> Form | None:
        """What ``find`` finds of a module and what it is called with."""
        found = trials.of(module, partial(find, module, given), described(given))
        if found is None and type(module) not in kept:
            kept.add(type(module))
            name = type(module).__name__
            logger.info("%s keeps its own forward: fused kernels compute something else", name)
        return found

    def with_norms(norms: Iterable[nn.Module], like: Tensor) -> bool:
        """Whether all norms have a stand-in, which are made then."""
        offsets = {norm: tried(norm, norm_offset, like) for norm in norms}
        if None in offsets.values():
            return False
        made.update((norm, fused_norm(norm, context, bool(o))) for norm, o in offsets.items())
        return True

    for layer in layers:
        if not _may_have_one(layer, calls[layer]):
            continue
        call, mlp = calls[layer][0], layer.get_submodule("mlp")
        if not tried(layer, is_wired, call):
            continue
        like = call.hidden
        activation = tried(mlp, mlp_activation, like)
        if activation is not None and with_norms(map(layer.get_submodule, NORMS), like):
            made |= {
                mlp: fused_mlp(mlp, context, activation),
                layer: standing_in(layer, FusedLayer, tinyspec_next=None),
            }
    for layer in filter(made.__contains__, layers):
        following = _following(calls, layer)
        for norm in following:
            if norm in norms and _may_have_one(norm, calls[norm]):
                with_norms([norm], calls[norm][0].hidden)
        if len(following) == 1 and not any(map(has_hooks, model.modules())):
            (after,) = following
            norm = after if after in norms else after.get_submodule(NORMS[0])
            # A hook might change what the layer returns before that.
            vars(made[layer])["tinyspec_next"] = made.get(norm)
    return made


def _following(calls: dict[nn.Module, list[ModuleCall]], layer: nn.Module) -> list[nn.Module]:
    """What is called with the very tensor that a layer returned, to which nobody has written."""
    output, copy = calls[layer][0].output, calls[layer][0].copy
    if not isinstance(output, Tensor) or not alike(output, copy):
        return []
    return [module for module, given in calls.items() for call in given if call.hidden is output]
