"""Packing a matrix as a given packed weight is, by the function of that weight's own library.

torchao's tensors have ``from_hp``; bitsandbytes' parameters pack what they hold when they are moved
to a device. The parts lie where the library puts them. Neither is imported unless its weights are
there: both are recognised by attributes.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.model.quantized import packing_format, parts

# What bitsandbytes' 4-bit and 8-bit parameters are made with.
FOUR_BITS = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
EIGHT_BITS = ("has_fp16_weights", "requires_grad")
# Arguments of ``from_hp`` that packing finds out by itself.
FOUND = ("scale", "zero_point")


def unpacked(weight: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the matrix that a packed weight was made from."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return tuple(state.shape), state.dtype
    return tuple(weight.shape), torch.float16 if _has_eight_bits(weight) else weight.dtype


def packed_like(weight: Any, dense: Tensor) -> Tensor | None:
    """``dense`` packed as ``weight`` is; None where no function of its library is known."""
    kind: Any = type(weight)
    try:
        if hasattr(kind, "from_hp"):
            made = kind.from_hp(dense, **_told(weight))
            return nn.Parameter(made, requires_grad=weight.requires_grad)
        if hasattr(weight, "quant_state"):
            made = kind(dense.clone(), **{name: getattr(weight, name) for name in FOUR_BITS})
            return made.to(weight.device)
        if _has_eight_bits(weight):
            made = kind(dense.cpu(), **{name: getattr(weight, name) for name in EIGHT_BITS})
            return made.to(weight.device)
    except Exception:  # of whatever kind: it is another library's
        pass
    return None


def shared(packed: Any) -> Tensor:
    """A packed weight for one more module: 8-bit linears take the data out of theirs."""
    if not _has_eight_bits(packed):
        return packed
    how = {name: getattr(packed, name) for name in (*EIGHT_BITS, "CB", "SCB")}
    return type(packed)(packed.data, **how)


def same_format(a: Tensor, b: Tensor) -> bool:
    """Whether the same kernels take two packed weights: equal in all but their numbers."""

    def form(weight: Tensor) -> object:
        plain = {n: (p.shape, p.stride(), p.dtype, p.device) for n, p in parts(weight).items()}
        return type(weight), packing_format(weight), plain

    return form(a) == form(b)


def _has_eight_bits(weight: Any) -> bool:
    return hasattr(weight, "has_fp16_weights")


def _told(weight: Any) -> dict[str, Any]:
    """The arguments of ``from_hp`` that the weight knows of itself."""
    known = {
        "float8_dtype": getattr(getattr(weight, "qdata", None), "dtype", None),
        "granularity": _granularity(weight),
    }
    names = [name for name in signature(type(weight).from_hp).parameters if name not in FOUND]
    given = {name: known.get(name, getattr(weight, name, None)) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _granularity(weight: Any) -> Any:
    """torchao's word for the size of a weight's blocks; None where it has none."""
    block = list(getattr(weight, "block_size", None) or ())
    if not block:
        return None
    from torchao.quantization import granularity

    if block == list(weight.shape):
        return granularity.PerTensor()
    whole_row = block[-1] == weight.shape[-1]
    return granularity.PerRow() if whole_row else granularity.PerGroup(block[-1])
