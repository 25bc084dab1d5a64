"""Writes of the exchange between what a model holds itself and what serves it.

Every write has two known sides and is done only where the other side stands. An exchange that was
cut off between any two writes can so be repeated or undone; what somebody else has put in a place
since stays. Knows neither attention nor when a model is served.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class _Absent:
    """Stands for no entry."""


ABSENT: Any = _Absent()


def write(table: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry, or remove it (``ABSENT``): every write of an exchange is made here."""
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


class Place(NamedTuple):
    """An entry of a table of the model: what the model has there itself, and what serves."""

    table: dict[str, Any]
    key: str
    own: Any
    served: Any

    def put_in(self) -> None:
        """Own -> served."""
        self._exchange(self.own, self.served)

    def take_out(self) -> None:
        """Served -> own."""
        self._exchange(self.served, self.own)

    def _exchange(self, before: Any, after: Any) -> None:
        if self.table.get(self.key, ABSENT) is not before:
            return
        if isinstance(before, nn.Module) and isinstance(after, nn.Module):
            hand_over(before, after)
        write(self.table, self.key, after)


def hand_over(before: nn.Module, after: nn.Module) -> None:
    """Give ``after`` the parameters, the training mode and the kind of hooks for gradients that
    ``before`` has now; tables of hooks are shared."""
    held = after._parameters
    for name, own in before._parameters.items():
        if name in held and held[name] is not own:
            write(held, name, own)
    for name in ("training", "_is_full_backward_hook"):
        own, table = getattr(before, name), vars(after)
        if name in table and table[name] is not own:  # what is compiled asks the module inside
            write(table, name, own)
