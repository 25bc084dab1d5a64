"""A pre-norm decoder layer by fused kernels: residual sums join norms, the activation its product.

    x = x + self_attn(input_layernorm(x)), x = x + mlp(post_attention_layernorm(x))
    mlp(x) = down_proj(act_fn(gate_proj(x)) * up_proj(x))

Attention and linears are called as the layer's own forward calls them, whatever they are. Knows the
structure of a layer; no model by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.model.fused_norm import FusedNorm, ResidualStream, fused_norm
from tinyspec.model.layer_structure import NORMS
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.moe import RowFunction
from tinyspec.model.stand_in import FusedModule, standing_in
from tinyspec.model.torch_state import global_hooks
from tinyspec.model.wrappers import has_hooks


class Form(NamedTuple):
    """What a layer's structure does not show: its norms' weights are stored less one; the name of
    its activation, as the ``gated`` kernel has it."""

    unit_offset: bool
    activation: str


class GatedMlp(FusedModule):
    """A gated MLP whose activation and product are one kernel."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    tinyspec_stream: ResidualStream
    tinyspec_activation: str

    def bypassed(self) -> tuple[nn.Module, ...]:
        return (self.act_fn,)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, both [..., I]."""
        return self.tinyspec_stream.kernels.gated(gate, up, self.tinyspec_activation)


class FusedLayer(FusedModule):
    """A decoder layer whose norms are ``FusedNorm``.

    tinyspec_next: what is called with the hidden states that this layer returns: another
    ``FusedLayer``, a ``FusedNorm``, or None where that is not known. tinyspec_between: the modules
    whose hooks see them before, beside this one.
    """

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    self_attn: nn.Module
    mlp: nn.Module
    tinyspec_next: FusedLayer | FusedNorm | None
    tinyspec_between: tuple[nn.Module, ...]

    def bypassed(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, name) for name in NORMS)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, R, H]; kwargs: those of attention."""
        x = self.input_layernorm(hidden_states)
        x = self.self_attn(hidden_states=x, **kwargs)[0]
        x, residual = self.post_attention_layernorm.add(x, hidden_states)
        x, following = self.mlp(x), self._norm_ahead()
        return residual + x if following is None else following.add_ahead(x, residual)

    def _norm_ahead(self) -> FusedNorm | None:
        """The norm that is called next, unless a hook might change the hidden states before."""
        following = self.tinyspec_next
        hooked = has_hooks(self) or any(map(has_hooks, self.tinyspec_between)) or global_hooks()
        if following is None or hooked:
            return None
        return following if isinstance(following, FusedNorm) else following.input_layernorm


def fused_parts(layer: nn.Module, stream: ResidualStream, form: Form) -> dict[str, FusedModule]:
    """The stand-ins of a layer's norms and MLP, by name."""
    own = {"tinyspec_stream": stream, "tinyspec_activation": form.activation}
    parts = {name: layer.get_submodule(name) for name in (*NORMS, "mlp")}
    mlp = standing_in(parts.pop("mlp"), GatedMlp, **own)
    norms = {name: fused_norm(norm, stream, form.unit_offset) for name, norm in parts.items()}
    return {**norms, "mlp": mlp}


def fused_layer(layer: nn.Module) -> FusedLayer:
    """The stand-in of a layer, which shares its children: those of ``fused_parts`` go there."""
    return standing_in(layer, FusedLayer, tinyspec_next=None, tinyspec_between=())


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
