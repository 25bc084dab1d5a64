"""How the Triton kernels are compiled: one binary for an entry of the launch table.

Triton specialises on values and alignment of arguments; that changes layouts, and so the order of
additions. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

import triton


def kernel(unaligned: Collection[str] | None = ()) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit`` of a kernel with one binary for whatever numbers it is given: none of its
    run-time numbers is specialised on. unaligned: pointers that may begin at any address; None:
    all."""

    def made(function: Callable[..., None]) -> Any:
        parameters = signature(function).parameters.values()
        given = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
        pointers = [name for name in given if name.endswith("_ptr")]
        return triton.jit(
            do_not_specialize=[name for name in given if name not in pointers],
            do_not_specialize_on_alignment=pointers if unaligned is None else unaligned,
        )(function)

    return made
