"""Poisoned allocations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN (integers: -77, bools: True), so that what stays unwritten shows."""
    empty: Callable[..., Tensor] = torch.empty

    def poison(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poison)
