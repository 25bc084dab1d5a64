"""Products of the interpreter whose rows do not depend on each other, on any CPU.

Triton's interpreter multiplies through NumPy's BLAS, which picks its kernels by the CPU and rounds
a row by its place. Here every product is added to its sum by itself, in order.
"""

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
