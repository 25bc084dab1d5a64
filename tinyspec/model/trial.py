"""Comparing a module with its stand-in: inputs, equality of bits or of errors, kinds of modules.

Knows modules, not what stands in for which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tinyspec.errors import named
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.model.attention import AttentionContext
from tinyspec.model.checksum import same_bits

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


def alike(found: Tensor, own: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, and not constant: that would prove nothing."""
    if found.shape != own.shape or found.dtype != own.dtype or not len(own):
        return False
    return same_bits(found, own) and bool(own.min() != own.max())


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
    found = []
    for name, part in module.named_modules():
        settings = {k: v for k, v in vars(part).items() if k not in APART}
        found.append((name, type(part), described(settings)))
    return tuple(found)


def begin_pass(context: AttentionContext, device: torch.device) -> None:
    """Begin a pass of one sequence of ROWS rows on one page."""
    rows = torch.arange(ROWS, device=device)
    context.begin(AttentionMetadata.of([(0, ROWS)], [[0]], ROWS, device), rows, rows)


@cache
def tell(name: str, why: str, level: int = logging.WARNING) -> None:
    """Log, once a process, why modules of a class run as they are."""
    logger.log(level, "%s has no stand-in: %s", name, why)


class Trials:
    """What was found of modules by trying them, those of one kind once.

    quiet: errors that are no news. causes: of the others that were raised, as the log told them.
    """

    def __init__(self, quiet: tuple[type[Exception], ...] = ()):
        self._quiet, self._found = quiet, dict[Hashable, Any]()
        self.causes: list[str] = []

    def of(self, module: nn.Module, find: Callable[[], T | None], *given: Hashable) -> T | None:
        """What ``find`` returned for the first module of its kind that was called alike, as
        ``given`` says; None where it raised."""
        key = kind_of(module), *given
        if key not in self._found:
            self._found[key] = None
            try:
                self._found[key] = find()
            except self._quiet:
                pass
            except Exception as error:  # of whatever kind
                name, why = type(module).__name__, f"trying it raised {named(error)}"
                self.causes.append(f"{name}: {why}")
                tell(name, why)
        found: T | None = self._found[key]
        return found


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
