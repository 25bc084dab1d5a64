"""Comparing a module with its stand-in: inputs, equality of bits or of errors, kinds of modules.

Weights are scratch weights: a model's own that are all zero or one could hide a difference. Knows
modules; neither attention nor norms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tinyspec.errors import named
from tinyspec.model.scratch_weights import scratch_weights

logger = logging.getLogger("tinyspec")
T = TypeVar("T")
ROWS = 64
# Of so many sizes are the rows, one after the other.
SIZES = 4
# Of a result, at most.
ROUNDINGS = 2
# Attributes in which modules of one kind may differ; children are listed by themselves.
APART = ("layer_idx", "training", "_modules")


def probe_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Random rows [ROWS, *shape] of many magnitudes, so that another rounding or epsilon shows."""
    generator = torch.Generator("cpu").manual_seed(ROWS)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x = torch.randn(ROWS, *shape, generator=generator, **floats)
    x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator, device="cpu")
    sizes = torch.tensor([1.0, 1e2 if dtype == torch.float16 else 1e4, 1e-2, 1e-4], **floats)
    sizes = sizes[torch.arange(ROWS, device="cpu") % len(sizes)]
    return (x * sizes.view(-1, *[1] * len(shape))).to(device, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, and not constant: that would prove nothing."""
    if a.shape != b.shape or a.dtype != b.dtype or not len(a):
        return False
    same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return same and bool(a.min() != a.max())


def close(found: Tensor, own: Tensor, roundings: int = ROUNDINGS) -> bool:
    """Whether [1, ROWS, N] are equal up to so many roundings, by the 2-norm of the probe rows of
    each size."""
    if found.shape != own.shape or found.dtype != own.dtype:
        return False

    def sizes(x: Tensor) -> Tensor:
        return x.double().view(ROWS // SIZES, SIZES, -1).norm(dim=(0, 2))

    kind = torch.finfo(own.dtype)
    # Below ``tiny`` numbers are as far apart as there.
    bound = roundings * kind.eps * (sizes(own) + kind.tiny * (own.numel() / SIZES) ** 0.5)
    return bool((sizes(found.double() - own.double()) <= bound).all())


def kind_of(module: nn.Module) -> Hashable:
    """Classes, settings and shapes of a module and its children: equal for modules that differ only
    in ``layer_idx`` and in the values of their weights."""
    return tuple((name, own_kind(part)) for name, part in module.named_modules())


@cache
def tell(name: str, why: str, level: int = logging.WARNING) -> None:
    """Log, once a process, why modules of a class run as they are."""
    logger.log(level, "%s has no stand-in: %s", name, why)


def by_kind(
    modules: Iterable[nn.Module], find: Callable[[nn.Module], T | None], causes: list[str]
) -> list[tuple[nn.Module, T]]:
    """Of each module what ``find`` returns of the first of its kind with scratch weights; without
    those of which that is None, or raises, which the log tells and ``causes`` get."""
    found: dict[Hashable, T | None] = {}
    kinds = [(module, kind_of(module)) for module in modules]
    for module, kind in kinds:
        if kind not in found:
            found[kind] = None
            try:
                with scratch_weights(module):
                    found[kind] = find(module)
            except Exception as error:  # of whatever kind
                name, why = type(module).__name__, f"trying it raised {named(error)}"
                causes.append(f"{name}: {why}")
                tell(name, why)
    return [(module, own) for module, kind in kinds if (own := found[kind]) is not None]


def own_kind(module: nn.Module) -> Hashable:
    """Class, settings and shapes of a module without its children."""
    settings = {k: v for k, v in vars(module).items() if k not in APART}
    return type(module), described(settings)


def described(value: Any) -> Hashable:
    """A hashable description: tensors by shape and dtype, other objects by identity."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return tuple((key, described(held)) for key, held in value.items())
    if isinstance(value, (list, tuple, set)):
        return type(value), *map(described, value)
    return "object", id(value)


def eps_name(norm: nn.Module) -> str:
    """The attribute that holds a norm's epsilon."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
