"""Numbers of numpy and torch as Python's, wherever a user may give them, and settings that are
checked by a table. Imports neither."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any

from tinyspec.errors import refuse, refuse_other_names

# Types that most values have, and that are what they should be.
_OWN = (int, float, bool, str, tuple, type(None))


def plain(value: Any) -> Any:
    """A number of numpy, or a tensor or array without dimensions, as Python's; others unchanged."""
    if type(value) in _OWN or getattr(value, "ndim", None) != 0:
        return value
    return value.item()


def plain_list(values: Iterable[Any]) -> list[Any]:
    """``values`` with Python's numbers; rows of a tensor or array as lists."""
    if is_array(values):
        return list(values.tolist())  # type: ignore[attr-defined]
    return [value if type(value) is int else plain(value) for value in values]


def is_array(value: Any) -> bool:
    """Whether it is a tensor or array with dimensions."""
    ndim = getattr(value, "ndim", None)
    return isinstance(ndim, int) and ndim > 0 and hasattr(value, "tolist")


def is_int(value: object) -> bool:
    """Whether it is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold; an integer may be too large for one."""
    real = is_int(value) or isinstance(value, float)
    return real and abs(value) <= sys.float_info.max


# What a setting is kept as, of its field and value; raises ValueError for what is not allowed.
Reader = Callable[[str, Any], Any]


def allowed(words: str, holds: Callable[[Any], bool]) -> Reader:
    """Values for which ``holds``, as they are."""

    def read(field: str, value: Any) -> Any:
        if not holds(value):
            raise refuse(field, value, words)
        return value

    return read


def integers(least: int, more: str = "", bits: int = 63) -> Reader:
    """Integers from ``least`` on; more: words behind."""
    words = f"an integer of at least {least}, below 2**{bits}{more}"
    return allowed(words, lambda x: is_int(x) and least <= x < 2**bits)


def numbers(words: str, holds: Callable[[Any], bool]) -> Reader:
    """Finite numbers."""
    return allowed(words, lambda x: is_finite(x) and holds(x))


def one_of(values: tuple[str, ...]) -> Reader:
    """Names."""
    return allowed(f"one of {values}", lambda x: isinstance(x, str) and x in values)


def switch(more: str = "") -> Reader:
    """Booleans; more: words behind."""
    return allowed(f"True or False{more}", lambda x: isinstance(x, bool))


def setting(default: Any, read: Reader, **how: Any) -> Any:
    """A field of Settings, and how its values are read. how: of ``dataclasses.field``."""
    return field(default=default, metadata={"read": read}, **how)


class Settings:
    """Base of a frozen dataclass of fields by ``setting``. Numbers of numpy and torch become
    Python's; each value is read, unless it is None and the field's type allows it."""

    def __new__(cls, **given: Any) -> Any:
        refuse_other_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            given = getattr(self, one.name)
            value = plain(given)
            if not (value is None and "None" in str(one.type)):
                value = one.metadata["read"](one.name, value)
            if value is not given:
                object.__setattr__(self, one.name, value)
