"""Whether many tensors have the types, shapes, strides and wishes for gradients that they had.

torch's guards of compiled code compare all of it in one call, and are private to torch: they are
used where they are there and are proved to see every change. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_SHAPE, _ASKS_FOR_GRADIENTS = attrgetter("shape"), attrgetter("requires_grad")
Guard = Callable[..., bool]


class TensorForms:
    """The forms of ``tensors``, of which none comes twice, as they were when this was made."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors
        self._guard = _guard(tensors) if guards_tell() else None
        self._listed = _listed(tensors) if self._guard is None else None

    def same(self) -> bool:
        """Whether they are what they were."""
        if self._guard is None:
            return self._listed == _listed(self._tensors)
        return _fits(self._guard, self._tensors)


def _listed(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [list(map(of, tensors)) for of in (_SHAPE, Tensor.stride, _ASKS_FOR_GRADIENTS)]


def _guard(tensors: Sequence[Tensor]) -> Guard:
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    with torch.inference_mode(False), torch.enable_grad():
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Guard = made.check
    return check


def _fits(guard: Guard, tensors: Sequence[Tensor]) -> bool:
    # With gradients off, as in passes, no tensor would seem to ask for one.
    with torch.inference_mode(False), torch.enable_grad():
        return guard(*tensors)


@cache
def guards_tell() -> bool:
    """Whether guards see every change of a form, and none where there is none."""
    changes = (_transpose, _ask_for_gradients, _to_double, _resize)
    try:
        return all(map(_is_seen, changes))
    except Exception:  # of another version of torch: there are none, or others
        return False


def _is_seen(change: Callable[[Tensor], object]) -> bool:
    """Whether a guard sees the change of one of three tensors, in passes and elsewhere."""
    with torch.inference_mode(False):
        tensors = [torch.zeros(4, 4, device="cpu") for _ in range(3)]
        guard, seen = _guard(tensors), []
        for _ in range(2):
            with torch.inference_mode():
                seen.append(not _fits(guard, tensors))
            seen.append(not _fits(guard, tensors))
            change(tensors[1])
    return seen == [False, False, True, True]


def _transpose(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def _ask_for_gradients(tensor: Tensor) -> None:
    tensor.requires_grad = not tensor.requires_grad


def _to_double(tensor: Tensor) -> None:
    tensor.data = tensor.data.double()


def _resize(tensor: Tensor) -> None:
    tensor.resize_(2, 8)
