"""Which modules are pre-norm decoder layers with a gated MLP: those with its parts and no others.

What they compute with these parts is not known here.
"""

from __future__ import annotations

from torch import nn

from tinyspec.model.equivalence import eps_name
from tinyspec.model.linear_kinds import linear_shape

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
