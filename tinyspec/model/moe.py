"""Experts of a patched model: by the linear kernel in canonical passes, else as the user has them.

How many rows an expert gets depends on what the rows hold, so no probe of shapes can prove that its
matmuls are harmless. The linear kernel's rows depend on nothing but themselves, however many there
are; everything else here has a shape that depends on the bucket alone. So a row keeps its bits.

Served are modules that call transformers' experts interface (``use_experts_implementation``) and
hold plain weights [E, out, in], or [E, in, out] where they say so. Others are left as they are, and
``routing_probe`` finds them. Knows neither routers nor which bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinyspec.model.attention import AttentionContext
from tinyspec.model.linears import KERNEL_DTYPES, LinearFunction
from tinyspec.model.quantized import is_packed

# The name under which transformers knows ``experts_function``, and where modules keep their place.
IMPLEMENTATION = "tinyspec"
PLACE = "tinyspec_experts"
# Not by the config's property, which would write to configs inside of it as well.
CHOICE = "_experts_implementation_internal"


class Place:
    """What ``experts_function`` has to know of a module: the pass that is running, and which
    implementation its user had. slots: experts a row, as it was last called."""

    def __init__(self, context: AttentionContext, implementation: str | None, always: bool):
        self.context = context
        self.implementation = implementation
        self.always = always
        self.slots = 0

    @property
    def kernel_stand_ins(self) -> bool:
        """Whether the linear kernel is to serve the pass that is running."""
        segments = self.context.segments
        return segments is not None and (self.always or segments.exact)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model is not patched: its experts run as its user had them."""
        return Place, (AttentionContext(), self.implementation, False)


def experts_function(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts module's forward: hidden_states [R, H], top_k_* [R, k] -> [R, H]."""
    place: Place | None = vars(module).get(PLACE)
    if place is not None and place.kernel_stand_ins:
        kernels = place.context.kernels
        assert kernels is not None
        place.slots = top_k_index.shape[1]
        return kernel_stand_ins(module, hidden_states, top_k_index, top_k_weights, kernels.linear)
    name = (place.implementation if place is not None else None) or "eager"
    forward = ALL_EXPERTS_FUNCTIONS.get_interface(name, type(module).forward.__wrapped__)
    return forward(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)


def kernel_stand_ins(
    module: Any, hidden_states: Tensor, index: Tensor, weights: Tensor, linear: LinearFunction
) -> Tensor:
    """hidden_states [R, H], index and weights [R, k] -> [R, H]: every row by itself.

    Pairs of a row and an expert lie row by row, [R * k, ...], in every step but the matmuls. A
    row's experts are added up in fp32 in the order of their numbers, one after the other, so not
    even the order in which the router names them matters.
    """
    rows, slots = index.shape
    index, order = index.sort(dim=1, stable=True)
    weights = weights.gather(1, order)
    chosen = index.flatten()
    counts = torch.bincount(chosen).tolist()
    groups = chosen.argsort(stable=True).split(counts)
    pairs = [(expert, group) for expert, group in enumerate(groups) if len(group)]

    name = "gate_up_proj" if module.has_gate else "up_proj"
    found = _project(module, name, hidden_states, [(e, p, p // slots) for e, p in pairs], linear)
    found = activate(module, found)
    found = _project(module, "down_proj", found, [(e, p, p) for e, p in pairs], linear)
    if module.has_post_expert_norm:
        found = module.post_expert_norm(found)
    found = (found * weights.reshape(-1, 1)).view(rows, slots, -1)
    total = found[:, 0].float()
    for slot in range(1, slots):
        total = total + found[:, slot]
    return total.to(hidden_states.dtype)


def activate(module: Any, up: Tensor) -> Tensor:
    """What stands between the two matmuls: up [pairs, I or 2 I] -> [pairs, I]."""
    return module._apply_gate(up) if module.has_gate else module.act_fn(up)


def _project(
    module: Any,
    name: str,
    x: Tensor,
    hits: list[tuple[int, Tensor, Tensor]],
    linear: LinearFunction,
) -> Tensor:
    """The matmuls ``name``; hits: an expert, the pairs that go to it, which rows of x they are."""
    weight: Tensor = getattr(module, name)
    bias: Any = getattr(module, f"{name}_bias", None)
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    x = x.to(weight.dtype)
    out = x.new_empty(sum(len(pairs) for _, pairs, _ in hits), weight.shape[1])
    for expert, pairs, rows in hits:
        own = bias[expert] if module.has_bias else None
        out[pairs] = linear(x[rows], weight[expert], own)
    return out


@cache
def _interface(forward: Callable[..., Any]) -> object:
    """The interface that a forward, of a class, asks for its implementation; None if none."""
    if not isfunction(forward) or not hasattr(forward, "__wrapped__"):
        return None
    return getclosurevars(forward).nonlocals.get("experts_interface")


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of all experts that ask an interface, this one or another."""
    for name, module in model.named_modules():
        if _interface(type(module).forward) is not None and CHOICE in vars(_config(module)):
            yield name, module


def _config(module: Any) -> Any:
    return vars(module).get("config") or nn.Identity()


def _servable(module: Any) -> bool:
    """Whether the kernel can take the place of any implementation of the module."""
    if _interface(type(module).forward) is not ALL_EXPERTS_FUNCTIONS or "forward" in vars(module):
        return False
    if module._is_expert_parallel:
        return False
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights: list[Any] = [getattr(module, name, None) for name in names]
    biases: list[Any] = [getattr(module, f"{name}_bias", None) for name in names if module.has_bias]
    kinds = {getattr(tensor, "dtype", None) for tensor in (*weights, *biases)}
    return (
        len(kinds) == 1
        and kinds <= set(KERNEL_DTYPES)
        and not any(is_packed(tensor) for tensor in (*weights, *biases))
        and all(weight.dim() == 3 for weight in weights)
        and all(bias.dim() == 2 for bias in biases)
    )


def served(model: nn.Module) -> dict[str, Any]:
    """Name -> module of the experts that the linear kernel serves in canonical passes."""
    return {
        name: module
        for name, module in _named(model)
        if PLACE in vars(module) and getattr(_config(module), CHOICE) == IMPLEMENTATION
    }


def ways(model: nn.Module) -> list[tuple[object, ...]]:
    """How experts run: changes when an implementation is chosen, by whomever."""
    return [
        (name, getattr(_config(module), CHOICE), place and place.implementation)
        for name, module in _named(model)
        for place in [vars(module).get(PLACE)]
    ]


def by_kernel_alone(module: Any) -> bool:
    """Whether experts that are served run by the linear kernel in all passes."""
    return vars(module)[PLACE].always


def row_functions(
    experts: dict[str, Any],
) -> list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]]:
    """What ``experts``, once called, do to rows beside the matmuls, one of every kind: name,
    function of [1, R, *shape], shape, dtype."""
    found: dict[object, tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {}
    for name, module in experts.items():
        slots, down = vars(module)[PLACE].slots, module.down_proj
        if not slots:  # in a part of the model that does not run
            continue
        wide = module.gate_up_proj if module.has_gate else module.up_proj
        last = 2 if module.is_transposed else 1
        parts: list[tuple[str, Callable[..., Tensor], int]] = [
            ("between", partial(activate, module), wide.shape[last])
        ]
        if module.has_post_expert_norm:
            parts.append(("behind", module.post_expert_norm, down.shape[last]))
        for part, fn, width in parts:
            key = (type(module), part, slots, width, wide.dtype)
            entry = (name, partial(_of_pairs, fn, slots, width), (slots, width), wide.dtype)
            found.setdefault(key, entry)
    return list(found.values())


def _of_pairs(fn: Callable[[Tensor], Tensor], slots: int, width: int, x: Tensor) -> Tensor:
    """``fn``, of pairs, as a function of rows: x [1, R, slots, width] -> [1, R, slots * any]."""
    return fn(x.reshape(-1, width)).view(1, x.shape[1], -1)


class Experts:
    """The experts of one model: put in and taken out."""

    def __init__(self, model: nn.Module, context: AttentionContext):
        self._model = model
        self._context = context
        self._linear = "auto"
        self._configs: list[tuple[Any, str | None]] = []
        self._modules: list[Any] = []

    def serve(self, linear: str) -> None:
        """linear: as in ``EngineConfig``: "always" serves all passes, "never" none."""
        self.take_out()
        self._linear = linear
        self.put_in()

    def put_in(self) -> None:
        """Serve all experts that can be; those of one config together or not at all."""
        if self._linear == "never":
            return
        modules = [module for _, module in _named(self._model)]
        configs = {id(config): config for config in map(_config, modules)}
        for config in configs.values():
            own = [module for module in modules if _config(module) is config]
            if not all(map(_servable, own)):
                continue
            before = getattr(config, CHOICE)
            if before == IMPLEMENTATION:  # a copy of a patched model
                places = [vars(m)[PLACE] for m in own if PLACE in vars(m)]
                before = places[0].implementation if places else None
            self._configs.append((config, before))
            self._modules += own
            setattr(config, CHOICE, IMPLEMENTATION)
            for module in own:
                always = self._linear == "always"
                vars(module)[PLACE] = Place(self._context, before, always)

    def take_out(self) -> None:
        """Give every config and every module back what it had."""
        for config, before in self._configs:
            setattr(config, CHOICE, before)
        for module in self._modules:
            vars(module).pop(PLACE, None)
        self._configs, self._modules = [], []
