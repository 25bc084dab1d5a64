"""Products of the interpreter whose rows do not depend on each other, on any CPU, and what it
looks up again at every operation, once.

Triton's interpreter multiplies through NumPy's BLAS, which picks its kernels by the CPU and rounds
a row by its place. Here every product is added to its sum by itself, in order.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np


def products_in_order() -> None:
    """Let interpreted ``tl.dot`` add the products of each output one after the other."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    own = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype not in (np.float16, np.float32):
            return own(self, a, b, d, *options)
        left, right = (x.data.astype(d.data.dtype) for x in (a, b))
        total = np.zeros_like(d.data)
        with np.errstate(invalid="ignore", over="ignore"):
            for k in range(left.shape[-1]):
                total += left[..., :, k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def quick_look_ups() -> None:
    """The language's functions are replaced once a launch, not at every call of a helper."""
    from triton.language import core
    from triton.runtime import interpreter

    dtype_of = interpreter._get_np_dtype
    dtypes: dict[str, np.dtype[Any]] = {}

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]

    def patch(package: Any, *how: Any) -> None:
        for name, member in builtins(package):
            if getattr(package, name) is not member:
                return  # by the launch that this call is a part of
            interpreter._patch_attr(package, name, member, *how)

    def known_dtype(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        return dtypes[name] if name in dtypes else dtypes.setdefault(name, dtype_of(kind))

    interpreter._patch_builtin, interpreter._get_np_dtype = patch, known_dtype
