"""Mixture-of-experts layers: by kernels of their own in canonical passes, and in small ones
on some GPUs, else as the user chose.

How many rows an expert gets depends on the values of the rows, so no probe of shapes can prove its
matmuls. Rows of ``grouped_linear`` do not depend on how many there are, and all other shapes here
depend on the bucket alone: a row keeps its bits.

Served are modules that call transformers' experts interface (``use_experts_implementation``) with a
gate, nothing behind the second matmul, and unpacked weights [E, out, in], or [E, in, out] where
they say so. Others stay as they are, and the proof finds them. Knows neither routers nor which
bucket is canonical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import getclosurevars, isfunction
from sys import maxsize
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinyspec.kernels.backend import Kernels
from tinyspec.kernels.launch import capability
from tinyspec.kernels.twins.layers import add_experts
from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import evaluated, of_product, recomputed
from tinyspec.model.linears import KERNEL_DTYPES
from tinyspec.model.quantized import is_packed
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import NO_AUTOCAST, Autocast

# The names of the two matmuls.
FIRST, SECOND = "gate_up_proj", "down_proj"
# An implementation whose operator autocast does not know: it runs in the dtype of the weights.
UNCAST = "grouped_mm"
# Rows of 16-bit numbers for which the kernels took 0.77 of the time of a step, beside UNCAST on an
# H200; and its compute capability.
FAST_ROWS, MEASURED = 64, 90
RowFunction = tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]


class KernelExperts(nn.Module):
    """Experts by the kernels in canonical passes and those of ``tinyspec_rows`` or fewer, else as
    the user has chosen.

    tinyspec_slots: experts per row in the last call by the kernels.
    """

    config: Any
    tinyspec_context: AttentionContext
    tinyspec_rows: int
    tinyspec_slots: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [R, H], top_k_* [R, k] -> [R, H]."""
        given = hidden_states, top_k_index, top_k_weights
        context = self.tinyspec_context
        metadata = context.metadata
        if metadata is None or not (metadata.exact or len(top_k_index) <= self.tinyspec_rows):
            own: Tensor = super().forward(*given)
            return own
        vars(self)["tinyspec_slots"] = top_k_index.shape[1]
        with context.autocast.off():
            return kernel_forward(self, *given, context.kernels, self.autocast)

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
    kernels: Kernels,
    autocast: Autocast = NO_AUTOCAST,
) -> Tensor:
    """hidden_states [R, H], index and weights [R, k] -> [R, H] by the kernels of experts.

    Everything between the matmuls runs on pairs of a row and an expert, [R * k, ...]. The order in
    which the router names a row's experts does not matter.
    """
    pairs, starts = kernels.sort_by_expert(index, len(module.down_proj))

    def project(name: str, x: Tensor) -> Tensor:
        """x [R * k, in] -> [R * k, out]."""
        weight: Tensor = getattr(module, name)
        if module.is_transposed:
            weight = weight.transpose(1, 2)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        given = x.to(autocast.dtype or weight.dtype), weight, bias
        run, backward = kernels.grouped_linear, partial(_of_grouped, pairs, starts)
        out: Tensor = evaluated(lambda *given: run(*given, pairs, starts), backward, *given)
        return out

    first = hidden_states.repeat_interleave(index.shape[1], dim=0)
    out = project(SECOND, module._apply_gate(project(FIRST, first)))
    form: dict[str, Any] = {"index": index, "dtype": hidden_states.dtype}
    run, plain = (partial(f, **form) for f in (kernels.add_experts, add_experts))
    total: Tensor = recomputed(run, plain, out, weights)
    return total


def _of_grouped(
    pairs: Tensor,
    starts: Tensor,
    asked: Sequence[bool],
    given: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Gradients of ``grouped_linear``: by ordinary products, an expert at a time."""
    (x, weight, bias), (grad,) = given, grads
    found = [torch.zeros_like(t) if a else None for t, a in zip(given, asked, strict=True)]
    for expert, rows in enumerate(pairs.split(starts.diff().tolist())):
        if not len(rows):
            continue
        own = of_product(asked, (x[rows], weight[expert], bias), (grad[rows],))
        for whole, part, at in zip(found, own, (rows, expert, expert), strict=True):
            if whole is not None and part is not None:
                whole[at] = part.to(whole.dtype)
    return found


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
    if not module.has_gate or not module._modules.keys() <= {"act_fn"}:
        return False
    if getattr(module, "_is_expert_parallel", False):
        return False
    if any(isinstance(held, Tensor) for held in vars(module).values()):  # which no digest reads
        return False
    names = FIRST, SECOND
    axes = dict.fromkeys(names, 3) | {f"{name}_bias": 2 for name in names if module.has_bias}
    held = [getattr(module, name, None) for name in axes]
    plain = [x for x in held if isinstance(x, Tensor) and not is_packed(x)]
    dtypes = {x.dtype for x in plain}
    whole = [x.dim() for x in plain] == list(axes.values())
    return whole and len(dtypes) == 1 and dtypes <= set(KERNEL_DTYPES)


def kernel_experts(model: nn.Module) -> dict[str, KernelExperts]:
    """Name -> module of the experts that the kernels serve in canonical passes."""
    return {n: module for n, module in model.named_modules() if isinstance(module, KernelExperts)}


def row_functions(experts: dict[str, KernelExperts]) -> list[RowFunction]:
    """What ``experts``, once called, do to rows beside the matmuls, one of each kind: name,
    function of [1, R, *shape], shape, dtype."""
    found: dict[object, RowFunction] = {}
    name: str
    module: Any
    for name, module in experts.items():
        if slots := module.tinyspec_slots:  # 0: in a part of the model that does not run
            up = getattr(module, FIRST)
            shape = slots, up.shape[2 if module.is_transposed else 1]
            dtype = module.autocast.dtype or up.dtype
            gate = partial(_gate, module, *shape)
            found.setdefault((type(module), shape, dtype), (name, gate, shape, dtype))
    return list(found.values())


def _gate(module: Any, slots: int, width: int, x: Tensor) -> Tensor:
    """What stands between the matmuls, of pairs, as a function of rows: x [1, R, slots, width] ->
    [1, R, slots * any]."""
    return module._apply_gate(x.reshape(-1, width)).view(1, x.shape[1], -1)


def _fast_rows(module: Any) -> int:
    """Up to how many rows the kernels are the faster way, where that was measured."""
    weight, default = module.down_proj, module.config._experts_implementation == UNCAST
    known = default and weight.dtype.itemsize == 2 and capability(weight.device) == MEASURED
    return FAST_ROWS if known else 0


def expert_stand_ins(
    model: nn.Module, context: AttentionContext, always: bool
) -> dict[nn.Module, nn.Module]:
    """By module, for all experts that the kernel can serve; always: in all passes."""
    own: dict[str, Any] = {"tinyspec_context": context, "tinyspec_slots": 0}
    return {
        m: standing_in(m, KernelExperts, **own, tinyspec_rows=maxsize if always else _fast_rows(m))
        for m in model.modules()
        if _servable(m)
    }
