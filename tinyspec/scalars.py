"""Numbers of numpy and torch as Python's, wherever a user may give them. Imports neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
