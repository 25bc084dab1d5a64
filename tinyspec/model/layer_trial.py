"""Which decoder layers run by fused kernels: those whose own forward the twins agree with.

A layer's own forward runs with random rows in the place of what its norms, attention and MLP
return: each of them must get what the stand-in gives it, bit for bit. Its norms, and its MLP with
random rows in the place of its linears, run as they are and as their stand-ins, in the model's
dtype and in fp32, and must agree up to rounding. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from itertools import accumulate
from typing import Any

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
    fused_layer,
    fused_mlp,
    fused_norm,
    is_norm,
    is_pre_norm,
)
from tinyspec.model.introspection import module_calls
from tinyspec.model.shadow import shell
from tinyspec.model.trial import SIZES, close, described, kind_of, own_kind, probe_rows, same_bits
from tinyspec.model.wrappers import has_hooks, runs_class_forward

logger = logging.getLogger("tinyspec")
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


class LayerTrial:
    """Of modules that are called with hidden states ``like``; those of one kind are tried once."""

    def __init__(self, like: Tensor):
        self._like = like
        self._context = AttentionContext()
        self._context.kernels = backend.load("torch")
        self._tried: dict[Hashable, Any] = {}

    def offset(self, norm: nn.Module) -> bool | None:
        """Whether a norm's weights are stored less one; None where it is no norm of the kernel."""

        def run(dtype: torch.dtype, offset: bool | None = None) -> list[Tensor]:
            weight = 1 + self._rows(torch.float32)[0, SIZES].tanh() / 4
            scratch = nn.Parameter(weight.to(dtype), requires_grad=False)
            made = _with(norm, _parameters={"weight": scratch})
            if offset is not None:
                made = fused_norm(made, self._context, offset)
            return [made(self._rows(dtype))]

        return self._first_close(norm, run, OFFSETS)

    def activation(self, mlp: nn.Module) -> str | None:
        """The activation of a gated MLP; None where it is none of the kernel."""

        def run(dtype: torch.dtype, activation: str | None = None) -> list[Tensor]:
            rows = self._rows(dtype)
            products = [_Part(rows.roll(turn, 1) / SMALLER) for turn in (4, 8, 12)]
            parts = dict(zip(PRODUCTS, products, strict=True))
            made = _with(mlp, _modules={**parts, "act_fn": mlp.act_fn})
            if activation is not None:
                made = fused_mlp(made, self._context, activation)
            return [made(rows), *(call.hidden for part in products for call in part.calls)]

        return self._first_close(mlp, run, ACTIVATIONS)

    def is_wired(self, layer: nn.Module, given: ModuleCall) -> bool:
        """Whether a layer gives its parts, and returns, what its stand-in does."""

        def run() -> bool:
            x = self._rows(self._like.dtype)
            a, b, c, d = (x.roll(turn, 1) / SMALLER for turn in (4, 8, 12, 16))
            norm, attention, second, mlp = parts = _Part(a), _Part((b, None)), _Part(c), _Part(d)
            names = NORMS[0], "self_attn", NORMS[1], "mlp"
            args, kwargs, *_ = given.of(x)
            out = _with(layer, _modules=dict(zip(names, parts, strict=True)))(*args, **kwargs)
            return (
                len(args) <= 1
                and _gets(norm, x, {})
                and _gets(attention, a, {k: v for k, v in kwargs.items() if v is not x})
                and _gets(second, x + b, {})
                and _gets(mlp, c, {})
                and same_bits(out, x + b + d)
            )

        key = own_kind(layer), *map(described, given[:2])
        return bool(self._once(layer, key, lambda: run() or None))

    def norms(
        self, norms: Iterable[nn.Module], context: AttentionContext
    ) -> dict[nn.Module, nn.Module]:
        """The stand-ins of norms that have one."""
        offsets = {norm: self.offset(norm) for norm in norms}
        return {n: fused_norm(n, context, o) for n, o in offsets.items() if o is not None}

    def layer(
        self, layer: nn.Module, given: ModuleCall, context: AttentionContext
    ) -> dict[nn.Module, nn.Module]:
        """The stand-ins of a layer that has one, and of its parts."""
        mlp = layer.get_submodule("mlp")
        if not self.is_wired(layer, given) or (activation := self.activation(mlp)) is None:
            return {}
        norms = self.norms(map(layer.get_submodule, NORMS), context)
        if len(norms) < len(NORMS):
            return {}
        return {**norms, mlp: fused_mlp(mlp, context, activation), layer: fused_layer(layer)}

    def _first_close(
        self, module: nn.Module, run: Callable[..., list[Tensor]], forms: Iterable[Any]
    ) -> Any:
        """The first form in which ``run`` gives what it gives without one; None if none does."""

        def first() -> Any:
            dtypes = dict.fromkeys((self._like.dtype, torch.float32))
            own = [x for dtype in dtypes for x in run(dtype)]
            for form in forms:
                found = [x for dtype in dtypes for x in run(dtype, form)]
                if len(found) == len(own) and all(map(close, found, own)):
                    return form
            return None

        return self._once(module, kind_of(module), first)

    def _once(self, module: nn.Module, key: Hashable, find: Callable[[], Any]) -> Any:
        """What ``find`` returned for this kind; None where it raised."""
        if key not in self._tried:
            self._tried[key] = None
            with suppress(Exception):  # of whatever kind
                self._tried[key] = find()
            if self._tried[key] is None:
                kind = type(module).__name__
                logger.info("%s keeps its own forward: fused kernels compute something else", kind)
        return self._tried[key]

    def _rows(self, dtype: torch.dtype) -> Tensor:
        return probe_rows(tuple(self._like.shape[2:]), dtype, self._like.device)[None]


def _gets(part: _Part, rows: Tensor, others: dict[str, Any]) -> bool:
    """Whether a part was called once, with these rows and these other arguments."""
    (call,) = part.calls
    rest = {name: held for name, held in call.kwargs.items() if held is not call.hidden}
    return len(call.args) <= 1 and same_bits(call.hidden, rows) and _same(rest, others)


def _same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether keyword arguments are the same objects, but for those that stand for nothing."""
    some, others = (
        {k: v for k, v in given.items() if v is not None and v is not False}
        for given in (some, others)
    )
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


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
    trials: dict[Hashable, LayerTrial] = {}
    made: dict[nn.Module, nn.Module] = {}

    def tried(module: nn.Module) -> dict[nn.Module, nn.Module]:
        if not _may_have_one(module, calls[module]):
            return {}
        (given,) = calls[module]
        trial = trials.setdefault(described(given.hidden), LayerTrial(given.hidden))
        if module in norms:
            return trial.norms([module], context)
        return trial.layer(module, given, context)

    for layer in layers:
        made |= tried(layer)
    for layer in filter(made.__contains__, layers):
        following = _following(calls, layer)
        for norm in following:
            if norm in norms and norm not in made:
                made |= tried(norm)
        if len(following) == 1 and not _hooks_between(model, layer, *following):
            (after,) = following
            norm = after if after in norms else after.get_submodule(NORMS[0])
            vars(made[layer])["tinyspec_next"] = made.get(norm)
    return made


def _following(calls: dict[nn.Module, list[ModuleCall]], layer: nn.Module) -> list[nn.Module]:
    """What is called with the very tensor that a layer returned, to which nobody has written."""
    output, copy = calls[layer][0].output, calls[layer][0].copy
    if not isinstance(output, Tensor) or not same_bits(output, copy):
        return []
    return [module for module, given in calls.items() for call in given if call.hidden is output]


def _hooks_between(model: nn.Module, layer: nn.Module, after: nn.Module) -> bool:
    """Whether a hook might change what a layer returns before ``after`` is called with it."""
    names = {module: name for name, module in model.named_modules()}
    paths = (accumulate(names[one].split("."), "{}.{}".format) for one in (layer, after))
    passed = set.symmetric_difference(*map(set, paths))
    return any(map(has_hooks, map(model.get_submodule, passed)))
