"""A module that runs another forward with everything that the module it stands in for holds.

Weights, children, settings, hooks and class are shared, so code that looks at the module finds what
it looked for. Knows no forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


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
