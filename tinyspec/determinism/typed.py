"""Dataclasses from what JSON holds, with every type checked: files may hold anything."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def typed(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``: a dataclass with all of its fields, a tuple of any length, a dict, a
    union, or bool, int, finite float, str, None. Numbers that are keys are text in JSON.

    Raises TypeError naming kind and value.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if hints.keys() == value.keys():
            return kind(**{name: typed(hints[name], value[name]) for name in hints})  # type: ignore[operator]
    elif origin is tuple and isinstance(value, list):
        return tuple(typed(inner[0], entry) for entry in value)
    elif origin is dict and isinstance(value, dict):
        key, entry = inner
        return {typed_key(key, name): typed(entry, own) for name, own in value.items()}
    elif origin is UnionType:
        return typed(NoneType if value is None else inner[0], value)
    elif kind is float and type(value) in (float, int) and math.isfinite(value):
        return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(f"{value!r:.100} is not {kind}")


def typed_key(kind: Any, name: str) -> Any:
    """A key of a dict, int or str."""
    if kind is str:
        return name
    if kind is int and name.removeprefix("-").isdecimal():
        return int(name)
    raise TypeError(f"{name!r:.100} is not {kind}")
