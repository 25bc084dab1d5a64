"""Do the shapes of a model's matmuls depend on the values of its rows? Then no probe covers them.

A pass of the same rows runs with several sets of tokens, and every matmul is recorded: its module,
shapes, and the group sizes of a grouped matmul. Experts of the linear kernel are skipped, as its
rows do not depend on the row count, and so is attention, which has a probe of its own. Sees what
goes through torch's dispatcher, not what a library launches by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tinyspec.determinism.model_state import function_settings, functions, is_users
from tinyspec.determinism.probe_results import Unsound
from tinyspec.determinism.probes.host_reads import HostReads
from tinyspec.model.attention import AttentionContext
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.quantized import is_packed

REMEDY = (
    "deterministic=True needs experts that the linear kernel can serve (plain weights, "
    "transformers' experts interface, linear='auto'); run this model's requests without it"
)
# Parts of operators' names: mm, addmm, bmm, baddbmm, _grouped_mm, linear, matmul, addmv, dot, conv.
MATMULS = ("mm", "linear", "matmul", "mv", "dot", "conv")
# Operators of one tensor whose rounding may depend on an element's place (in a vector or in the
# rest behind the vectors), or on how a sum is split; probed alone where no element-wise module
# calls them.
STEPS = {
    *("sigmoid", "silu", "gelu", "tanh", "softplus", "log_sigmoid_forward", "mish", "elu", "erf"),
    *("exp", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "cos", "sum", "mean", "cumsum"),
    *("_softmax", "_log_softmax", "linalg_vector_norm"),
}


@dataclass(frozen=True)
class Matmul:
    """One call. shapes: of all its tensors. sizes: the values of those that hold group sizes."""

    module: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowOp:
    """A function of rows that is no linear: an element-wise module (activation, norm), or elsewhere
    one operator (a router's matmul or sigmoid) with its parameters and constants. users: a module
    that runs code of the user's, whose operators are recorded by themselves."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fn: Callable[[Tensor], Tensor]  # of [1, R, *shape]
    weight: Tensor | None = None  # [out, in] of a matmul
    users: bool = False


@cache
def _operator(func: Any) -> tuple[str, bool]:
    """Name of an operator of torch's, and whether it multiplies matrices."""
    name = func._schema.name.partition("::")[2]
    return name, any(part in name for part in MATMULS)


class OpRecorder(TorchDispatchMode):
    """Records the matmuls of ``model`` in passes of ``rows`` rows, except inside the modules
    ``skipped``, and its other functions of rows, one of each kind.

    logit_rows: how many of the rows are unembedded. reads: of rows, on the host.
    """

    def __init__(
        self, model: nn.Module, rows: int, logit_rows: int = 0, skipped: Collection[str] = ()
    ):
        super().__init__()
        self.matmuls: list[Matmul] = []
        self.reads = HostReads(rows)
        # Modules around attention and experts, which are no functions of rows outside of a pass.
        self._attends = {name[:end] for name in skipped for end, c in enumerate(name) if c == "."}
        self._users = {
            name: str((functions(m), function_settings(m)))
            for name, m in model.named_modules()
            if is_users(m)
        }
        self._modules: dict[object, RowOp] = {}
        self._steps: dict[object, tuple[str, RowOp]] = {}
        self._rows = rows
        self._leading = ((1, rows), (1, logit_rows))
        # Modules without children from one tensor to one: their operators are no steps.
        self._whole: set[str] = set()
        self._kept_alive: list[Tensor] = []
        self._model = model
        self._skipped = set(skipped)
        self._inside: list[str] = []
        self._in_attention = False
        plain = (p for p in model.parameters() if not is_packed(p))
        self._own = {p.untyped_storage().data_ptr() for p in plain}
        self._linears = {n for n, m in model.named_modules() if linear_shape(m) is not None}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._in_attention or not self._skipped.isdisjoint(self._inside):
            return result
        self.reads.follow(func, (args, kwargs), result, self._inside[-1] if self._inside else "")
        name, is_matmul = _operator(func)
        if is_matmul:
            self._note(name, func, args, kwargs or {})
        elif name in STEPS:
            self._note_step(name, func, args, kwargs or {}, result)
        elif name == "_to_copy" and args[0].untyped_storage().data_ptr() in self._own:
            # A parameter cast to another dtype; kept alive, as its address is the key.
            self._kept_alive.append(result)
            self._own.add(result.untyped_storage().data_ptr())
        return result

    @property
    def row_ops(self) -> list[RowOp]:
        """The functions of rows: operators outside element-wise modules, and these modules."""
        steps = [step for where, step in self._steps.values() if where not in self._whole]
        return [*steps, *self._modules.values()]

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = self._inside[-1] if self._inside else ""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        groups = [x for x in tensors if not x.is_floating_point() and x.dim() <= 1]
        sizes = tuple(tuple(x.reshape(-1).tolist()) for x in groups)
        self.matmuls.append(Matmul(where, name, shapes, sizes))
        if not kwargs and where not in self._linears and not any(map(is_packed, tensors)):
            self._note_rows(where, name, func, args)

    def _note_rows(self, where: str, name: str, func: Any, args: tuple[Any, ...]) -> None:
        """Record a matmul of one tensor with parameters, one of each kind."""
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
        step = RowOp(f"{where}: {name}", x.dtype, x.shape[-1:], run, weight)
        self._steps.setdefault(kind, (where, step))

    def _note_step(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record an operator of one tensor whose leading dimension is the pass's rows."""
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
        step = RowOp(f"{where}: {name} of {tuple(shape)}", x.dtype, shape, run)
        self._steps.setdefault(kind, (where, step))

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inside.append(name)
        # A linear is a matmul, whether or not its kernel goes through the dispatcher.
        if name in self._linears and not self._skipped & set(self._inside):
            shapes = tuple(tuple(x.shape) for x in inputs if isinstance(x, Tensor))
            self.matmuls.append(Matmul(name, "forward", shapes, ()))

    def _leave(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        name = self._inside.pop()
        users = name in self._users and name not in self._attends
        whole = not list(module.children())
        if not isinstance(output, Tensor) or len(inputs) != 1 or not (users or whole):
            return
        if whole:
            self._whole.add(name)
        x = inputs[0]
        if kwargs or not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
            return
        if output.shape[:2] == x.shape[:2] in self._leading:
            kind = (type(module), repr(module), x.shape[2:], x.dtype)
            op = RowOp(name, x.dtype, x.shape[2:], module)
            if whole and name not in self._linears:
                self._modules.setdefault(kind, op)
            if users:
                op = replace(op, name=f"{name}: as a whole", users=True)
                self._modules.setdefault((*kind, self._users[name]), op)

    @contextmanager
    def _without_attention(self, context: AttentionContext) -> Iterator[None]:
        kernels = context.kernels
        assert kernels is not None

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            self._in_attention = True
            self._attends.update(self._inside)
            try:
                return kernels.paged_attention(*args, **kwargs)
            finally:
                self._in_attention = False

        context.kernels = replace(kernels, paged_attention=attend)
        try:
            yield
        finally:
            context.kernels = kernels

    @contextmanager
    def recording(self, context: AttentionContext | None = None) -> Iterator[None]:
        """Record what runs in the block; context: of the attention of a served model."""
        handles = []
        for name, module in self._model.named_modules():
            handles += [
                module.register_forward_pre_hook(partial(self._enter, name)),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
        try:
            with self, self._without_attention(context) if context else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()


def same_token(vocab_size: int, rows: int) -> Tensor:
    """The same token in all rows."""
    return torch.full((rows,), vocab_size // 2)


def random_tokens(seed: int, vocab_size: int, rows: int) -> Tensor:
    """Random tokens."""
    return torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))


# Tokens of the passes that are compared: over a hundred rows practically never go to the same
# experts in all of them by chance.
TOKEN_SETS: tuple[Callable[[int, int], Tensor], ...] = (
    same_token,
    *(partial(random_tokens, seed) for seed in range(3)),
)


def data_dependent(passes: Iterable[list[Matmul]]) -> list[Unsound]:
    """The first module whose matmuls differ between ``passes``; empty if there is none."""
    first, *others = passes
    for other in others:
        if other != first:
            pairs = zip(first, other, strict=False)
            unlike = next((a.module for a, b in pairs if a != b), None)
            longest = max(first, other, key=len)
            name = longest[min(len(first), len(other))].module if unlike is None else unlike
            why = (
                f"{name}: the shapes of its matmuls depend on the values of the rows, so that no "
                "probe of shapes can cover them"
            )
            return [Unsound(name, why, REMEDY)]
    return []
