"""Which modules of a model are linear layers, which of them are of one kind, shapes and weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from inspect import signature

from torch import Tensor, nn

from tinyspec.model.quantized import is_packed, layout


def linear_kinds(model: nn.Module) -> dict[str, list[str]]:
    """First name -> all names, for each distinct (type, sizes, layouts of parameters and buffers).

    Where two of one kind lie in memory differs by a multiple of 64 bytes.
    Linear-like is what has `in_features` and `out_features`, and GPT-2's `Conv1D` (`nx`, `nf`).
    """
    found: dict[Hashable, list[str]] = {}
    for name, module in model.named_modules():
        if (shape := linear_shape(module)) is None:
            continue
        own = (*module.named_parameters(), *module.named_buffers())
        key = type(module), shape, tuple((part, layout(tensor)) for part, tensor in own)
        found.setdefault(key, []).append(name)
    return {names[0]: names for names in found.values()}


def distinct_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, the first of each kind of linear layer."""
    return {name: model.get_submodule(name) for name in linear_kinds(model)}


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear-like module, None of any other.

    None also of an adapter around an embedding, which takes tokens, and of parts of adapters that
    take more than rows: the module around them is compared.
    """
    takes_tokens = isinstance(getattr(module, "base_layer", None), nn.Embedding)
    if takes_tokens or not _takes_rows(type(module).forward):
        return None
    inputs = getattr(module, "in_features", getattr(module, "nx", None))
    outputs = getattr(module, "out_features", getattr(module, "nf", None))
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


@cache
def _takes_rows(forward: Callable[..., object]) -> bool:
    """Whether modules with this forward can be called with one tensor and nothing else."""
    try:
        signature(forward).bind("self", "rows")
    except TypeError:
        return False
    return True


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight as `[out, in]`; None where it has no data, or cannot be made a floating-point
    matrix."""
    weight, shape = getattr(module, "weight", None), linear_shape(module)
    if shape is None or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    if is_packed(weight):
        try:
            weight = weight.dequantize()
        except (NotImplementedError, RuntimeError):
            return None
    elif not hasattr(module, "in_features"):
        weight = weight.T
    fits = weight.is_floating_point() and weight.shape == shape[::-1] and not is_packed(weight)
    return weight if fits else None
