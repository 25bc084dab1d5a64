"""Mixture-of-experts layers: by the linear kernel in canonical passes, else as the user chose.

How many rows an expert gets depends on the values of the rows, so no probe of shapes can prove its
matmuls. Rows of the linear kernel do not depend on how many there are, and all other shapes here
depend on the bucket alone: a row keeps its bits.

Served are modules that call transformers' experts interface (``use_experts_implementation``) with
unpacked weights [E, out, in], or [E, in, out] where they say so. Others stay as they are, and
``probes/routing`` finds them. Knows neither routers nor which bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.errors import unsupported
from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import product
from tinyspec.model.linears import KERNEL_DTYPES, LinearFunction
from tinyspec.model.quantized import is_packed
from tinyspec.model.supported import EXPERTS_CHOICE, private_name
from tinyspec.model.torch_state import NO_AUTOCAST, Autocast

ALL_EXPERTS_FUNCTIONS: Any = private_name("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS")
# What transformers calls ``experts_function``, and where a module keeps its ``ExpertsState``.
IMPLEMENTATION = "tinyspec"
STATE = "tinyspec_experts"
# What transformers' decorator sets on a module; newer ones also whether there is a norm behind it.
DECORATED = ("has_gate", "has_bias", "is_transposed")
NORM = "post_expert_norm"
# An implementation whose operator autocast does not know: it runs in the dtype of the weights.
UNCAST = "grouped_mm"
RowFunction = tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]


@dataclass
class ExpertsState:
    """What ``experts_function`` needs to know of a module.

    context: of the pass that runs. implementation: the user's. always: by the kernel in all passes.
    slots: experts per row in the last call.
    """

    context: AttentionContext
    implementation: str | None
    always: bool
    slots: int = 0

    @property
    def autocast(self) -> Autocast:
        """Of the matmuls, as the user's implementation has it."""
        return NO_AUTOCAST if self.implementation == UNCAST else self.context.autocast

    @property
    def use_kernel(self) -> bool:
        """Whether the linear kernel serves the pass that runs."""
        metadata = self.context.metadata
        return metadata is not None and (self.always or metadata.exact)


def experts_function(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts module's forward: hidden_states [R, H], top_k_* [R, k] -> [R, H]."""
    state: ExpertsState | None = vars(module).get(STATE)
    if state is not None and state.use_kernel:
        state.slots, linear = top_k_index.shape[1], state.context.kernels.linear
        with state.context.autocast.off():
            return kernel_forward(module, hidden_states, top_k_index, top_k_weights, linear)
    name = (state.implementation if state is not None else None) or "eager"
    forward = ALL_EXPERTS_FUNCTIONS.get_interface(name, type(module).forward.__wrapped__)
    return forward(module, hidden_states, top_k_index, top_k_weights)


if ALL_EXPERTS_FUNCTIONS is not None:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)


def kernel_forward(
    module: Any, hidden_states: Tensor, index: Tensor, weights: Tensor, linear: LinearFunction
) -> Tensor:
    """hidden_states [R, H], index and weights [R, k] -> [R, H] by the linear kernel.

    Everything but the matmuls runs on pairs of a row and an expert, [R * k, ...], sorted by row. A
    row's experts are added in fp32 in ascending order of their numbers: the order in which the
    router names them does not matter.
    """
    rows, slots = index.shape
    index, order = index.sort(dim=1, stable=True)
    weights = weights.gather(1, order)
    chosen = index.flatten()
    counts = torch.bincount(chosen).tolist()
    pairs = chosen.argsort(stable=True)
    place = pairs.argsort()

    name = "gate_up_proj" if module.has_gate else "up_proj"
    out = _project(module, name, hidden_states.index_select(0, pairs // slots), counts, linear)
    out = activate(module, out.index_select(0, place))
    out = _project(module, "down_proj", out.index_select(0, pairs), counts, linear)
    out = out.index_select(0, place)
    if _has_norm(module):
        out = module.post_expert_norm(out)
    out = (out * weights.reshape(-1, 1)).view(rows, slots, -1)
    total = out[:, 0].float()
    for slot in range(1, slots):
        total = total + out[:, slot]
    return total.to(hidden_states.dtype)


def _has_norm(module: Any) -> bool:
    return getattr(module, f"has_{NORM}", False)


def activate(module: Any, up: Tensor) -> Tensor:
    """The activation between the two matmuls: up [pairs, I or 2 I] -> [pairs, I]."""
    return module._apply_gate(up) if module.has_gate else module.act_fn(up)


def _project(
    module: Any, name: str, x: Tensor, counts: list[int], linear: LinearFunction
) -> Tensor:
    """The matmuls ``name`` of x [pairs, in], so many rows for each of the first experts."""
    weight: Tensor = getattr(module, name)
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    autocast: Autocast = getattr(vars(module).get(STATE), "autocast", NO_AUTOCAST)
    weights, parts = weight.unbind(), x.to(autocast.dtype or weight.dtype).split(counts)
    biases = getattr(module, f"{name}_bias").unbind() if module.has_bias else [None] * len(weights)
    return torch.cat(
        [
            product(lambda x, w=each, b=bias: linear(x, *autocast.cast(w, b)), part, each, bias)  # type: ignore[misc]
            for part, each, bias in zip(parts, weights, biases, strict=False)
            if len(part)
        ]
    )


@cache
def _interface(forward: Callable[..., Any]) -> object:
    """The experts interface that a class's forward asks for an implementation; None if none."""
    if not isfunction(forward) or not hasattr(forward, "__wrapped__"):
        return None
    enclosed = getclosurevars(forward).nonlocals.values()
    return next((x for x in enclosed if isinstance(x, type(ALL_EXPERTS_FUNCTIONS))), None)


def _experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of all experts that ask transformers' interface or another one."""
    for name, module in model.named_modules():
        if _interface(type(module).forward) is not None and EXPERTS_CHOICE in vars(_config(module)):
            yield name, module


def _config(module: Any) -> Any:
    return vars(module).get("config") or nn.Identity()


def _servable(module: Any) -> bool:
    """Whether the kernel can replace every implementation of the module."""
    if _interface(type(module).forward) is not ALL_EXPERTS_FUNCTIONS or "forward" in vars(module):
        return False
    missing = [name for name in DECORATED if not hasattr(module, name)]
    if missing:
        raise unsupported(module, f"transformers did not set {', '.join(missing)} on the experts")
    # A part that is not known here would be left out.
    known = {"act_fn", NORM} if _has_norm(module) else {"act_fn"}
    if getattr(module, "_is_expert_parallel", False) or not module._modules.keys() <= known:
        return False
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights: list[Any] = [getattr(module, name, None) for name in names]
    biases: list[Any] = [getattr(module, f"{name}_bias", None) for name in names if module.has_bias]
    dtypes = {getattr(tensor, "dtype", None) for tensor in (*weights, *biases)}
    return (
        len(dtypes) == 1
        and dtypes <= set(KERNEL_DTYPES)
        and not any(is_packed(tensor) for tensor in (*weights, *biases))
        and all(weight.dim() == 3 for weight in weights)
        and all(bias.dim() == 2 for bias in biases)
    )


def kernel_experts(model: nn.Module) -> dict[str, Any]:
    """Name -> module of the experts that the linear kernel serves in canonical passes."""
    return {
        name: module
        for name, module in _experts(model)
        if STATE in vars(module) and getattr(_config(module), EXPERTS_CHOICE) == IMPLEMENTATION
    }


def kernel_in_all_passes(module: Any) -> bool:
    """Whether the linear kernel serves these ``kernel_experts`` in plain passes too."""
    return vars(module)[STATE].always


def implementations(model: nn.Module) -> list[tuple[object, ...]]:
    """How all experts run: changes when anyone chooses another implementation."""
    return [
        (name, getattr(_config(module), EXPERTS_CHOICE), state and state.implementation)
        for name, module in _experts(model)
        for state in [vars(module).get(STATE)]
    ]


def row_functions(experts: dict[str, Any]) -> list[RowFunction]:
    """What ``experts``, once called, do to rows beside the matmuls, one of each kind: name,
    function of [1, R, *shape], shape, dtype."""
    found: dict[object, RowFunction] = {}
    for name, module in experts.items():
        slots, down = vars(module)[STATE].slots, module.down_proj
        if not slots:  # in a part of the model that does not run
            continue
        up = module.gate_up_proj if module.has_gate else module.up_proj
        dtype = vars(module)[STATE].autocast.dtype or up.dtype
        out_axis = 2 if module.is_transposed else 1
        steps: list[tuple[str, Callable[..., Tensor], int]] = [
            ("activation", partial(activate, module), up.shape[out_axis])
        ]
        if _has_norm(module):
            steps.append(("norm", module.post_expert_norm, down.shape[out_axis]))
        for step, fn, width in steps:
            key = (type(module), step, slots, width, dtype)
            entry = (name, partial(_of_pairs, fn, slots, width), (slots, width), dtype)
            found.setdefault(key, entry)
    return list(found.values())


def _of_pairs(fn: Callable[[Tensor], Tensor], slots: int, width: int, x: Tensor) -> Tensor:
    """``fn``, of pairs, as a function of rows: x [1, R, slots, width] -> [1, R, slots * any]."""
    return fn(x.reshape(-1, width)).view(1, x.shape[1], -1)


def serve_experts(model: nn.Module, context: AttentionContext, linear: str) -> None:
    """Let the linear kernel serve the experts of each config of which it can serve all.

    linear: as in ``EngineConfig``: "always" serves all passes, "never" none. Raises
    UnsupportedModelError where transformers' decorator sets other attributes.
    """
    if linear == "never":
        return
    modules = [module for _, module in _experts(model)]
    for config in {id(config): config for config in map(_config, modules)}.values():
        members = [module for module in modules if _config(module) is config]
        if all(map(_servable, members)):
            before = getattr(config, EXPERTS_CHOICE)
            for module in members:
                vars(module)[STATE] = ExpertsState(context, before, always=linear == "always")
            vars(config)[EXPERTS_CHOICE] = IMPLEMENTATION
