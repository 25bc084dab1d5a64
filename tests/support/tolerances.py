"""How far results may be apart where they need not have the same bits: the one table, and the rule
for kernels. Determinism is compared by bits, never by these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """``abs(found - expected) <= atol + rtol * abs(expected)``, element by element."""

    rtol: float
    atol: float


# One fp32 operator whose sums run in another order.
OPERATOR = Tolerance(1.3e-6, 1e-5)
# One 16-bit operator, the same.
OPERATOR_16 = Tolerance(1e-5, 1e-2)
# Logits and scores of a whole fp32 model through another attention.
LOGITS = Tolerance(1e-5, 1e-4)
# Log-probabilities of such fp32 logits; of passes of other sizes; and of the same logits by another
# formula.
LOGPROBS = Tolerance(0.0, 1e-4)
OTHER_PASS = Tolerance(1e-5, 1e-8)
FORMULA = Tolerance(1e-6, 1e-5)


def units(count: int, *dtypes: torch.dtype) -> Tolerance:
    """``count`` units in the last place of the coarsest of ``dtypes``."""
    return Tolerance(count * max(torch.finfo(dtype).eps for dtype in dtypes), 0.0)


def close(found: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    """Whether two tensors of one shape and dtype are as near as ``tolerance`` says."""
    return torch.allclose(found, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def within_units(found: Tensor, exact: Tensor, count: int) -> bool:
    """Whether no error is as large as ``count`` units in the last place of 1."""
    error = (found.double() - exact).abs().max()
    return bool(error < count * torch.finfo(found.dtype).eps)


def near(expected: float | list[float], tolerance: Tolerance) -> Any:
    """What plain numbers that are as near as ``tolerance`` says are equal to."""
    return pytest.approx(expected, rel=tolerance.rtol, abs=tolerance.atol)


def assert_as_good_as_torch(out: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    """The kernel's error is at most twice that of torch in the same dtype (flash-attention's rule).

    Two units in the last place of fp32 are forgiven: they are what the oracle's own cast costs.
    """
    error = (out.double() - exact.double()).abs().max().item()
    allowed = (same_dtype.double() - exact.double()).abs().max().item()
    floor = 2 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item())
    assert error <= 2 * allowed + floor, f"error {error:.3e}, torch's {allowed:.3e}"
