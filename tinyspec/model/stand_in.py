"""Modules that run another forward than the module of a shadow that they stand in for.

They share everything with it: weights, children, settings, hooks and class, so code that looks at
the module finds what it looked for. Knows no forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from torch import nn

from tinyspec.model.shadow import TABLES

M = TypeVar("M", bound=nn.Module)


def share(stand_in: nn.Module, module: nn.Module) -> None:
    """Let ``stand_in``, a new module, have the weights, children and hooks of ``module``."""
    vars(stand_in).update((name, vars(module)[name]) for name in TABLES)
    stand_in.training = False


class FusedModule(nn.Module):
    """Base of stand-ins that compute by kernels what parts of theirs would."""

    def bypassed(self) -> Iterable[nn.Module]:
        """The modules whose forward does not run, or not always."""
        raise NotImplementedError


def standing_in(module: nn.Module, kind: type[M], **own: Any) -> M:
    """A ``kind`` that is of the class of ``module`` as well, and shares everything with it.

    own: attributes that only the stand-in has, not registered as modules.
    """
    both: Any = kind, type(module)  # types are hashable, which mypy does not know
    stand_in: M = shell(module, _class(*both))
    vars(stand_in).update(own)
    return stand_in


def shell(module: nn.Module, kind: type[M]) -> M:
    """A module of class ``kind`` with all attributes of ``module``, without a forward of its own.

    Tables of parameters and children are the same objects.
    """
    made = object.__new__(kind)
    vars(made).update(vars(module))
    for call in ("forward", "_compiled_call_impl"):
        vars(made).pop(call, None)
    return made


@cache
def _class(kind: type, original: type) -> Any:
    return type(original.__name__, (kind, original), {"__module__": kind.__module__})
