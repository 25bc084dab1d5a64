"""What modules, configs and hooks hold beside tensors, noted so that it is quickly compared.

Knows what was replaced or written to, not which of it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from tinyspec.determinism.model_state import BASE, LIBRARIES, OWN, named_parts, top_package
from tinyspec.model.wrappers import hooks_of

# Of the tables that torch gives every module, those that are compared here.
_COMPARED = ("_modules", "_forward_hooks", "_forward_pre_hooks")
_FORWARD = attrgetter("forward")
_ABSENT = object()


class _Table(NamedTuple):
    """A dict, list or set of a model; foreign: of the user's, which passes may change."""

    name: str
    held: Any
    foreign: bool


class _Attributes(NamedTuple):
    """The attributes of a module but those that torch gives every one; read: their values."""

    name: str
    held: dict[str, Any]
    foreign: bool
    keys: list[str]
    read: Callable[[dict[str, Any]], Any]


class ModelTables:
    """The tables of one model, as they were when this was made.

    modules: all of them. runs_user_code: whether passes run hooks or modules of no known library.
    """

    def __init__(self, model: nn.Module):
        named = dict(named_parts(model))
        self.modules = list(named.values())
        self._kinds = list(map(type, self.modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = list(map(_FORWARD, self._classes))
        self.runs_user_code, self._settled = False, False
        found = self._found(named)
        attributes = [_attributes(name, module) for name, module in named.items()]
        # Most of a library's are empty and stay so, which is quicker told.
        self._tables = [table for table in found if table.held or table.foreign]
        self._held = [table.held for table in self._tables]
        self._contents = list(map(_copy, self._held))
        self._empty = [table.held for table in found if not table.held and not table.foreign]
        for module in self.modules:
            self._empty += [t for t in (module._parameters, module._buffers) if not t]
        self._attributes = attributes
        self._holders = [each.held for each in attributes]
        self._note_attributes()
        self._foreign = [n for n, table in enumerate(self._tables) if table.foreign]
        self._foreign_modules = [n for n, each in enumerate(attributes) if each.foreign]

    def _found(self, named: dict[str, nn.Module]) -> list[_Table]:
        """All tables but the modules' attributes."""
        seen: set[int] = set()
        found: list[_Table] = []
        for name, module in named.items():
            package, hooks = top_package(type(module)), hooks_of(module)
            self.runs_user_code |= package not in LIBRARIES or any(map(_is_users, hooks))
            found += _inside(name, vars(module), package not in OWN, seen)
            for hook in hooks:
                owner = getattr(hook, "__self__", hook)
                if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
                    found += _all(f"a hook of {name}", vars(owner), True, seen)
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                found += _of_config(config, seen)
        shared = nn.modules.module
        for everywhere in (shared._global_forward_hooks, shared._global_forward_pre_hooks):
            self.runs_user_code |= bool(everywhere)
            found += _all("hooks of all modules", everywhere, False, seen)
        return found

    def _note_attributes(self) -> None:
        self._pairs = [(each.read, each.held) for each in self._attributes]
        self._values = [read(held) for read, held in self._pairs]
        self._lengths = list(map(len, self._holders))

    def same(self) -> bool:
        """Whether they are what they were; False also where that cannot be told."""
        try:
            return (
                self._kinds == list(map(type, self.modules))
                and not any(self._empty)
                and self._held == self._contents
                and self._lengths == list(map(len, self._holders))
                and self._values == [read(held) for read, held in self._pairs]
                and self._forwards == list(map(_FORWARD, self._classes))
            )
        except Exception:  # a value without a plain equality was replaced, or one is gone
            return False

    def absorb(self, everything: bool = False) -> set[str]:
        """Take what changed for what it was; names of the attributes.

        To call after a pass. Looks at what is the user's, the first time at everything.
        """
        everything = everything or not self._settled
        self._settled = True
        names: set[str] = set()
        for n in range(len(self._tables)) if everything else self._foreign:
            held, content = self._held[n], self._contents[n]
            if not _equal(held, content):
                names |= _changed(self._tables[n].name, held, content)
                self._contents[n] = _copy(held)
        known = len(names)
        for n in range(len(self._attributes)) if everything else self._foreign_modules:
            each = self._attributes[n]
            values = {key: each.held.get(key, _ABSENT) for key in _own(each.held)}
            before = dict(zip(each.keys, self._values[n], strict=False))
            if len(values) != len(before) or not _equal(values, before):
                names |= _changed(each.name, values, before)
                self._attributes[n] = _attributes(each.name, self.modules[n])
        if len(names) > known:
            self._note_attributes()
        return names


def _own(held: dict[str, Any]) -> list[str]:
    return [key for key in held if key not in BASE]


def _attributes(name: str, module: nn.Module) -> _Attributes:
    keys = _own(vars(module))
    # Two more, which no mode changes, so that a tuple is read also of one or none.
    read = itemgetter(*keys, *_COMPARED[:2])
    foreign = top_package(type(module)) not in OWN
    return _Attributes(name, vars(module), foreign, keys, read)


def _changed(name: str, held: Any, content: Any) -> set[str]:
    if not isinstance(held, dict) or not isinstance(content, dict):
        return set()
    keys = {**held, **content}
    found = [k for k in keys if held.get(k, _ABSENT) is not content.get(k, _ABSENT)]
    return {f"{name}.{key}".lstrip(".") for key in found}


def _is_users(hook: Any) -> bool:
    return top_package(hook if hasattr(hook, "__qualname__") else type(hook)) not in LIBRARIES


def is_users(module: nn.Module) -> bool:
    """Whether its class, a hook or a forward of its own comes from no known library."""
    own = vars(module).get("forward", type(module))
    return any(map(_is_users, (type(module), own, *hooks_of(module))))


def _copy(table: Any) -> Any:
    # As a plain dict: an OrderedDict is slower to compare.
    return dict(table) if isinstance(table, dict) else table.copy()


def _equal(held: Any, content: Any) -> bool:
    try:
        return bool(held == content)
    except Exception:  # tensors have no plain equality
        return False


def _all(name: str, table: Any, foreign: bool, seen: set[int]) -> Iterator[_Table]:
    """A dict, list or set and those inside of it, each once."""
    if id(table) not in seen:
        seen.add(id(table))
        yield _Table(name, table, foreign)
        yield from _inside(name, table, foreign, seen)


def _inside(name: str, table: Any, foreign: bool, seen: set[int]) -> Iterator[_Table]:
    """The dicts, lists and sets inside of one."""
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in items:
        if isinstance(value, (dict, list, set)) and (key not in BASE or key in _COMPARED):
            yield from _all(f"{name}.{key}", value, foreign, seen)


def _of_config(config: PreTrainedConfig, seen: set[int]) -> Iterator[_Table]:
    """What a config and the configs inside of it hold."""
    yield from _all("config", vars(config), False, seen)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig) and id(vars(value)) not in seen:
            yield from _of_config(value, seen)
