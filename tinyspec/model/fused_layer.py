"""A pre-norm decoder layer by fused kernels: residual sums join norms, the activation its product.

    x = x + self_attn(input_layernorm(x)), x = x + mlp(post_attention_layernorm(x))
    mlp(x) = down_proj(act_fn(gate_proj(x)) * up_proj(x))

Attention and linears are called as the layer's own forward calls them, whatever they are. Knows the
structure of a layer; no model by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.kernels.twins.layers import add_rms_norm, gated_at_once
from tinyspec.model.attention import AttentionContext, eps_name
from tinyspec.model.gradients import recomputed
from tinyspec.model.linears import linear_shape
from tinyspec.model.moe import RowFunction
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import global_hooks

# The children of a layer and of its MLP, all of them.
NORMS = ("input_layernorm", "post_attention_layernorm")
LAYER = {*NORMS, "self_attn", "mlp"}
PRODUCTS = ("gate_proj", "up_proj", "down_proj")
MLP = {*PRODUCTS, "act_fn"}


def is_pre_norm(module: nn.Module) -> bool:
    """Whether a module has the parts of such a layer, and no others."""
    if module._modules.keys() != LAYER or module._parameters or module._buffers:
        return False
    norms = [module.get_submodule(name) for name in NORMS]
    mlp = module.get_submodule("mlp")
    if mlp._modules.keys() != MLP or mlp._parameters or mlp._buffers:
        return False
    shapes = [linear_shape(mlp.get_submodule(name)) for name in PRODUCTS]
    known = None not in shapes and shapes[0] == shapes[1]
    return known and not list(mlp.get_submodule("act_fn").parameters()) and all(map(is_norm, norms))


def is_norm(module: nn.Module) -> bool:
    """Whether a module holds what an RMSNorm holds: one vector of weights and an epsilon."""
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    vector = weight is not None and weight.dim() == 1 and weight.is_floating_point()
    return alone and vector and isinstance(getattr(module, eps_name(module), None), float)


class FusedNorm(nn.Module):
    """An RMSNorm by the kernel; unit_offset: the weight's distance from one is what is stored. The
    layer before may have computed it ahead (``AttentionContext.ahead``)."""

    weight: Tensor
    tinyspec_context: AttentionContext
    tinyspec_unit_offset: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., H] -> their norm."""
        context = self.tinyspec_context
        ahead, context.ahead = context.ahead, None
        if ahead is not None and ahead[0] is self and ahead[1] is hidden_states:
            return ahead[2]
        return self.add(hidden_states, None)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual [..., H] (None: of x), and the sum."""
        eps: float = getattr(self, eps_name(self))
        form: dict[str, Any] = {"eps": eps, "unit_offset": self.tinyspec_unit_offset}
        run, plain = self.tinyspec_context.kernels.add_rms_norm, add_rms_norm
        given = x, residual, self.weight
        normed, summed = recomputed(partial(run, **form), partial(plain, **form), *given)
        return normed, summed


def fused_norm(norm: nn.Module, context: AttentionContext, unit_offset: bool) -> FusedNorm:
    """The stand-in of a norm."""
    own = {"tinyspec_context": context, "tinyspec_unit_offset": unit_offset}
    return standing_in(norm, FusedNorm, **own)


class GatedMlp(nn.Module):
    """A gated MLP whose activation and product are one kernel."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    tinyspec_context: AttentionContext
    tinyspec_activation: str

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, both [..., I]."""
        form: dict[str, Any] = {"activation": self.tinyspec_activation}
        run, plain = self.tinyspec_context.kernels.gated, gated_at_once
        out: Tensor = recomputed(partial(run, **form), partial(plain, **form), gate, up)
        return out


class FusedLayer(nn.Module):
    """A decoder layer whose norms are ``FusedNorm``.

    tinyspec_next: the norm of the hidden states that this layer returns, or None where that is not
    known.
    """

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    self_attn: nn.Module
    mlp: nn.Module
    tinyspec_next: FusedNorm | None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, R, H]; kwargs: those of attention."""
        x = self.input_layernorm(hidden_states)
        x = self.self_attn(hidden_states=x, **kwargs)[0]
        x, residual = self.post_attention_layernorm.add(x, hidden_states)
        x, following = self.mlp(x), self.tinyspec_next
        # Hooks on all modules might change the hidden states before the norm is called.
        if following is None or global_hooks():
            return residual + x
        normed, summed = following.add(x, residual)
        following.tinyspec_context.ahead = following, summed, normed
        return summed


def fused_mlp(mlp: nn.Module, context: AttentionContext, activation: str) -> GatedMlp:
    """The stand-in of an MLP; activation: as the ``gated`` kernel names it."""
    own = {"tinyspec_context": context, "tinyspec_activation": activation}
    return standing_in(mlp, GatedMlp, **own)


def fused_functions(model: PreTrainedModel) -> list[RowFunction]:
    """What fused modules compute that calls of modules do not show, one of each kind: name,
    function of [1, R, *shape], shape, dtype."""
    found: dict[object, RowFunction] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm):
            what, size = partial(_sum, module), len(module.weight)
            function = f"{name} of a sum", what, (2, size), model.dtype
        elif isinstance(module, GatedMlp):
            what, (_, size) = partial(_gated, module), linear_shape(module.gate_proj) or (0, 0)
            function = f"{name}, activation", what, (2, size), model.dtype
        else:
            continue
        found.setdefault((type(module), size, repr(module)), function)
    return list(found.values())


def _sum(norm: FusedNorm, x: Tensor) -> Tensor:
    """x [1, R, 2, H]: what the norm adds -> [1, R, 2 H]."""
    return torch.cat(norm.add(*x.unbind(2)), dim=-1)


def _gated(mlp: GatedMlp, x: Tensor) -> Tensor:
    """x [1, R, 2, I]: gate and up -> [1, R, I]."""
    return mlp.gated(*x.unbind(2))
