"""Packed weights: the tensors behind a quantized parameter, and what of it no probe can prove.

torchao's parameters are tensors made of tensors; bitsandbytes keeps scales beside its own. Neither
library is imported: they are known by what they have. Knows modules and tensors, not engines.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (nn.Parameter, Tensor)
# Activations quantized by a scale for each of these: a row's own, or a part of a row's.
ROW_SCALES = ("PerRow", "PerToken", "PerGroup")


def is_packed(weight: object) -> bool:
    """Whether a parameter is not what it claims to be: a subclass of Tensor."""
    # In this order: it is asked of every parameter before every step.
    return type(weight) not in PLAIN and isinstance(weight, Tensor)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold the bits of a parameter or buffer; of a plain one, itself."""
    if not is_packed(tensor):
        return {"": tensor}
    flatten = getattr(tensor, "__tensor_flatten__", None)
    found: dict[str, Tensor] = {}
    if flatten is None:
        found[""] = tensor.detach().as_subclass(Tensor)
        found |= {name: x for name, x in _beside(tensor).items() if isinstance(x, Tensor)}
        return found
    for name in flatten()[0]:
        for inner, part in parts(getattr(tensor, name)).items():
            found[f"{name}.{inner}".rstrip(".")] = part
    return found


def trace(parameter: Tensor) -> tuple[int, ...]:
    """Address and version counter of a parameter, of a packed one those of all its parts: one of
    them changes when it is written to."""
    if is_packed(parameter):
        return tuple(number for part in parts(parameter).values() for number in trace(part))
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def layout(tensor: object) -> str:
    """How the parts of a packed weight are to be read: the same text for the same kernel."""
    if not isinstance(tensor, Tensor) or not is_packed(tensor):
        return ""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    how = flatten()[1] if flatten is not None else _beside(tensor)
    plain = {k: v for k, v in how.items() if not isinstance(v, Tensor)}
    # Where an object lies in memory says nothing.
    return type(tensor).__name__ + re.sub(r" at 0x[0-9a-f]+", "", repr(plain))


def _beside(weight: Tensor) -> dict[str, Any]:
    """What bitsandbytes keeps beside the data of a 4-bit parameter."""
    state = getattr(weight, "quant_state", None)
    return {} if state is None else state.as_dict()


def extra_parts(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are part of a module's weight and neither parameter nor buffer: the scales of
    bitsandbytes' 8-bit linears, which move at the first call."""
    scales = getattr(getattr(module, "state", None), "SCB", None)
    return {"SCB": scales} if isinstance(scales, Tensor) else {}


def settle(model: nn.Module, dtype: torch.dtype) -> None:
    """Let packed weights take the form that they have while a model runs.

    bitsandbytes repacks them at the first call in eval mode, and a digest must not depend on
    whether there was one; nor may they become inference tensors, which cannot be trained on.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and is_packed(weight) and _unsettled(module, weight):
            before, module.training = module.training, False
            with torch.inference_mode(False), torch.no_grad():
                size: Any = module.in_features
                module(torch.zeros(1, size, dtype=dtype, device=weight.device))
            module.training = before


def _unsettled(module: nn.Module, weight: Any) -> bool:
    if getattr(weight, "CB", None) is not None:
        return True
    repacks = getattr(module, "support_avx512bf16_for_cpu", False) and weight.device.type == "cpu"
    state = getattr(weight, "quant_state", None)
    return bool(repacks and not getattr(state, "packing_format_for_cpu", False))


def unprovable(model: nn.Module) -> str | None:
    """What no probe can prove of ``model``, module named: kernels that look at all rows together,
    and weights that are not to be seen. None if there is nothing."""
    for name, module in model.named_modules():
        why = _unprovable(module)
        if why is not None:
            return f"{name} ({type(module).__name__}) {why}"
    return None


def _unprovable(module: nn.Module) -> str | None:
    threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
    if isinstance(threshold, float) and threshold > 0:
        return f"chooses outlier columns (threshold {threshold}) from all rows of a pass together"
    if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return "quantizes activations by one scale for all rows of a pass together"
    weight = getattr(module, "weight", None)
    how = getattr(weight, "act_quant_kwargs", None)
    if how is not None and getattr(weight, "act_quant_scale", None) is None:
        scale = getattr(how, "granularity", None)
        of_a_row = type(scale).__name__ in ROW_SCALES or _blocks_of_a_row(scale)
        if not of_a_row:
            return f"quantizes activations by a scale for several rows of a pass ({scale})"
    hidden = [
        key
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers") and _holds_tensors(value)
    ]
    if hasattr(module, "in_features") and hidden:
        return f"keeps tensors where no digest of weights finds them ({', '.join(hidden)})"
    return None


def _blocks_of_a_row(scale: object) -> bool:
    block: Any = getattr(scale, "block_size", None)
    return type(scale).__name__ == "PerBlock" and bool(block) and set(block[:-1]) == {1}


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, dict) and any(isinstance(x, Tensor) for x in value.values())
    )
