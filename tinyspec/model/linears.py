"""The linear layers of a model: their kinds, and two ways in which they run on their own weights.

Linears of one kind have class, sizes and layouts of weights in common: one of them is probed.

The ``linear`` kernel is for a device whose BLAS has no usable canonical bucket: its rows do not
depend on the number of rows. Its bits differ from the BLAS's, so the fingerprint names the layers
that it serves. In tiles (``RowTiles``) the rows of a larger pass are multiplied as many at a time
as a smaller pass has, which gives that pass's bits. Knows modules, not which bucket is canonical.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cache
from inspect import signature
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinyspec.model.attention import AttentionContext
from tinyspec.model.gradients import product
from tinyspec.model.quantized import is_packed, layout
from tinyspec.model.shadow import standing_in
from tinyspec.model.wrappers import has_hooks


def calls_interface(module: nn.Module) -> bool:
    """Whether a module's forward looks its attention up in transformers' registry."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


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


LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SharedLinear(nn.Module):
    """Stands in for a linear layer: the same function of the same weights."""

    weight: Tensor
    bias: Tensor | None


def matrix(module: Any) -> Tensor:
    """The weight of a plain linear layer as [out, in]; a ``Conv1D`` and its stand-ins have it
    transposed."""
    weight: Tensor = module.weight
    return weight.T if hasattr(module, "nx") else weight


class KernelLinear(SharedLinear):
    """A linear layer by the ``linear`` kernel."""

    tinyspec_linear: LinearFunction

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; every row by itself."""
        weight = matrix(self)

        def run(x: Tensor) -> Tensor:
            out = self.tinyspec_linear(x.reshape(-1, x.shape[-1]), weight, self.bias)
            return out.view(*x.shape[:-1], weight.shape[0])

        return product(run, x, weight, self.bias)


def kernel_stand_ins(
    model: nn.Module, linear: LinearFunction, only: Collection[str] | None = None
) -> dict[nn.Module, nn.Module]:
    """By module, for every plain linear layer of a dtype that the kernel takes.

    only: of these, the modules with these names (as in ``named_modules``); other names are ignored.
    """
    return {
        module: standing_in(module, KernelLinear, tinyspec_linear=linear)
        for name, module in model.named_modules()
        if only is None or name in only
        if is_plain(module) and module.weight.dtype in KERNEL_DTYPES
    }


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear | SharedLinear]:
    """Whether a module only multiplies rows by its weight, and not by the ``linear`` kernel.

    True of ``nn.Linear``, ``Conv1D`` and their CPU stand-ins, unless the weight is packed, hooks
    are registered or ``forward`` is overridden on the module. False of other subclasses, which may
    compute anything.
    """
    shared = isinstance(module, SharedLinear) and not isinstance(module, KernelLinear)
    if not shared and type(module) not in (nn.Linear, Conv1D):
        return False
    return not (is_packed(module.weight) or has_hooks(module) or "forward" in vars(module))


# In the place of the rows of a tile: as weight times rows, whole.
TRANSPOSED = 0


class RowTiles:
    """The layers of one model, ``bound``, that canonical passes run in tiles, or transposed."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        self.bound: list[nn.Module] = []

    def bind(self, modules: Iterable[nn.Module], heights: Mapping[int, int]) -> None:
        """Run ``modules`` in tiles of so many rows (or TRANSPOSED), by the rows of the pass."""
        for module in modules:
            # On the instance: modules, parameters and their names stay what they are.
            vars(module)["forward"] = self._tiled(module, heights)
            self.bound.append(module)

    def unbind(self) -> None:
        """Remove the tiled forwards."""
        for module in self.bound:
            del vars(module)["forward"]
        self.bound = []

    def _tiled(self, module: Any, heights: Mapping[int, int]) -> Callable[[Tensor], Tensor]:
        forward = module.forward

        def run(x: Tensor) -> Tensor:
            """x [..., R, in] -> [..., R, out]."""
            rows = x.shape[-2]
            height = heights.get(rows)
            if height is None or not self._context.canonical:
                return forward(x)
            if height == TRANSPOSED:
                transposed: Tensor = module.transposed(x)
                return transposed
            if x.numel() > rows * x.shape[-1]:
                return torch.cat([forward(part) for part in x.split(height, dim=-2)], dim=-2)
            # Cut as [R, in]: where the weight asks for no gradient, torch multiplies a part of
            # [1, R, in] as a batch, which is up to thirty times slower and has other bits. Each
            # part is a tensor of its own: a library may choose by where one begins.
            parts = x.reshape(rows, x.shape[-1]).split(height)
            out = torch.cat([forward(part.clone()[None]) for part in parts], dim=1)
            return out.view(*x.shape[:-1], out.shape[-1])

        # No other function's: fingerprints know it by its name, and leave it out.
        return lambda x: product(run, x, matrix(module), module.bias)
