"""Do the shapes of a model's matmuls depend on what its rows hold? Then no probe can prove them.

A pass is run again and again with the same rows in the same places, of other tokens each time, and
every matmul is noted: in which module, of which shapes, and by which group sizes where it is one of
many matrices. Experts that the linear kernel serves are left out: their rows need no proof. Goes by
what happens, not by what modules are called. Knows matmuls that go through torch's dispatcher; not
what a library launches by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tinyspec.determinism.probe_results import Unsound
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.quantized import is_packed

REMEDY = (
    "deterministic=True serves experts with plain weights that call transformers' experts "
    "interface, unless linear='never'; run this model's requests without it"
)
# Parts of operators' names: mm, addmm, bmm, baddbmm, _grouped_mm, linear, matmul, addmv, dot, conv.
MATMULS = ("mm", "linear", "matmul", "mv", "dot", "conv")
# Operators of one tensor whose rounding may depend on an element's place (its vector or what is
# left over), or on how a sum is cut: where no module of rows does them, they are probed alone.
STEPS = {
    *("sigmoid", "silu", "gelu", "tanh", "softplus", "log_sigmoid_forward", "mish", "elu", "erf"),
    *("exp", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "cos", "sum", "mean", "cumsum"),
    *("_softmax", "_log_softmax", "linalg_vector_norm"),
}


@dataclass(frozen=True)
class Matmul:
    """One call: where, what, shapes of all tensors, values of those that hold group sizes."""

    module: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowStep:
    """What a module that is neither linear nor element-wise does to a pass's rows by one operator,
    with parameters at most: a router's matmul or sigmoid, say."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    run: Callable[[Tensor], Tensor]  # of [1, R, *shape]
    weight: Tensor | None = None  # [out, in] of a matmul


class Matmuls(TorchDispatchMode):
    """Notes the matmuls of ``model``, and its steps of ``rows`` rows, while it is on, but for those
    inside of modules ``passed``."""

    def __init__(self, model: nn.Module, rows: int, passed: Collection[str] = ()):
        super().__init__()
        self.calls: list[Matmul] = []
        self._steps: dict[object, tuple[str, RowStep]] = {}
        self._rows = rows
        # Modules that turn one tensor into another are probed as such.
        self._alone: set[str] = set()
        self._kept: list[Tensor] = []
        self._model = model
        self._passed = set(passed)
        self._inside: list[str] = []
        plain = (p for p in model.parameters() if not is_packed(p))
        self._own = {p.untyped_storage().data_ptr() for p in plain}
        self._linears = {n for n, m in model.named_modules() if linear_shape(m) is not None}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if self._passed & set(self._inside):
            return result
        if any(part in name for part in MATMULS):
            self._note(name, func, args, kwargs or {})
        elif name in STEPS:
            self._note_step(name, func, args, kwargs or {}, result)
        elif name == "_to_copy" and args[0].untyped_storage().data_ptr() in self._own:
            # A parameter in another dtype is still one; kept, lest another come to lie there.
            self._kept.append(result)
            self._own.add(result.untyped_storage().data_ptr())
        return result

    @property
    def steps(self) -> list[RowStep]:
        """What no module of rows does, one of each kind."""
        return [step for where, step in self._steps.values() if where not in self._alone]

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = self._inside[-1] if self._inside else ""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        groups = [x for x in tensors if not x.is_floating_point() and x.dim() <= 1]
        sizes = tuple(tuple(x.reshape(-1).tolist()) for x in groups)
        self.calls.append(Matmul(where, name, shapes, sizes))
        if not kwargs and where not in self._linears and not any(map(is_packed, tensors)):
            self._note_rows(where, name, func, args)

    def _note_rows(self, where: str, name: str, func: Any, args: tuple[Any, ...]) -> None:
        """Take note of a matmul of one tensor with parameters alone, one of each kind."""
        at = {n: x for n, x in enumerate(args) if isinstance(x, Tensor)}
        own = {n: x for n, x in at.items() if x.untyped_storage().data_ptr() in self._own}
        rows = [n for n in at if n not in own]
        matrices = [x for x in own.values() if x.dim() == 2]
        if len(rows) != 1 or len(matrices) != 1:
            return
        place, x = rows[0], at[rows[0]]
        weight = matrices[0] if "linear" in name else matrices[0].T
        lead = (1,) * (x.dim() - 2)

        def run(given: Tensor) -> Tensor:
            out = func(*args[:place], given.view(*lead, *given.shape[1:]), *args[place + 1 :])
            return out.view(1, given.shape[1], -1)

        kind = (name, x.dtype, x.dim(), *((w.shape, w.stride(), w.dtype) for w in own.values()))
        step = RowStep(f"{where}: {name}", x.dtype, x.shape[-1:], run, weight)
        self._steps.setdefault(kind, (where, step))

    def _note_step(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Take note of an operator of one tensor whose leading dimension is the pass's rows."""
        x, *others = args
        if not isinstance(x, Tensor):  # a number to the power of a tensor
            return
        first = result[0] if isinstance(result, tuple) else result
        lead = x.shape[:1] if x.shape[:1] == (self._rows,) else x.shape[:2]
        of_rows = lead in ((self._rows,), (1, self._rows)) and x.dim() > len(lead)
        if not of_rows or not x.is_floating_point() or first.shape[: len(lead)] != lead:
            return
        if any(isinstance(other, Tensor) for other in (*others, *kwargs.values())):
            return
        shape = x.shape[len(lead) :]

        def run(given: Tensor) -> Tensor:
            rows = given.shape[1]
            out = func(given.reshape(*lead[:-1], rows, *shape), *others, **kwargs)
            return (out[0] if isinstance(out, tuple) else out).reshape(1, rows, -1)

        where = self._inside[-1] if self._inside else ""
        kind = (name, x.dtype, lead, shape, str(others), str(kwargs))
        self._steps.setdefault(
            kind, (where, RowStep(f"{where}: {name} of {tuple(shape)}", x.dtype, shape, run))
        )

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inside.append(name)
        # A linear is a matmul, whether or not its kernel goes through the dispatcher.
        if name in self._linears and not self._passed & set(self._inside):
            shapes = tuple(tuple(x.shape) for x in inputs if isinstance(x, Tensor))
            self.calls.append(Matmul(name, "forward", shapes, ()))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = self._inside.pop()
        if (
            isinstance(output, Tensor)
            and len(inputs) == 1
            and not any(True for _ in module.children())
        ):
            self._alone.add(name)

    @contextmanager
    def following(self) -> Iterator[None]:
        """While on, know which module is running."""
        handles = []
        for name, module in self._model.named_modules():
            handles += [
                module.register_forward_pre_hook(partial(self._enter, name)),
                module.register_forward_hook(self._leave),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def alike(vocab_size: int, rows: int) -> Tensor:
    """The same token in all rows."""
    return torch.full((rows,), vocab_size // 2)


def random(seed: int, vocab_size: int, rows: int) -> Tensor:
    """Any tokens."""
    return torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))


# Tokens of the passes that are compared. Over a hundred rows go to the same experts in all of them
# by chance less often than machines fail.
TOKEN_SETS: tuple[Callable[[int, int], Tensor], ...] = (
    alike,
    *(partial(random, seed) for seed in range(3)),
)


def routed(passes: Iterable[list[Matmul]]) -> list[Unsound]:
    """The first module whose matmuls are not the same in all ``passes``; empty if there is none."""
    first, *others = passes
    for other in others:
        if other != first:
            pairs = zip(first, other, strict=False)
            unlike = next((a.module for a, b in pairs if a != b), None)
            longest = max(first, other, key=len)
            name = longest[min(len(first), len(other))].module if unlike is None else unlike
            why = (
                f"{name}: how many rows it multiplies by which weights depends on what the rows "
                "hold, which no probe of shapes can prove harmless"
            )
            return [Unsound(name, why, REMEDY)]
    return []
