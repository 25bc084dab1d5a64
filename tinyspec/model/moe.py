"""Mixture-of-experts layers: by the linear kernel in canonical passes, else as the user chose.

How many rows an expert gets depends on the values of the rows, so no probe of shapes can prove its
matmuls. Rows of the linear kernel do not depend on how many there are, and all other shapes here
depend on the bucket alone: a row keeps its bits.

Served are modules that call transformers' experts interface (``use_experts_implementation``) with
unpacked weights [E, out, in], or [E, in, out] where they say so. Others stay as they are, and
``probes/routing`` finds them. Knows neither routers nor which bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import product
from tinyspec.model.linears import KERNEL_DTYPES, LinearFunction
from tinyspec.model.quantized import is_packed
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import NO_AUTOCAST, Autocast

# A norm that a module may have behind its experts.
NORM = "post_expert_norm"
# An implementation whose operator autocast does not know: it runs in the dtype of the weights.
UNCAST = "grouped_mm"
RowFunction = tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]


class KernelExperts(nn.Module):
    """Experts by the linear kernel in canonical passes (tinyspec_always: in all), else as the user
    has chosen.

    tinyspec_slots: experts per row in the last call by the kernel.
    """

    config: Any
    tinyspec_context: AttentionContext
    tinyspec_always: bool
    tinyspec_slots: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [R, H], top_k_* [R, k] -> [R, H]."""
        given = hidden_states, top_k_index, top_k_weights
        context = self.tinyspec_context
        metadata = context.metadata
        if metadata is None or not (self.tinyspec_always or metadata.exact):
            own: Tensor = super().forward(*given)
            return own
        vars(self)["tinyspec_slots"] = top_k_index.shape[1]
        with context.autocast.off():
            return kernel_forward(self, *given, context.kernels.linear, self.autocast)

    @property
    def autocast(self) -> Autocast:
        """Of the matmuls, as the user's implementation has it."""
        uncast = self.config._experts_implementation == UNCAST
        return NO_AUTOCAST if uncast else self.tinyspec_context.autocast


def kernel_forward(
    module: Any,
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    linear: LinearFunction,
    autocast: Autocast = NO_AUTOCAST,
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

    def project(name: str, x: Tensor) -> Tensor:
        """x [R * k, in], sorted by expert; so many rows for each of the first experts."""
        weight: Tensor = getattr(module, name)
        if module.is_transposed:
            weight = weight.transpose(1, 2)
        parts = x.to(autocast.dtype or weight.dtype).split(counts)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weight)
        found = [
            product(lambda x, w=each, b=bias: linear(x, *autocast.cast(w, b)), part, each, bias)  # type: ignore[misc]
            for part, each, bias in zip(parts, weight, biases, strict=False)
            if len(part)
        ]
        return torch.cat(found).index_select(0, place)

    first = hidden_states.index_select(0, pairs // slots)
    out = activate(module, project(_first(module), first))
    out = project("down_proj", out.index_select(0, pairs))
    if _has_norm(module):
        out = module.post_expert_norm(out)
    out = (out * weights.reshape(-1, 1)).view(rows, slots, -1)
    total = out[:, 0].float()
    for slot in range(1, slots):
        total = total + out[:, slot]
    return total.to(hidden_states.dtype)


def _first(module: Any) -> str:
    """The name of the first matmul."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _has_norm(module: Any) -> bool:
    return getattr(module, f"has_{NORM}", False)


def activate(module: Any, up: Tensor) -> Tensor:
    """The activation between the two matmuls: up [pairs, I or 2 I] -> [pairs, I]."""
    return module._apply_gate(up) if module.has_gate else module.act_fn(up)


@cache
def _asks_interface(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward asks transformers' experts interface for an implementation."""
    if not isfunction(forward) or not hasattr(forward, "__wrapped__"):
        return False
    return any(x is ALL_EXPERTS_FUNCTIONS for x in getclosurevars(forward).nonlocals.values())


def _servable(module: Any) -> bool:
    """Whether the kernel can replace every implementation of the module."""
    if not _asks_interface(type(module).forward) or "forward" in vars(module):
        return False
    # A part that is not known here would be left out.
    known = {"act_fn", NORM} if _has_norm(module) else {"act_fn"}
    if getattr(module, "_is_expert_parallel", False) or not module._modules.keys() <= known:
        return False
    if any(isinstance(held, Tensor) for held in vars(module).values()):  # which no digest reads
        return False
    names = _first(module), "down_proj"
    axes = dict.fromkeys(names, 3) | {f"{name}_bias": 2 for name in names if module.has_bias}
    held = [getattr(module, name, None) for name in axes]
    plain = [x for x in held if isinstance(x, Tensor) and not is_packed(x)]
    dtypes = {x.dtype for x in plain}
    whole = [x.dim() for x in plain] == list(axes.values())
    return whole and len(dtypes) == 1 and dtypes <= set(KERNEL_DTYPES)


def kernel_experts(model: nn.Module) -> dict[str, KernelExperts]:
    """Name -> module of the experts that the linear kernel serves in canonical passes."""
    return {n: module for n, module in model.named_modules() if isinstance(module, KernelExperts)}


def row_functions(experts: dict[str, KernelExperts]) -> list[RowFunction]:
    """What ``experts``, once called, do to rows beside the matmuls, one of each kind: name,
    function of [1, R, *shape], shape, dtype."""
    found: dict[object, RowFunction] = {}
    name: str
    module: Any
    for name, module in experts.items():
        slots, down = module.tinyspec_slots, module.down_proj
        if not slots:  # in a part of the model that does not run
            continue
        up = getattr(module, _first(module))
        dtype = module.autocast.dtype or up.dtype
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


def expert_stand_ins(
    model: nn.Module, context: AttentionContext, always: bool
) -> dict[nn.Module, nn.Module]:
    """By module, for all experts that the kernel can serve; always: in all passes."""
    own: dict[str, Any] = {"tinyspec_context": context, "tinyspec_always": always}
    own |= {"tinyspec_slots": 0}
    return {m: standing_in(m, KernelExperts, **own) for m in model.modules() if _servable(m)}
