"""Numbers of numpy and torch as Python's, wherever a user may give them, and settings that are
checked by a table. Imports neither."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

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


class Allowed(NamedTuple):
    """What a setting may be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


SWITCH = Allowed("True or False", lambda x: isinstance(x, bool))


def integers(least: int, more: str = "", bits: int = 63) -> Allowed:
    """Integers from ``least`` on; more: words behind."""
    words = f"an integer of at least {least}, below 2**{bits}{more}"
    return Allowed(words, lambda x: is_int(x) and least <= x < 2**bits)


def numbers(words: str, holds: Callable[[Any], bool]) -> Allowed:
    """Finite numbers."""
    return Allowed(words, lambda x: is_finite(x) and holds(x))


def one_of(values: tuple[str, ...]) -> Allowed:
    """Names."""
    return Allowed(f"one of {values}", lambda x: isinstance(x, str) and x in values)


class Settings:
    """Base of a frozen dataclass of settings. Numbers of numpy and torch become Python's; each
    value is what ``ALLOWED`` says of its field, or None where the field's type does."""

    ALLOWED: ClassVar[dict[str, Allowed]]

    def __new__(cls, **given: Any) -> Any:
        refuse_other_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if (own := plain(value)) is not value:
                self._set(field.name, value := own)
            allowed, may_be_none = self.ALLOWED.get(field.name), "None" in str(field.type)
            if allowed is None or (value is None and may_be_none) or allowed.holds(value):
                continue
            words = f"{allowed.words}, or None" if may_be_none else allowed.words
            raise refuse(field.name, value, words)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)
