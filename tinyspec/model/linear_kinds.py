"""The linears of a model: which modules are, their shapes and weights, and which are of a kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature

from torch import Tensor, nn

from tinyspec.model.quantized import is_packed, layout


def linear_kinds(model: nn.Module) -> dict[str, list[str]]:
    """First name -> all names, for each distinct (type, in, out, weight dtype, bias, layout).

    Linear-like is what has `in_features` and `out_features`, and GPT-2's `Conv1D` (`nx`, `nf`).
    """
    found: dict[tuple, list[str]] = {}
    for name, module in model.named_modules():
        if (shape := linear_shape(module)) is None:
            continue
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        lies = isinstance(weight, Tensor) and (weight.dtype, weight.device, weight.stride())
        key = (type(module), layout(weight), shape, lies, bias is not None)
        found.setdefault(key, []).append(name)
    return {names[0]: names for names in found.values()}


def distinct_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, the first of each kind of linear."""
    return {name: model.get_submodule(name) for name in linear_kinds(model)}


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear-like module, None of any other.

    A tuner layer around an embedding takes tokens, and some parts of one take more than rows: what
    they do shows in the module around them.
    """
    of_tokens = isinstance(getattr(module, "base_layer", None), nn.Embedding)
    if of_tokens or not _takes_rows(type(module).forward):
        return None
    inputs = getattr(module, "in_features", getattr(module, "nx", None))
    outputs = getattr(module, "out_features", getattr(module, "nf", None))
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


@cache
def _takes_rows(forward: Callable[..., object]) -> bool:
    """Whether modules with this forward can be called with one tensor and nothing else."""
    required = [
        parameter
        for parameter in list(signature(forward).parameters.values())[1:]
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    return len(required) <= 1 and all(p.kind is not Parameter.KEYWORD_ONLY for p in required)


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight as `[out, in]` where it is a floating-point matrix at hand, else None (packed)."""
    weight, shape = getattr(module, "weight", None), linear_shape(module)
    if shape is None or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    if is_packed(weight):
        return _unpacked(weight, shape)
    weight = weight if hasattr(module, "in_features") else weight.T
    return weight if weight.is_floating_point() and weight.shape == shape[::-1] else None


def _unpacked(weight: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """A packed weight as `[out, in]`, where it knows how to become one."""
    try:
        matrix = weight.dequantize()
    except (NotImplementedError, RuntimeError):
        return None
    plain = not is_packed(matrix) and matrix.is_floating_point()
    return matrix if plain and matrix.shape == shape[::-1] else None
