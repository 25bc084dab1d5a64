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

from tinyspec.kernels.backend import Kernels
from tinyspec.model.attention import AttentionContext
from tinyspec.model.linears import linear_shape
from tinyspec.model.moe import RowFunction
from tinyspec.model.shadow import FusedModule, standing_in
from tinyspec.model.torch_state import global_hooks
from tinyspec.model.trial import eps_name
from tinyspec.model.wrappers import has_hooks

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


class _Ahead(NamedTuple):
    """What ``norm`` gives ``hidden``, computed before it was called."""

    norm: nn.Module
    hidden: Tensor
    normed: Tensor


class ResidualStream:
    """The hidden states of one model between its norms; context: of its passes."""

    def __init__(self, context: AttentionContext):
        self.context = context
        self._ahead: _Ahead | None = None

    @property
    def kernels(self) -> Kernels:
        """Those that passes call."""
        assert self.context.kernels is not None
        return self.context.kernels

    def leave(self, norm: nn.Module, hidden: Tensor, normed: Tensor) -> None:
        """Keep ``normed`` for the next norm, should it be ``norm`` of ``hidden``."""
        self._ahead = _Ahead(norm, hidden, normed)

    def take(self, norm: nn.Module, hidden: Tensor) -> Tensor | None:
        """What was left for this call, or None; nothing is left afterwards."""
        ahead, self._ahead = self._ahead, None
        left = ahead is not None and ahead.norm is norm and ahead.hidden is hidden
        return ahead.normed if ahead is not None and left else None


class FusedNorm(FusedModule):
    """An RMSNorm by the kernel; unit_offset: the weight's distance from one is what is stored."""

    weight: Tensor
    tinyspec_stream: ResidualStream
    tinyspec_unit_offset: bool

    def bypassed(self) -> tuple[nn.Module, ...]:
        return (self,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., H] -> their norm."""
        left = self.tinyspec_stream.take(self, hidden_states)
        return self._run(hidden_states, None)[0] if left is None else left

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual [..., H], and the sum."""
        return self._run(x, residual)

    def add_ahead(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual [..., H]; its norm is kept for the next call of ``forward``."""
        normed, summed = self._run(x, residual)
        self.tinyspec_stream.leave(self, summed, normed)
        return summed

    def _run(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        eps: float = getattr(self, eps_name(self))
        run = self.tinyspec_stream.kernels.add_rms_norm
        return run(x, residual, self.weight, eps, unit_offset=self.tinyspec_unit_offset)


def fused_norm(norm: nn.Module, stream: ResidualStream, unit_offset: bool) -> FusedNorm:
    """The stand-in of a norm."""
    own = {"tinyspec_stream": stream, "tinyspec_unit_offset": unit_offset}
    return standing_in(norm, FusedNorm, **own)


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
