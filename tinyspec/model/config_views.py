"""Views of configs that name other implementations, for the modules of one model.

Models that were made of one config share it. A view shares all values with its config, in both
directions, but for the implementations of attention and experts: only the model whose modules hold
the view runs them, and every other model is left as it is. A copy of a view is one of the config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from tinyspec.model.private_names import ATTENTION_CHOICE, EXPERTS_CHOICE


class _Shadow:
    """An attribute of a view that has another value than the config's, until somebody sets it."""

    def __init__(self, name: str, values: dict[str, Any], table: dict[str, Any]):
        self._name, self._values, self._table = name, values, table

    def __get__(self, view: Any, kind: Any = None) -> Any:
        found = self._values if self._name in self._values else self._table
        return found[self._name]

    def __set__(self, view: Any, value: Any) -> None:
        self._values.pop(self._name, None)
        self._table[self._name] = value


class _View:
    """Base of views."""

    tinyspec_values: dict[str, Any]
    tinyspec_config: list[Any]

    def __init_subclass__(cls) -> None:
        pass  # not what transformers does to a new kind of config

    def __copy__(self) -> Any:
        return copy.copy(self.tinyspec_config[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.tinyspec_config[0], memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _same, (self.tinyspec_config[0],)


def _same(config: Any) -> Any:
    return config


def _view(config: Any, names: Iterable[str]) -> Any:
    kind, table, values = type(config), vars(config), dict[str, Any]()
    content: dict[str, Any] = {name: _Shadow(name, values, table) for name in names}
    content |= {"tinyspec_values": values, "tinyspec_config": [config]}
    # What a config asks of its class is asked of the config's own.
    content |= {"__class__": property(lambda self: kind), "__module__": kind.__module__}
    make: Any = type(kind)
    view: Any = object.__new__(make(kind.__name__, (_View, kind), content))
    object.__setattr__(view, "__dict__", table)
    return view


class ConfigViews:
    """A view of each of ``configs`` that chooses implementations, the others are left out; where
    one holds another, its view holds the other's view."""

    def __init__(self, configs: Iterable[Any]):
        choosing = (c for c in configs if ATTENTION_CHOICE in getattr(c, "__dict__", {}))
        self.configs = list({id(config): config for config in choosing}.values())
        self._views: dict[int, Any] = {}
        for config in self.configs:
            inner = [name for name, held in vars(config).items() if self._has(held)]
            choices = [name for name in (ATTENTION_CHOICE, EXPERTS_CHOICE) if name in vars(config)]
            self._views[id(config)] = _view(config, [*choices, *inner])
        for config in self.configs:
            values = self.of(config).tinyspec_values
            values |= {n: self.of(held) for n, held in vars(config).items() if self._has(held)}

    def _has(self, held: Any) -> bool:
        return any(held is config for config in self.configs)

    def of(self, config: Any) -> Any:
        """The view of one of ``configs``; anything else is returned as it is."""
        return self._views.get(id(config), config)

    def choose(self, config: Any, choice: str, implementation: str) -> None:
        """Let the view of ``config`` name another implementation; ``choice``: the attribute."""
        if (view := self.of(config)) is not config:
            view.tinyspec_values[choice] = implementation
