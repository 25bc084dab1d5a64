"""What a module that runs another forward shares with the module that it stands in for.

Some share everything: weights, children, settings, hooks and class, so code that looks at the
module finds what it looked for. All share hooks: what is registered on one of the two while the
model is served stays when it is not. Knows no forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)
# What torch keeps on every module in tables of its own, and those of them that hold hooks.
TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
HOOKS = tuple(name for name in TABLES if "hooks" in name)


def share(stand_in: nn.Module, module: nn.Module, tables: Iterable[str] = HOOKS) -> None:
    """Let ``stand_in``, a new module, have the ``tables`` of ``module``."""
    vars(stand_in).update((name, vars(module)[name]) for name in tables)


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
