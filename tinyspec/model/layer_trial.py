"""Which decoder layers run by fused kernels: those whose own forward the twins agree with.

A layer runs as it is and as its stand-in, on random rows and weights of norms, in the model's dtype
and in fp32. Attention and linears are not tried: what reaches each of them is compared, and what
the layer makes of random rows from them, up to rounding. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, suppress
from itertools import accumulate, product
from typing import Any, NamedTuple, TypeVar

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
    Form,
    FusedLayer,
    FusedNorm,
    fused_layer,
    fused_norm,
    fused_parts,
    is_norm,
    is_pre_norm,
)
from tinyspec.model.introspection import module_calls
from tinyspec.model.shadow import shell
from tinyspec.model.trial import SIZES, close, described, kind_of, own_kind, probe_rows, same_bits
from tinyspec.model.wrappers import has_hooks, runs_class_forward

logger = logging.getLogger("tinyspec")
OFFSETS = (False, True)
FORMS = tuple(Form(offset, activation) for offset, activation in product(OFFSETS, ACTIVATIONS))
# So many times smaller are the rows of attention and linears: the product of two fits fp16.
SMALLER = 64.0
T = TypeVar("T")


class _Part(nn.Module):
    """In the place of a part: notes its calls, and returns ``result``."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result
        self.calls: list[ModuleCall] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(ModuleCall(args, kwargs))
        return self.result


class LayerTrial:
    """A layer's or norm's call ``given``, made with random rows by itself and by its stand-in."""

    def __init__(self, module: nn.Module, given: ModuleCall):
        self._module, self._given = module, given
        self._like: Tensor = given.hidden
        self._context = AttentionContext()
        self._context.kernels = backend.load("torch")

    def first_close(self, run: Callable[..., list[Any]], forms: Iterable[T]) -> T | None:
        """The first form in which ``run`` (``layer`` or ``norm``) gives what it gives without one;
        None if there is none."""
        dtypes = dict.fromkeys((self._like.dtype, torch.float32))
        try:
            own = [run(dtype) for dtype in dtypes]
        except Exception:  # of whatever kind
            return None
        for form in forms:
            with suppress(Exception):  # also of results that cannot be compared
                if all(map(_agree, [run(dtype, form) for dtype in dtypes], own)):
                    return form
        return None

    def norm(self, dtype: torch.dtype, offset: bool | None = None) -> list[Any]:
        """What the norm gives random rows, by itself or by the stand-in with weights of this
        ``offset``."""
        norm = self._scratch_norm(self._module, dtype)
        if offset is not None:
            norm = fused_norm(norm, self._context, offset)
        return [norm(self._rows(dtype)[None])]

    def layer(self, dtype: torch.dtype, form: Form | None = None) -> list[Any]:
        """As ``norm`` for the layer: what it gives, what each of its parts gets, and the other
        arguments of attention."""
        parts, products = self._parts(dtype)
        layer = shell(self._module, type(self._module))
        vars(layer)["_modules"] = parts
        if form is not None:
            parts |= fused_parts(layer, self._context, form)
            layer = fused_layer(layer)
            vars(layer)["tinyspec_next"] = parts[NORMS[0]]
        args, kwargs = self._given.of(self._rows(dtype)[None])
        out = layer(*args, **kwargs)
        (attended,) = parts["self_attn"].calls
        given = {k: v for k, v in attended.kwargs.items() if v is not attended.hidden}
        seen = [call.hidden for part in products for call in part.calls]
        return [out, attended.hidden, *seen, given]

    def _parts(self, dtype: torch.dtype) -> tuple[dict[str, Any], list[_Part]]:
        """Parts of a layer that can be run: its norms with random weights, its MLP; attention and
        linears that return random rows. The linears once more."""
        rows = self._rows(dtype)[None] / SMALLER
        own = self._module.get_submodule("mlp")
        products = [_Part(rows.roll(turn, 1)) for turn in (4, 8, 12)]
        mlp = shell(own, type(own))
        vars(mlp)["_modules"] = {**dict(zip(PRODUCTS, products, strict=True)), "act_fn": own.act_fn}
        norms = {
            name: self._scratch_norm(self._module.get_submodule(name), dtype, turn)
            for turn, name in enumerate(NORMS)
        }
        return {**norms, "self_attn": _Part((rows.flip(2), None)), "mlp": mlp}, products

    def _rows(self, dtype: torch.dtype) -> Tensor:
        return probe_rows(tuple(self._like.shape[2:]), dtype, self._like.device)

    def _scratch_norm(self, norm: nn.Module, dtype: torch.dtype, turn: int = 0) -> nn.Module:
        """The norm with random weights around one."""
        weight = 1 + self._rows(torch.float32)[SIZES * turn].tanh() / 4
        made = shell(norm, type(norm))
        scratch = nn.Parameter(weight.to(dtype), requires_grad=False)
        vars(made)["_parameters"] = {"weight": scratch}
        return made


def _agree(found: list[Any], own: list[Any]) -> bool:
    """Whether tensors are equal up to rounding, and all else is the same."""
    return len(found) == len(own) and all(
        close(x, y) if isinstance(y, Tensor) else _same(x, y)
        for x, y in zip(found, own, strict=True)
    )


def _same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether keyword arguments are the same objects, but for those that stand for nothing."""
    some, others = (
        {k: v for k, v in given.items() if v is not None and v is not False}
        for given in (some, others)
    )
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


def _forms(calls: dict[nn.Module, list[ModuleCall]]) -> dict[nn.Module, Any]:
    """Of those that have a stand-in: the form of a layer's, or the offset of a norm's. Modules of
    one kind that are called in the same way are tried once."""
    tried: dict[Hashable, Any] = {}
    found: dict[nn.Module, Any] = {}
    for module, given in calls.items():
        if len(given) != 1 or not _may_have_one(module, given[0]):
            continue
        parts = [part for name, part in module.named_children() if name != "self_attn"]
        key = own_kind(module), *map(kind_of, parts), *map(described, given[0])
        if key not in tried:
            trial = LayerTrial(module, given[0])
            run, forms = (trial.layer, FORMS) if parts else (trial.norm, OFFSETS)
            tried[key] = trial.first_close(run, forms)
            if tried[key] is None:
                kind = type(module).__name__
                logger.info("%s keeps its own forward: fused kernels compute something else", kind)
        if tried[key] is not None:
            found[module] = tried[key]
    return found


def _may_have_one(module: nn.Module, given: ModuleCall) -> bool:
    """Whether a layer or norm and the parts that would not be called run their classes' forwards
    without hooks, on hidden states [1, R, H] of the dtype of the norms' weights."""
    hidden, parts = given.hidden, [module]
    if module._modules:
        parts += [module.get_submodule(name) for name in (*NORMS, "mlp", "mlp.act_fn")]
    if any(has_hooks(part) or not runs_class_forward(part) for part in parts):
        name = type(module).__name__
        logger.info("%s keeps its own forward: it or a part has hooks or another forward", name)
        return False
    one = isinstance(hidden, Tensor) and hidden.dim() == 3 and len(hidden) == 1
    norms: list[Any] = [part.weight for part in parts if is_norm(part)]
    return one and all(n.dtype == hidden.dtype and len(n) <= MAX_NORM for n in norms)


class Layers(NamedTuple):
    """forms: of each layer, and of each norm behind one, that has a stand-in: a layer's form, or a
    norm's offset. following: what is called with each layer's result as it was returned."""

    forms: dict[nn.Module, Any]
    following: dict[nn.Module, nn.Module]


def layer_forms(model: PreTrainedModel, last: int) -> Layers:
    """As layers and norms are called in a forward of rows at positions from 0 to ``last``."""
    layers = [module for module in model.modules() if is_pre_norm(module)]
    if not layers:
        return Layers({}, {})
    inside = {part for layer in layers for part in layer.modules()}
    norms = [module for module in model.modules() if module not in inside and is_norm(module)]
    calls, following = _recorded(model, layers, norms, last)
    forms = _forms({layer: calls[layer] for layer in layers})
    behind = {norm for layer in forms for norm in following[layer]} & set(norms)
    forms |= _forms({norm: calls[norm] for norm in norms if norm in behind})
    return Layers(forms, {layer: found[0] for layer, found in following.items() if len(found) == 1})


def _recorded(
    model: PreTrainedModel, layers: list[nn.Module], norms: list[nn.Module], last: int
) -> tuple[dict[nn.Module, list[ModuleCall]], dict[nn.Module, list[nn.Module]]]:
    """The calls of layers and norms in a forward, and what was called with the very tensor that
    each layer returned, to which nobody had written."""
    made: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    following: dict[nn.Module, list[nn.Module]] = {layer: [] for layer in layers}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = ModuleCall(args, kwargs).hidden
        for layer, (output, copy) in made.items():
            if output is hidden and same_bits(output, copy):
                following[layer].append(module)

    def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            made[module] = output, output.clone()

    called = [*layers, *norms]
    with ExitStack() as hooks:
        for module in called:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(after))
        return module_calls(model, called, last), following


def link(
    model: nn.Module, names: dict[int, str], layer: FusedLayer, after: FusedLayer | FusedNorm
) -> None:
    """Let a layer compute the norm of what is called with its result, unless a hook might change
    that before. names: of the model's modules, by their ids."""
    paths = (accumulate(names[id(one)].split("."), "{}.{}".format) for one in (layer, after))
    passed = [layer, *map(model.get_submodule, set.symmetric_difference(*map(set, paths)))]
    if not any(map(has_hooks, passed)):
        norm = after if isinstance(after, FusedNorm) else after.input_layernorm
        vars(layer)["tinyspec_next"] = norm
