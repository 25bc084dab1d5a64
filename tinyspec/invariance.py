"""Which row counts of a function of rows agree bit for bit, and does a row's place matter?

Facts 1 and 2 that determinism rests on, as measurements of any function from `[rows, features]` to
`[rows, ...]`. Knows torch, and nothing of engines, schedulers or transformers.

A careless probe lies: rounding to bf16 hides nearly every change in the order of additions, so
a few ordinary rows "agree". Here sums cancel, so that what is left is the accumulator's own
rounding; every row of a large pool is compared, and neighbours are up to 1e4 larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature

import torch
from torch import Tensor, nn

from tinyspec.packed import is_packed, layout

RowFunction = Callable[[Tensor], Tensor]
CANCELLED_OUTPUTS = 64
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PositionProbe:
    """Fact 1 at one shape: truthy if a row's bits depend on neither place nor neighbours."""

    name: str
    rows: int
    checked: int  # rows compared
    differing: int  # of these, rows with other bits
    row_index: int  # where the first of them stood, or -1
    column: int  # its first differing output, or -1

    def __bool__(self) -> bool:
        return self.differing == 0

    def __str__(self) -> str:
        if self:
            return f"{self.name}: invariant at {self.rows} rows"
        why = f"at {self.rows} rows a row's result depends on its row index or its neighbours"
        where = (
            f"{self.differing} of {self.checked}, first at {self.row_index}, output {self.column}"
        )
        return f"{self.name}: {why} ({where})"


@dataclass(frozen=True)
class RowClasses:
    """Fact 2: row counts in classes whose rows are equal bit for bit."""

    reference: int
    pool: int  # rows that every row count was compared on
    classes: tuple[tuple[int, ...], ...]
    differing: dict[int, int]  # row count -> rows of the pool unlike those of the reference

    @property
    def canonical(self) -> tuple[int, ...]:
        """The row counts that agree with the reference, which is one of them."""
        return next(members for members in self.classes if self.reference in members)


def unequal_bits(a: Tensor, b: Tensor) -> Tensor:
    """`[rows, ...]` twice -> bool `[rows, elements]`; NaN equals any NaN, -0 is not 0."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    bits = BITS[a.element_size()]
    unequal = a.contiguous().view(bits) != b.contiguous().view(bits)
    return (unequal & ~(a.isnan() & b.isnan())).reshape(len(a), -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether `unequal_bits` finds none; where there is none, quicker."""
    bits = BITS[a.element_size()]
    if torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)):
        return True
    return not unequal_bits(a, b).any()


def cancelling_inputs(
    rows: int, features: int, dtype: torch.dtype, seed: int = 0, weight: Tensor | None = None
) -> Tensor:
    """Inputs `[rows, features]`, on the CPU, whose products with `weight` cancel: order shows.

    A third of the features is random; another cancels its products with up to 64 rows of `weight`
    `[out, features]`; the last, orders of magnitude smaller, cancels what rounding the second to
    `dtype` left over. Without a weight the plain sum of a row cancels.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x = (x * 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)).to(dtype).double()
    weight = torch.ones(1, features) if weight is None else weight.detach()
    count = max(1, min(CANCELLED_OUTPUTS, features // 8, len(weight)))
    picks = torch.linspace(0, len(weight) - 1, count).round().long().to(weight.device)
    chosen = weight[picks].to("cpu", torch.float64).nan_to_num(0, 0, 0)
    order = torch.randperm(features, generator=generator)
    third = max(1, features // 3)
    x[:, order[third:]] = 0
    for part in (order[third : 2 * third], order[2 * third :]):
        gram = chosen[:, part] @ chosen[:, part].T
        gram.diagonal().add_(1e-12 * gram.trace() + 1e-30)
        solved = torch.linalg.solve(gram, -chosen @ x.T)  # [count, rows]
        x[:, part] = (solved.T @ chosen[:, part]).to(dtype).double()
    return x.to(dtype)


def position_invariant(
    fn: RowFunction, inputs: Tensor, rows: int, name: str = "", passes: int | None = None
) -> PositionProbe:
    """Fact 1: in a pass of `rows` rows, do results keep their bits in every place, among any rows?

    Every second row is a needle, taken from `inputs` `[any, features]`. The needles move through
    every row index while the rows between them change (zeros, ordinary, 1e4 larger): one pass a row
    index, or about `passes`; at the end the first place again, for what does not even repeat.
    """
    dtype, device = inputs.dtype, inputs.device
    needles = inputs[torch.arange(0, (rows + 1) // 2, device=device) % len(inputs)]
    generator = torch.Generator().manual_seed(rows)
    between = torch.randn(rows // 2, inputs.shape[1], generator=generator).to(device)
    largest = 1e3 if dtype == torch.float16 else 1e4
    home = torch.arange(0, rows, 2, device=device)
    others = torch.arange(1, rows, 2, device=device)
    checked, differing, found = 0, 0, (-1, -1)
    first: Tensor | None = None
    stride = 1 if passes is None else max(1, rows // passes) | 1
    for turn, shift in enumerate([*range(0, rows, stride), 0]):
        x, index = inputs.new_empty(rows, inputs.shape[1]), (home + shift) % rows
        x[index] = needles
        scale = (1.0, largest, 0.0, 30.0)[turn % 4]
        x[(others + shift) % rows] = (between.roll(turn, 0) * scale).to(dtype)
        result = fn(x)[index]
        first = result if first is None else first
        wrong = unequal_bits(first, result)
        if not differing and (places := wrong.nonzero()).numel():
            found = (int(index[places[0, 0]]), int(places[0, 1]))
        checked += len(wrong)
        differing += int(wrong.any(dim=1).sum())
    return PositionProbe(name or "function", rows, checked, differing, *found)


def row_classes(
    fn: RowFunction, inputs: Tensor, row_counts: Iterable[int], reference: int
) -> RowClasses:
    """Fact 2: all `inputs` `[pool, features]` through passes of each row count, classed by bits.

    Every row of the pool goes through a pass of every row count, at a cost of pool / row count
    passes; so agreement is over all rows, and transitive.
    """
    results: list[Tensor] = []
    members: dict[int, list[int]] = {}
    differing: dict[int, int] = {}
    expected = in_passes(fn, inputs, reference)
    for rows in sorted({reference, *row_counts}):
        result = in_passes(fn, inputs, rows)
        differing[rows] = int(unequal_bits(expected, result).any(dim=1).sum())
        members.setdefault(class_of(result, results), []).append(rows)
    return RowClasses(reference, len(inputs), tuple(map(tuple, members.values())), differing)


def class_of(result: Tensor, results: list[Tensor]) -> int:
    """Which of ``results`` has the bits of ``result``, which joins them if none has."""
    for label, other in enumerate(results):
        if same_bits(result, other):
            return label
    results.append(result)
    return len(results) - 1


def in_passes(fn: RowFunction, inputs: Tensor, rows: int) -> Tensor:
    """The results of all `inputs` `[pool, ...]`, `rows` at a time; the last pass repeats some."""
    pool = len(inputs)
    index = torch.arange(-(-pool // rows) * rows, device=inputs.device) % pool
    return torch.cat([fn(inputs[part]) for part in index.split(rows)])[:pool]


def linear_kinds(model: nn.Module) -> dict[str, list[str]]:
    """First name -> all names, for each distinct (type, in, out, weight dtype, bias, layout).

    Linear-like is what has `in_features` and `out_features`, and GPT-2's `Conv1D` (`nx`, `nf`).
    """
    found: dict[tuple, list[str]] = {}
    for name, module in model.named_modules():
        if (shape := linear_shape(module)) is None:
            continue
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        lies = isinstance(weight, Tensor) and (weight.dtype, weight.device, weight.stride())
        key = (type(module), layout(weight), shape, lies, bias is not None)
        found.setdefault(key, []).append(name)
    return {names[0]: names for names in found.values()}


def distinct_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, the first of each kind of linear."""
    return {name: model.get_submodule(name) for name in linear_kinds(model)}


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear-like module, None of any other.

    A tuner layer around an embedding takes tokens, and some parts of one take more than rows: what
    they do shows in the module around them.
    """
    of_tokens = isinstance(getattr(module, "base_layer", None), nn.Embedding)
    if of_tokens or not _takes_rows(type(module).forward):
        return None
    inputs = getattr(module, "in_features", getattr(module, "nx", None))
    outputs = getattr(module, "out_features", getattr(module, "nf", None))
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


@cache
def _takes_rows(forward: Callable[..., object]) -> bool:
    """Whether modules with this forward can be called with one tensor and nothing else."""
    required = [
        parameter
        for parameter in list(signature(forward).parameters.values())[1:]
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    return len(required) <= 1 and all(p.kind is not Parameter.KEYWORD_ONLY for p in required)


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight as `[out, in]` where it is a floating-point matrix at hand, else None (packed)."""
    weight, shape = getattr(module, "weight", None), linear_shape(module)
    if shape is None or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    if is_packed(weight):
        return _unpacked(weight, shape)
    weight = weight if hasattr(module, "in_features") else weight.T
    return weight if weight.is_floating_point() and weight.shape == shape[::-1] else None


def _unpacked(weight: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """A packed weight as `[out, in]`, where it knows how to become one."""
    try:
        matrix = weight.dequantize()
    except (NotImplementedError, RuntimeError):
        return None
    plain = not is_packed(matrix) and matrix.is_floating_point()
    return matrix if plain and matrix.shape == shape[::-1] else None
