"""Which decoder layers run by fused kernels: those whose own forward the twins agree with.

A layer runs as it is and as its stand-in, on random rows and weights of norms, in the model's dtype
and in fp32. Attention and linears are not tried: what reaches each of them is compared, and what
the layer makes of random rows from them. The stand-in may err at most twice as much as the layer
itself does, both against the layer in fp64. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinyspec.kernels import backend
from tinyspec.kernels.launch import MAX_NORM
from tinyspec.kernels.twins.layers import ACTIVATIONS
from tinyspec.model.attention import AttentionContext
from tinyspec.model.attention_calls import ModuleCall
from tinyspec.model.equivalence import (
    SIZES,
    as_close,
    described,
    kind_of,
    own_kind,
    probe_rows,
)
from tinyspec.model.fused_layer import Form, fused_layer, fused_parts
from tinyspec.model.fused_norm import ResidualStream, fused_norm
from tinyspec.model.layer_calls import LayerCall
from tinyspec.model.layer_structure import NORMS, PRODUCTS, is_norm
from tinyspec.model.stand_in import shell
from tinyspec.model.wrappers import has_hooks, runs_class_forward

logger = logging.getLogger("tinyspec")
OFFSETS = (False, True)
FORMS = tuple(Form(offset, activation) for offset, activation in product(OFFSETS, ACTIVATIONS))
# So many times smaller are the rows of attention and linears: the product of two fits fp16.
SMALLER = 64.0
T = TypeVar("T")


class _Widened(TorchFunctionMode):
    """Casts to fp32 become casts to fp64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _casts_of(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """For a forward in ``dtype``: where it is fp64 nothing is rounded to fp32."""
    return _Widened() if dtype == torch.float64 else nullcontext()


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


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
    """The call of a layer or norm, made with random rows by itself and by its stand-in."""

    def __init__(self, call: LayerCall):
        hidden = call.given[0].hidden
        self._module, self._given = call.module, call.given[0]
        self._like: Tensor = hidden
        self._stream = ResidualStream(AttentionContext())
        self._stream.context.kernels = backend.load("torch")

    def first_close(self, run: Callable[..., list[Any]], forms: Iterable[T]) -> T | None:
        """The first form in which ``run`` gives what it gives without one; None if there is none.

        run: ``layer`` or ``norm``.
        """
        dtypes = dict.fromkeys((self._like.dtype, torch.float32))
        try:
            exact = [run(dtype, torch.float64) for dtype in dtypes]
            own = [run(dtype, dtype) for dtype in dtypes]
        except Exception:  # of whatever kind
            return None

        def close(form: T) -> bool:
            try:
                return all(map(_agree, [run(dtype, dtype, form) for dtype in dtypes], own, exact))
            except Exception:  # also of results that cannot be compared
                return False

        return next(filter(close, forms), None)

    def norm(self, drawn: torch.dtype, dtype: torch.dtype, offset: bool | None = None) -> list[Any]:
        """What the norm gives rows of numbers of the dtype ``drawn``, computed in ``dtype``, by
        itself or by the stand-in with weights of this ``offset``."""
        norm = self._scratch_norm(self._module, drawn, dtype)
        if offset is not None:
            norm = fused_norm(norm, self._stream, offset)
        rows = self._rows(drawn)[None].to(dtype)
        with _casts_of(dtype):
            return [norm(rows)]

    def layer(self, drawn: torch.dtype, dtype: torch.dtype, form: Form | None = None) -> list[Any]:
        """As ``norm`` for the layer: what it gives, what each of its parts gets, and the other
        arguments of attention."""
        parts, products = self._parts(drawn, dtype)
        layer = shell(self._module, type(self._module))
        vars(layer)["_modules"] = parts
        if form is not None:
            parts |= fused_parts(layer, self._stream, form)
            layer = fused_layer(layer)
            vars(layer).update(tinyspec_next=parts[NORMS[0]])
        args, kwargs = self._given.of(self._rows(drawn)[None].to(dtype))
        with _casts_of(dtype):
            out = layer(*args, **kwargs)
        (attended,) = parts["self_attn"].calls
        given = {k: v for k, v in attended.kwargs.items() if v is not attended.hidden}
        seen = [call.hidden for part in products for call in part.calls]
        return [out, attended.hidden, *seen, given]

    def _parts(self, drawn: torch.dtype, dtype: torch.dtype) -> tuple[dict[str, Any], list[_Part]]:
        """Parts of a layer that can be run: its norms with random weights, its MLP; attention and
        linears that return random rows. The linears once more."""
        rows = self._rows(drawn)[None] / SMALLER
        own = self._module.get_submodule("mlp")
        products = [_Part(rows.roll(turn, 1).to(dtype)) for turn in (4, 8, 12)]
        mlp = shell(own, type(own))
        vars(mlp)["_modules"] = {**dict(zip(PRODUCTS, products, strict=True)), "act_fn": own.act_fn}
        norms = {
            name: self._scratch_norm(self._module.get_submodule(name), drawn, dtype, turn)
            for turn, name in enumerate(NORMS)
        }
        attention = _Part((rows.flip(2).to(dtype), None))
        return {**norms, "self_attn": attention, "mlp": mlp}, products

    def _rows(self, dtype: torch.dtype) -> Tensor:
        return probe_rows(tuple(self._like.shape[2:]), dtype, self._like.device)

    def _scratch_norm(
        self, norm: nn.Module, drawn: torch.dtype, dtype: torch.dtype, turn: int = 0
    ) -> nn.Module:
        """The norm with random weights around one."""
        weight = 1 + self._rows(torch.float32)[SIZES * turn].tanh() / 4
        made = shell(norm, type(norm))
        scratch = nn.Parameter(weight.to(drawn).to(dtype), requires_grad=False)
        vars(made)["_parameters"] = {"weight": scratch}
        return made


def _agree(found: list[Any], own: list[Any], exact: list[Any]) -> bool:
    """Whether tensors are as close to the exact ones as the layer's own, and all else is the
    same."""
    return len(found) == len(own) and all(
        as_close(x, y, z) if isinstance(y, Tensor) else _same(x, y)
        for x, y, z in zip(found, own, exact, strict=True)
    )


def _same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether keyword arguments are the same objects, but for those that stand for nothing."""
    some, others = (
        {k: v for k, v in given.items() if v is not None and v is not False}
        for given in (some, others)
    )
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


def chosen_forms(calls: Iterable[LayerCall]) -> list[tuple[LayerCall, Any]]:
    """The form of a layer's stand-in or the offset of a norm's, for the calls of those that have
    one. Modules of one kind that are called in the same way are tried once."""
    tried: dict[Hashable, Any] = {}
    found: list[tuple[LayerCall, Any]] = []
    for call in calls:
        module, given = call.module, call.given[0]
        if not _may_have_one(module, given):
            continue
        parts = [part for name, part in module.named_children() if name != "self_attn"]
        key = own_kind(module), *map(kind_of, parts), *map(described, given)
        if key not in tried:
            trial = LayerTrial(call)
            tried[key] = (
                trial.first_close(trial.layer, FORMS)
                if parts
                else trial.first_close(trial.norm, OFFSETS)
            )
            if tried[key] is None:
                kind = type(module).__name__
                logger.info("%s keeps its own forward: fused kernels compute something else", kind)
        if tried[key] is not None:
            found.append((call, tried[key]))
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
