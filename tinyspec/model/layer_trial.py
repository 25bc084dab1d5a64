"""Which decoder layers run by fused kernels: those whose own forward the twins agree with.

A layer's own forward runs with random rows in the place of what its norms, attention and MLP
return: each of them must get what the stand-in gives it, bit for bit. Its norms, and its MLP with
random rows in the place of its linears, run as they are and as their stand-ins, in the model's
dtype and in fp32, and must agree up to rounding. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.errors import named
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
from tinyspec.model.trial import (
    SIZES,
    close,
    described,
    kind_of,
    own_kind,
    probe_rows,
    same_bits,
    tell,
)
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
    """Tries layers, norms and MLPs by themselves and by their stand-ins, those of one kind once.
    like: hidden states that they are called with."""

    def __init__(self) -> None:
        self._context = AttentionContext()
        self._context.kernels = backend.load("torch")
        self._tried: dict[Hashable, Any] = {}

    def offset(self, norm: nn.Module, like: Tensor) -> bool | None:
        """Whether a norm's weights are stored less one; None where it is no norm of the kernel."""

        def run(x: Tensor, offset: bool | None = None) -> list[Tensor]:
            weight = (1 + x[0, SIZES].tanh() / 4).to(x.dtype)
            scratch = nn.Parameter(weight, requires_grad=False)
            made = _with(norm, _parameters={"weight": scratch})
            return [(made if offset is None else fused_norm(made, self._context, offset))(x)]

        return self._first_close(norm, like, run, OFFSETS)

    def activation(self, mlp: nn.Module, like: Tensor) -> str | None:
        """The activation of a gated MLP; None where it is none of the kernel."""

        def run(x: Tensor, activation: str | None = None) -> list[Tensor]:
            products = [_Part(x.roll(turn, 1) / SMALLER) for turn in (4, 8, 12)]
            parts = dict(zip(PRODUCTS, products, strict=True))
            made = _with(mlp, _modules={**parts, "act_fn": mlp.act_fn})
            out = (made if activation is None else fused_mlp(made, self._context, activation))(x)
            return [out, *(call.hidden for part in products for call in part.calls)]

        return self._first_close(mlp, like, run, ACTIVATIONS)

    def is_wired(self, layer: nn.Module, given: ModuleCall) -> bool:
        """Whether a layer gives its parts, and returns, what its stand-in does."""

        def run() -> bool | None:
            x = _rows(given.hidden, given.hidden.dtype)
            a, b, c, d = (x.roll(turn, 1) / SMALLER for turn in (4, 8, 12, 16))
            norm, attention, second, mlp = parts = _Part(a), _Part((b, None)), _Part(c), _Part(d)
            names = NORMS[0], "self_attn", NORMS[1], "mlp"
            args, kwargs, *_ = given.of(x)
            out = _with(layer, _modules=dict(zip(names, parts, strict=True)))(*args, **kwargs)
            others = {name: held for name, held in kwargs.items() if held is not x}
            gets = _gets(norm, x) and _gets(attention, a, **others)
            gets = gets and _gets(second, x + b) and _gets(mlp, c)
            return (gets and len(args) <= 1 and same_bits(out, x + b + d)) or None

        key = own_kind(layer), *map(described, given[:2])
        return bool(self._once(layer, key, run))

    def _first_close(
        self,
        module: nn.Module,
        like: Tensor,
        run: Callable[..., list[Tensor]],
        forms: Iterable[Any],
    ) -> Any:
        """The first form in which ``run`` gives what it gives without one; None if none does."""

        def first() -> Any:
            rows = [_rows(like, dtype) for dtype in dict.fromkeys((like.dtype, torch.float32))]
            own = [x for given in rows for x in run(given)]
            for form in forms:
                found = [x for given in rows for x in run(given, form)]
                if len(found) == len(own) and all(map(close, found, own)):
                    return form
            return None

        return self._once(module, (kind_of(module), described(like)), first)

    def _once(self, module: nn.Module, key: Hashable, find: Callable[[], Any]) -> Any:
        """What ``find`` returned for this kind; None where it raised."""
        if key not in self._tried:
            self._tried[key], kind = None, type(module).__name__
            try:
                self._tried[key] = find()
            except Exception as error:  # of whatever kind
                tell(kind, f"trying fused kernels raised {named(error)}")
            if self._tried[key] is None:
                logger.info("%s keeps its own forward: fused kernels compute something else", kind)
        return self._tried[key]


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
    return len(call.args) <= 1 and same_bits(call.hidden, rows) and ids == expected


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
    trial, made = LayerTrial(), dict[nn.Module, nn.Module]()

    def with_norms(norms: Iterable[nn.Module], like: Tensor) -> bool:
        """Whether all norms have a stand-in, which are made then."""
        offsets = {norm: trial.offset(norm, like) for norm in norms}
        if None in offsets.values():
            return False
        made.update((norm, fused_norm(norm, context, bool(o))) for norm, o in offsets.items())
        return True

    for layer in layers:
        if not _may_have_one(layer, calls[layer]) or not trial.is_wired(layer, calls[layer][0]):
            continue
        like, mlp = calls[layer][0].hidden, layer.get_submodule("mlp")
        activation = trial.activation(mlp, like)
        if activation is not None and with_norms(map(layer.get_submodule, NORMS), like):
            made |= {mlp: fused_mlp(mlp, context, activation), layer: fused_layer(layer)}
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
    if not isinstance(output, Tensor) or not same_bits(output, copy):
        return []
    return [module for module, given in calls.items() for call in given if call.hidden is output]
