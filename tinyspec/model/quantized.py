"""Packed weights: the tensors that a quantized parameter consists of, and what no probe can prove.

torchao's parameters are tensors made of tensors; bitsandbytes keeps scales beside its own. Neither
library is imported: both are recognised by attributes. Knows modules and tensors, not engines.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (nn.Parameter, Tensor)
# Quantized activations have one scale for each of these: a row, or a part of a row.
ROW_SCALES = ("PerRow", "PerToken", "PerGroup")


def is_packed(weight: object) -> bool:
    """Whether a weight is of a subclass of Tensor: its dtype may not say what it holds."""
    # In this order: it is asked of every parameter before every step.
    return type(weight) not in PLAIN and isinstance(weight, Tensor)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold the bits of a parameter or buffer; of a plain one, itself."""
    if not is_packed(tensor):
        return {"": tensor}
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        extra = {name: x for name, x in _quant_state(tensor).items() if isinstance(x, Tensor)}
        return {"": tensor.detach().as_subclass(Tensor), **extra}
    return {
        f"{name}.{inner}".rstrip("."): part
        for name in flatten()[0]
        for inner, part in parts(getattr(tensor, name)).items()
    }


def trace(parameter: Tensor) -> tuple[int, ...]:
    """Address and version counter of a parameter, or of all parts of a packed one: one of them
    changes when the parameter is written to."""
    if is_packed(parameter):
        return tuple(number for part in parts(parameter).values() for number in trace(part))
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def packing_format(tensor: object) -> str:
    """How to read the parts of a packed weight; equal for weights that the same kernel takes."""
    if not isinstance(tensor, Tensor) or not is_packed(tensor):
        return ""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    how = flatten()[1] if flatten is not None else _quant_state(tensor)
    plain = {k: v for k, v in how.items() if not isinstance(v, Tensor)}
    # Addresses of objects differ from process to process.
    return type(tensor).__name__ + re.sub(r" at 0x[0-9a-f]+", "", repr(plain))


def layout(tensor: Tensor) -> tuple[object, ...]:
    """All of a tensor but its numbers: where two of these are equal, the same kernels run.

    A product of a part [1, R, in] of more rows is one of matrices where the weight asks for a
    gradient, and else one of batches.
    """
    if is_packed(tensor):
        return packing_format(tensor), *map(layout, parts(tensor).values())
    lies = tensor.shape, tensor.stride(), tensor.data_ptr() % 64, tensor.dtype, tensor.device
    return *lies, tensor.requires_grad, tensor.is_inference()


def _quant_state(weight: Tensor) -> dict[str, Any]:
    """What bitsandbytes keeps beside the data of a 4-bit parameter."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return {}
    found = state.as_dict()
    if getattr(state, "nested", False):
        # The tensors themselves: the dict has a copy of one, and the number in the other.
        found |= {"nested_quant_map": state.state2.code, "nested_offset": state.offset}
    return found


def extra_parts(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module's weight that are neither parameters nor buffers: the scales of
    bitsandbytes' 8-bit linears, which are moved to the module at the first call."""
    scales = getattr(getattr(module, "state", None), "SCB", None)
    return {"SCB": scales} if isinstance(scales, Tensor) else {}


def repack_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring packed weights into the format in which they run.

    bitsandbytes repacks them at the first call in eval mode. Done here, so that a digest does not
    depend on whether there was a call, and outside of inference mode, so that they can be trained.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and is_packed(weight) and _will_repack(module, weight):
            before, module.training = module.training, False
            with torch.inference_mode(False), torch.no_grad():
                size: Any = module.in_features
                module(torch.zeros(1, size, dtype=dtype, device=weight.device))
            module.training = before


def _will_repack(module: nn.Module, weight: Any) -> bool:
    """Whether the next call in eval mode changes the weight's format."""
    if getattr(weight, "CB", None) is not None:
        return True
    repacks = getattr(module, "support_avx512bf16_for_cpu", False) and weight.device.type == "cpu"
    state = getattr(weight, "quant_state", None)
    return bool(repacks and not getattr(state, "packing_format_for_cpu", False))


def unprovable(model: nn.Module) -> str | None:
    """The first module that no probe can prove row-invariant, and why; None if there is none.

    These are kernels that look at all rows together, weights that no digest finds, and packed ones
    whose like a probe cannot make.
    """
    for name, module in model.named_modules():
        why = _row_dependence(module) or _unknown_tensors(module)
        if why is not None:
            return f"{name} ({type(module).__name__}) {why}"
    return None


def _row_dependence(module: nn.Module) -> str | None:
    """What a module computes from all rows of a pass together, or None."""
    threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
    if isinstance(threshold, float) and threshold > 0:
        return f"chooses outlier columns (threshold {threshold}) from all rows of a pass together"
    if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return "quantizes activations by one scale for all rows of a pass together"
    weight = getattr(module, "weight", None)
    how = getattr(weight, "act_quant_kwargs", None)
    if how is None or getattr(weight, "act_quant_scale", None) is not None:
        return None
    granularity = getattr(how, "granularity", None)
    kind, block = type(granularity).__name__, getattr(granularity, "block_size", ())
    blocks_of_one_row = kind == "PerBlock" and set(block[:-1]) == {1}
    if kind in ROW_SCALES or blocks_of_one_row:
        return None
    return f"quantizes activations by a scale for several rows of a pass ({granularity})"


def _unknown_tensors(module: nn.Module) -> str | None:
    """Tensors of a linear layer that no digest reads, or that stand for weights in a way that is
    not known (matrices of integers, other packed weights); or None."""
    if not hasattr(module, "in_features"):
        return None
    own = {**module._parameters, **module._buffers}
    hidden = []
    for key, value in vars(module).items():
        values = value.values() if isinstance(value, dict) else [value]
        if key not in ("_parameters", "_buffers") and any(isinstance(x, Tensor) for x in values):
            hidden.append(key)
    if hidden:
        return f"keeps tensors outside of parameters and buffers ({', '.join(hidden)})"
    packed = [name for name, x in own.items() if x is not None and _is_unknown(x)]
    if packed:
        return f"has packed weights of a format that a probe cannot make ({', '.join(packed)})"
    return None


def _is_unknown(x: Tensor) -> bool:
    if is_packed(x):
        return type(x).__name__ not in FILLED
    real = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    return x.dim() > 1 and not real


# Classes of packed weights, of torchao and bitsandbytes, that a probe can fill with other numbers.
FILLED = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "Int8Params", "Params4bit")
# About how large their numbers are before they are scaled: those of ``filled``, by their dtype;
# eight bits of ``uint8`` are two codes.
SIZES = {torch.int8: 73.0, torch.uint8: 0.5, torch.float8_e4m3fn: 1.0, torch.float8_e5m2: 1.0}
# Parts of a weight that say how others are read.
KEPT = ("zero_point", "quant_map", "nested_offset")


def filled(weight: Any, size: float) -> Any:
    """A copy of a packed weight of such a class, with random numbers of about this ``size``."""
    generator = torch.Generator().manual_seed(weight.numel())
    # Outside of inference mode, as the copy is kept.
    with torch.inference_mode(False), torch.no_grad():
        made = copy.deepcopy(weight)
        held = parts(made)
        unit = SIZES[next(iter(held.values())).dtype]
        for name, part in held.items():
            noise = torch.randn(part.shape, generator=generator, device="cpu")
            if part.dtype == torch.int8:
                noise = (noise * unit).clamp(-127, 127)
            elif part.dtype == torch.uint8:
                noise = (noise * 64 + 128).clamp(0, 255)
            elif part.dtype not in SIZES:  # scales
                noise = (1 + noise.tanh() / 2) * size / unit
            if not name.endswith(KEPT):
                part.copy_(noise)
    return made
