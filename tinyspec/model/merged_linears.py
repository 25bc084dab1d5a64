"""Linear layers of the same rows: one launch where the ``linear`` kernel serves all of them.

Their weights stay where they are. Whoever else serves them is called layer by layer; the bits are
those of the layers by themselves either way. Knows linears, not what they project to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tinyspec.kernels.backend import Kernels
from tinyspec.model.linears import KernelLinear
from tinyspec.model.wrappers import has_hooks


def products(x: Tensor, linears: Sequence[nn.Module], kernels: Kernels | None) -> list[Tensor]:
    """x [..., in] -> what each of ``linears`` makes of it, [..., out]."""
    if kernels is None or not all(map(_can_be_merged, linears)):
        return [linear(x) for linear in linears]
    rows = x.reshape(-1, x.shape[-1])
    weights = [linear.weight for linear in linears]
    out = kernels.merged_linear(rows, weights, [linear.bias for linear in linears])
    return [part.view(*x.shape[:-1], -1) for part in out]


def _can_be_merged(linear: nn.Module) -> bool:
    """Whether calling a module is one launch of the kernel and nothing else."""
    plain = type(linear) is KernelLinear and not linear.transposed
    return plain and not has_hooks(linear) and "forward" not in vars(linear)
