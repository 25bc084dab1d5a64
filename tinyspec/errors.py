"""The errors that tinyspec raises, besides ValueError."""

from __future__ import annotations

# Characters of a value in a message.
LONGEST = 400


class TinyspecError(Exception):
    """Base of tinyspec's own errors."""


class DeterminismError(TinyspecError):
    """``deterministic=True`` cannot be served here; the message gives the reason and the remedy."""


class UnsupportedModelError(TinyspecError):
    """The model cannot be served; the message names the module or setting that prevents it."""


class UnsupportedEnvironmentError(TinyspecError, RuntimeError):
    """No model can be served as the process is set up; the message says what to set."""


def unsupported(model: object, reason: str) -> UnsupportedModelError:
    """An UnsupportedModelError in the form that all have."""
    return UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """A ValueError in the form of all bad arguments: field, value, what is allowed."""
    shown = repr(value)
    if len(shown) > LONGEST:
        shown = f"{shown[: LONGEST - 3]}..."
    return ValueError(f"{field}={shown} is not allowed: {allowed}")
