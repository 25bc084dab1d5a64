"""A method of a model that tinyspec serves, put on the model itself, and taken off it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel


class Method:
    """A method of ``model`` that tinyspec serves. Copies of the model, in memory or on disk, get
    their own back."""

    def __init__(self, model: PreTrainedModel, name: str, served: Callable[..., Any]):
        self._model, self._name, self._served = model, name, served
        self.before = vars(model).get(name)
        self.original: Callable[..., Any] = getattr(model, name)
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._served(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._model, self._name, self.before)

    def put_in(self) -> None:
        """Let the model's method be this."""
        vars(self._model)[self._name] = self

    def take_out(self) -> None:
        """Give the model its own back, also from under another one that was put over this."""
        table = vars(self._model)
        over = table.get(self._name)
        if over is self:
            del table[self._name]
            if self.before is not None:
                table[self._name] = self.before
            return
        while isinstance(over, Method) and over.before is not self:
            over = over.before
        if isinstance(over, Method):
            over.before = self.before


def _own_method(model: PreTrainedModel, name: str, before: Callable[..., Any] | None) -> Any:
    """A method of an unpatched model: ``before``, set on the model, or its class's."""
    return before or getattr(type(model), name).__get__(model)
