"""A shadow of a model: new module objects over the same Parameters and buffers.

Its modules may be replaced, hooked and run; the model that it was made of sees nothing of it, and
can be trained, saved, copied and run at any time. Parameters and buffers are shared; the tables of
these, of children and of hooks, plain containers and configs are the shadow's own.
All else is shared unless a module of the model is found inside, then it is made anew around the
shadow's. References through globals and class attributes are not followed. Knows no attention.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from tinyspec.model.wrappers import Method, is_compiled, own_forward

# What torch keeps on every module in tables of its own.
TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
CONTAINERS = (dict, OrderedDict, list, set)
# What nothing of a model is found inside of, or what is not walked.
LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), type, ModuleType, Tensor),
    *(torch.dtype, torch.device, torch.jit.ScriptModule, GenerationConfig),
)
# How deep objects inside of objects are looked at, and the longest container that is; what is no
# object of its own there.
DEPTH, LONGEST = 4, 4096
THIN = (partial, CellType, MethodType)


class Shadow:
    """The shadows of ``root`` and all modules inside of it.

    Wrappers of torch.compile are left out, and what compiles or wraps calls in autocast. All of it
    is in eval mode.
    """

    def __init__(self, root: nn.Module):
        self._inside = {id(module) for module in root.modules()}
        self._made: dict[int, Any] = {}
        # Ids are keys as long as what they are of is kept.
        self._kept: list[Any] = [root]
        self._configs: dict[int, Any] = {}
        self._nothing: set[tuple[int, int]] = set()
        self.of(root)

    def of(self, module: Any) -> Any:
        """The shadow of one of the modules."""
        while is_compiled(module):
            module = module._orig_mod
        if (made := self._made.get(id(module))) is not None or isinstance(
            module, torch.jit.ScriptModule
        ):
            return module if made is None else made
        made = object.__new__(type(module))
        self._keep(module, made)
        vars(made).update(self._attributes(module))
        return made

    def _keep(self, own: Any, made: Any) -> None:
        self._kept.append(own)
        self._made[id(own)] = made

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        table = dict(vars(module))
        for name, held in table.items():
            if name in TABLES and isinstance(held, set):
                yield name, held.copy()
            elif name in TABLES:
                yield name, type(held)((key, self._found(x, DEPTH)) for key, x in held.items())
            elif name == "training":
                yield name, False
            elif name == "forward":
                if (before := own_forward(module)) is not None:
                    yield name, self._found(before, DEPTH)
            elif name == "_compiled_call_impl":
                yield name, None
            elif not isinstance(held, Method):  # what ``patch`` sets on a model
                yield name, self._copied(held)

    def _copied(self, held: Any) -> Any:
        """An attribute of a module: plain containers are copied, whatever is inside."""
        if type(held) not in CONTAINERS or len(held) > LONGEST:
            return self._found(held, DEPTH)
        if id(held) not in self._made:
            self._keep(held, made := type(held)())
            if isinstance(held, dict):
                made.update((key, self._copied(x)) for key, x in list(held.items()))
            else:
                (made.extend if isinstance(made, list) else made.update)(map(self._copied, held))
        return self._made[id(held)]

    def _config(self, config: Any) -> Any:
        """One private copy of each config; those inside of others are theirs."""
        try:
            return copy.deepcopy(config, self._configs)
        except Exception:  # of something inside that cannot be copied
            self._kept.append(config)
            return self._configs.setdefault(id(config), copy.copy(config))

    def _found(self, held: Any, depth: int) -> Any:
        """``held``, or what stands for it where a module of the model is inside."""
        if isinstance(held, nn.Module):
            return self.of(held) if id(held) in self._inside else held
        if isinstance(held, PreTrainedConfig):
            return self._config(held)
        if isinstance(held, Method):  # in what a library put around it
            held = held.original
        ends = not depth and not isinstance(held, CellType)  # what a function closes over is its
        if isinstance(held, LEAVES) or ends or _is_own(held):
            return held
        if id(held) not in self._made and (id(held), depth) not in self._nothing:
            self._nothing.add((id(held), depth))  # as far as is known while it is looked at
            self._kept.append(held)
            parts, make = _taken_apart(held)
            found = [self._found(x, depth - (type(held) not in THIN)) for x in parts]
            if not all(map(is_, found, parts)):
                with suppress(Exception):  # it allows no copies
                    self._made[id(held)] = make(found)
        return self._made.get(id(held), held)


def _taken_apart(held: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What is looked at of something, and what makes another of it with other such parts."""
    kind = type(held)
    if isinstance(held, FunctionType):
        cells = held.__closure__ or ()
        return [*cells, held.__defaults__, vars(held)], partial(_function, held)
    if isinstance(held, CellType):
        with suppress(ValueError):  # it is empty
            return [held.cell_contents], lambda found: CellType(*found)
    elif isinstance(held, MethodType):
        return [held.__func__, held.__self__], lambda found: MethodType(*found)
    elif isinstance(held, partial):
        return [held.func, held.args, held.keywords, vars(held)], _partial
    elif isinstance(held, (list, tuple, set, frozenset)):
        make = kind._make if hasattr(held, "_fields") else kind
        return list(held) if len(held) <= LONGEST else [], make
    else:
        table = held if isinstance(held, dict) else getattr(held, "__dict__", None)
        if isinstance(table, dict) and (table is not held or len(held) <= LONGEST):
            return list(table.values()), partial(_with_values, held, list(table))
    return [], kind


def _function(held: FunctionType, parts: list[Any]) -> FunctionType:
    """New cells for what holds modules; the others stay, with what is written to them."""
    *cells, defaults, own = parts
    closure = tuple(cells) or None
    made = FunctionType(held.__code__, held.__globals__, held.__name__, defaults, closure)
    made.__kwdefaults__ = held.__kwdefaults__
    made.__qualname__, made.__module__ = held.__qualname__, held.__module__
    vars(made).update(own)
    return made


def _partial(parts: list[Any]) -> Any:
    func, args, kwargs, own = parts
    made = partial(func, *args, **kwargs)
    vars(made).update(own)
    return made


def _with_values(held: Any, keys: list[Any], values: list[Any]) -> Any:
    """A copy of a dict, or of an object with other attributes."""
    made = copy.copy(held)
    (made if isinstance(held, dict) else vars(made)).update(zip(keys, values, strict=True))
    return made


def _is_own(held: Any) -> bool:
    """Whether something is of this package, such as the ``generate`` of a patched model."""
    package = (type(held).__module__ or "").partition(".")[0]
    return not isinstance(held, nn.Module) and package == "tinyspec"


M = TypeVar("M", bound=nn.Module)


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
