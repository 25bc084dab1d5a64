"""What a pass of a model does, operator by operator, by torch's dispatcher and hooks on modules.

- Its matmuls: module, shapes, the group sizes of a grouped one. Where these differ between tokens,
  no probe of shapes covers them.
- Its functions of rows beside the linears, one of each kind, to be probed by themselves.
- What of its rows the host reads: it may branch on all of them at once. What operators make of
  numbers for every row depends on rows, in values and shapes, and so does the memory that it is
  written to. Token ids, positions and lengths are no such numbers.
- What runs under another autocast than the pass: a forward or a hook may turn it on or off.

Experts of the linear kernel are skipped, as its rows do not depend on the row count, and so is
attention, which has a probe of its own. Unseen are reads by address, and what a library launches by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef

from tinyspec.determinism.model_state import function_settings, functions, is_users
from tinyspec.determinism.results import Unsound
from tinyspec.model.linears import linear_shape
from tinyspec.model.moe import kernel_experts
from tinyspec.model.quantized import is_packed
from tinyspec.model.torch_state import without_modes
from tinyspec.runner.model_runner import ModelRunner

SHAPES_DEPEND = (
    "the shapes of its matmuls depend on the values of the rows, so that no probe of shapes can "
    "cover them"
)
NO_EXPERTS = (
    "deterministic=True needs experts that the linear kernel can serve (plain weights, "
    "transformers' experts interface, linear='auto'); run this model's requests without it"
)
HOST_READS = (
    "it reads on the host what the rows of a pass hold (a branch on a tensor, item(), tolist(), a "
    "mask as an index), so that a row may depend on the others"
)
NO_BRANCHES = "deterministic=True needs forwards without a branch or a shape that depends on rows"
Memory = StorageWeakRef | WeakIdRef
# Parts of operators' names: mm, addmm, bmm, baddbmm, _grouped_mm, linear, matmul, addmv, dot, conv.
MATMULS = ("mm", "linear", "matmul", "mv", "dot", "conv")
# Operators of one tensor whose rounding may depend on an element's place (in a vector or in the
# rest behind the vectors), or on how a sum is split; probed alone where no element-wise module
# calls them.
STEPS = {
    *("sigmoid", "silu", "gelu", "tanh", "softplus", "log_sigmoid_forward", "mish", "elu", "erf"),
    *("exp", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "cos", "sum", "mean", "cumsum"),
    *("var", "std", "logsumexp", "linalg_vector_norm"),
    *("softmax", "_softmax", "log_softmax", "_log_softmax"),  # in inference mode, and outside
}
# What torch marks as telling the host values or a shape, and what else does: the last is what
# ``tolist`` and ``numpy`` begin with.
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
OTHER_READS = ("aten.is_nonzero.default", "aten.where.default", "aten.resolve_neg.default")


class Matmul(NamedTuple):
    """One call. shapes: of all its tensors. sizes: the values of those that hold group sizes."""

    module: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowOp:
    """A function of rows: a linear, an element-wise module (activation, norm), or elsewhere one
    operator (a router's matmul or sigmoid) with its parameters and constants. users: a module that
    runs code of the user's, whose operators are recorded by themselves."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fn: Callable[[Tensor], Tensor]  # of [1, R, *shape]
    weight: Tensor | None = None  # [out, in] of a matmul
    users: bool = False


@cache
def _operator(func: Any) -> tuple[str, bool, bool]:
    """Name of an operator of torch's, whether it multiplies matrices, and whether it reads."""
    name = func._schema.name.partition("::")[2]
    reads = str(func) in OTHER_READS or any(tag in func.tags for tag in READS)
    return name, any(part in name for part in MATMULS), reads


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those that an operator gets or returns, of which some are in lists."""
    found = []
    for x in values:
        if isinstance(x, (list, tuple)):
            found += _tensors(x)
        elif isinstance(x, Tensor) and not is_packed(x):
            found.append(x)
    return found


def _memory(x: Tensor) -> Memory:
    """Does not keep it alive. What a library laid out its own way (oneDNN) has no storage."""
    return StorageWeakRef(x.untyped_storage()) if x.layout == torch.strided else WeakIdRef(x)


class PassRecorder(TorchDispatchMode):
    """Of one pass of the runner's model with ``rows`` rows, except inside experts that the linear
    kernel serves.

    host_reads: modules that read rows. autocast: the first operator that ran under one that is not
    the pass's, or linear that ran without that, and its module.
    """

    def __init__(self, runner: ModelRunner, rows: int):
        super().__init__()
        model = runner.model
        self.matmuls: list[Matmul] = []
        self.host_reads: list[str] = []
        self.autocast: tuple[str, str] | None = None
        self._runner, self._rows, self._skipped = runner, rows, set(kernel_experts(model))
        # Modules around attention and experts, which are no functions of rows outside of a pass.
        self._attends = {
            name[:end] for name in self._skipped for end, c in enumerate(name) if c == "."
        }
        self._users = {
            name: str((functions(m), function_settings(m)))
            for name, m in model.named_modules()
            if is_users(m)
        }
        # By kind, with the module whose operator it is.
        self._found: dict[object, tuple[str | None, RowOp]] = {}
        # Modules without children from one tensor to one: their operators are no steps.
        self._whole: set[str] = set()
        self._inside: list[str] = []
        # Memory of parameters, and of what is computed of them alone: casts by autocast, views.
        self._own: set[Memory] = {_memory(p) for p in model.parameters() if not is_packed(p)}
        self._linears = {n for n, m in model.named_modules() if linear_shape(m) is not None}
        self._of_rows: set[Memory] = set()

    @property
    def where(self) -> str:
        """The innermost module whose forward is running."""
        return self._inside[-1] if self._inside else ""

    @property
    def row_ops(self) -> list[RowOp]:
        """The functions of rows: operators outside element-wise modules, and these modules; of a
        pass whose rows are all unembedded."""
        return [op for where, op in self._found.values() if where not in self._whole]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block."""
        context = self._runner.served.context
        kernels = context.kernels
        attend = partial(self._attend, kernels.paged_attention)
        with ExitStack() as hooks:
            for name, module in self._runner.model.named_modules():
                enter, leave = partial(self._enter, name), self._leave
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
            hooks.callback(setattr, context, "kernels", kernels)
            context.kernels = replace(kernels, paged_attention=attend)
            with self, _AutocastWatch(self):
                yield

    def _attend(self, whole: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._attends.update(self._inside)
        with without_modes():
            return whole(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._skipped.isdisjoint(self._inside):
            return result
        name, is_matmul, reads = _operator(func)
        given = _tensors((*args, *kwargs.values()))
        self._follow_rows(func, reads, given, result)
        if given and all(_memory(x) in self._own for x in given):
            self._own.update(map(_memory, _tensors([result])))
        if is_matmul:
            self._note_matmul(name, func, args, kwargs)
        elif name in STEPS:
            self._note_step(name, func, args, kwargs, result)
        return result

    def _follow_rows(self, func: Any, reads: bool, tensors: list[Tensor], result: Any) -> None:
        """Note which memory holds what depends on rows, and where the host reads that."""
        depends = any(_memory(x) in self._of_rows for x in tensors)
        for x in _tensors([result]):
            if depends or (x.is_floating_point() and x.shape[:2] == (1, self._rows)):
                self._of_rows.add(_memory(x))
        if depends and reads and not self._selects_alike(func, tensors):
            self.host_reads.append(self.where)

    def _selects_alike(self, func: Any, tensors: list[Tensor]) -> bool:
        """Whether an index takes the same rows whatever rows hold: by number, or by a mask that
        is not made of them and takes all."""
        masks = [x for x in tensors if x.dtype in (torch.bool, torch.uint8)]
        return func is torch.ops.aten.index.Tensor and all(
            _memory(mask) not in self._of_rows and bool(mask.all()) for mask in masks
        )

    def _note_matmul(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        # Packed scales of some formats are bytes, and no sizes.
        groups = [x for x in tensors if x.dtype in (torch.int32, torch.int64) and x.dim() <= 1]
        sizes = tuple(tuple(x.reshape(-1).tolist()) for x in groups)
        self.matmuls.append(Matmul(self.where, name, shapes, sizes))
        if not kwargs and self.where not in self._linears and not any(map(is_packed, tensors)):
            self._note_product(name, func, args)

    def _note_product(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        """Record a matmul of one tensor with parameters, one of each kind; of a batch of weights,
        which are experts', for the same rows with each."""
        at = {n: x for n, x in enumerate(args) if isinstance(x, Tensor)}
        own = {n: x for n, x in at.items() if _memory(x) in self._own}
        rows = [n for n in at if n not in own]
        matrices = [x for x in own.values() if x.dim() > 1]
        if len(rows) != 1 or len(matrices) != 1:
            return
        place, x = rows[0], at[rows[0]]
        weight = matrices[0] if "linear" in name else matrices[0].mT
        lead = tuple(weight.shape[:-2]) or (1,) * (x.dim() - 2)

        def run(given: Tensor) -> Tensor:
            same = given[0].expand(*lead, *given.shape[1:]).contiguous()
            out = func(*args[:place], same, *args[place + 1 :])
            return out.movedim(-2, 0).reshape(1, given.shape[1], -1)

        kind = (name, x.dtype, x.dim(), *((w.shape, w.stride(), w.dtype) for w in own.values()))
        outputs = weight.reshape(-1, x.shape[-1])
        step = RowOp(f"{self.where}: {name}", x.dtype, x.shape[-1:], run, outputs)
        self._found.setdefault(kind, (self.where, step))

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

        kind = (name, x.dtype, lead, shape, str(others), str(kwargs))
        step = RowOp(f"{self.where}: {name} of {tuple(shape)}", x.dtype, shape, run)
        self._found.setdefault(kind, (self.where, step))

    def note_autocast(self, operator: Any, may_be_off: bool) -> None:
        """Note an operator that runs under another autocast than the pass."""
        dtype, device = self._runner.served.autocast
        now = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if self.autocast is None and now != dtype and not (now is None and may_be_off):
            self.autocast = resolve_name(operator) or str(operator), self.where

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inside.append(name)
        if name in self._linears:
            self.note_autocast(type(module).__name__, may_be_off=False)
        # A linear is a matmul, whether or not its kernel goes through the dispatcher.
        if name in self._linears and not self._skipped & set(self._inside):
            shapes = tuple(tuple(x.shape) for x in inputs if isinstance(x, Tensor))
            self.matmuls.append(Matmul(name, "forward", shapes, ()))

    def _leave(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record a module from one tensor of rows to one that has no children, or runs code of the
        user's."""
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
        if output.shape[:2] == x.shape[:2] == (1, self._rows):
            kind = (type(module), repr(module), x.shape[2:], x.dtype)
            op = RowOp(name, x.dtype, x.shape[2:], module)
            if whole and name not in self._linears:
                self._found.setdefault(kind, (None, op))
            if users:
                op = replace(op, name=f"{name}: as a whole", users=True)
                self._found.setdefault((*kind, self._users[name]), (None, op))


class _AutocastWatch(TorchFunctionMode):
    """Shows a recorder what runs under autocast; below, in the dispatcher, it is off."""

    def __init__(self, recorder: PassRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Attention and norms may be in fp32.
        self._recorder.note_autocast(func, may_be_off=True)
        return func(*args, **(kwargs or {}))


def token_sets(vocab_size: int, rows: int) -> list[Tensor]:
    """Tokens of the passes that are compared: the same one in all rows, then random ones. Over a
    hundred rows practically never go to the same experts in all of them by chance."""
    generators = (torch.Generator().manual_seed(seed) for seed in range(3))
    draws = (torch.randint(vocab_size, (rows,), generator=generator) for generator in generators)
    return [torch.full((rows,), vocab_size // 2), *draws]


def data_dependent(passes: Iterable[list[Matmul]]) -> list[Unsound]:
    """The first module whose matmuls differ between ``passes``; empty if there is none."""
    first, *others = passes
    for other in others:
        if other != first:
            unlike = next((a, b) for a, b in zip_longest(first, other) if a != b)
            name = next(matmul.module for matmul in unlike if matmul is not None)
            return [Unsound(name, f"{name}: {SHAPES_DEPEND}", NO_EXPERTS)]
    return []


def reads_rows(recorder: PassRecorder) -> list[Unsound]:
    """The first module that reads rows on the host; empty if there is none."""
    names = [name or "model" for name in recorder.host_reads[:1]]
    return [Unsound(name, f"{name}: {HOST_READS}", NO_BRANCHES) for name in names]
