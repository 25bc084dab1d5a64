"""The methods that a model has when tinyspec does not serve it. Knows no engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from tinyspec.drop_in.served import ADDED_ARGUMENTS


def own_method(
    model: PreTrainedModel, name: str, before: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A method of an unpatched model: ``before``, set on the model, or its class's."""
    own: Callable[..., Any] = before or getattr(type(model), name).__get__(model)
    return own


def served_signature(original: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``original`` and the arguments that tinyspec adds."""
    signature = inspect.signature(original)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = list(signature.parameters.values())
    parameters += [inspect.Parameter(name, kind, default=None) for name in ADDED_ARGUMENTS]
    # **kwargs come last; sorted keeps the order of all others.
    return signature.replace(parameters=sorted(parameters, key=lambda p: p.kind))


class ServedMethod:
    """A method of ``model`` that tinyspec serves; copies of the model get its own back."""

    def __init__(self, model: PreTrainedModel, name: str, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._model, self._name, self._function = model, name, function
        self._before = vars(model).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return own_method, (self._model, self._name, self._before)
