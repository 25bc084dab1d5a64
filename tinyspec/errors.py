"""What tinyspec raises beside ValueError."""

from __future__ import annotations


class TinyspecError(Exception):
    """Base of tinyspec's own errors."""


class DeterminismError(TinyspecError):
    """The contract of ``deterministic=True`` cannot be kept here; the message says why and what
    would help."""


class UnsupportedModelError(TinyspecError):
    """The model cannot be served; the message names the module or setting in the way."""


def unsupported(model: object, reason: str) -> UnsupportedModelError:
    """An UnsupportedModelError in the one form that all have."""
    return UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """A ValueError in the one form all bad arguments take: field, value, what is allowed."""
    return ValueError(f"{field}={value!r} is not allowed: {allowed}")
