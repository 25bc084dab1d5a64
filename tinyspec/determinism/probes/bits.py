"""Comparing bits: does a row's place in a pass change them, and which row counts agree?

Facts 1 and 2 that determinism rests on, measured for any function from `[rows, features]` to
`[rows, ...]`. Knows torch; neither engines, schedulers nor transformers.

With ordinary inputs rounding to bf16 hides nearly every change in the order of additions. Here sums
cancel, so that what is left is the accumulator's own rounding; every row of a large pool is
compared, and neighbours are up to 1e4 larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyspec.model.checksum import BITS

RowFunction = Callable[[Tensor], Tensor]
CANCELLED_OUTPUTS = 64


@dataclass(frozen=True)
class PositionResult:
    """Fact 1 at one shape: truthy if a row's bits depend on neither place nor neighbours."""

    name: str
    rows: int
    checked: int  # rows compared
    differing: int  # of these, rows with other bits
    row_index: int  # place of the first of them, or -1
    column: int  # its first differing output, or -1

    def __bool__(self) -> bool:
        return self.differing == 0

    def with_rows(self, wrong: Tensor, places: Tensor | None = None) -> PositionResult:
        """The rows of one more pass as well.

        wrong: [n, elements], where bits differ. places: [n] in the pass; None: 0 to n - 1.
        """
        row_index, column = self.row_index, self.column
        if not self.differing and (found := wrong.nonzero()).numel():
            row, column = found[0].tolist()
            row_index = row if places is None else int(places[row])
        return replace(
            self,
            checked=self.checked + len(wrong),
            differing=self.differing + int(wrong.any(dim=1).sum()),
            row_index=row_index,
            column=column,
        )

    def plus(self, other: PositionResult) -> PositionResult:
        """The rows of both."""
        first = self if self.differing else other
        return replace(
            first,
            checked=self.checked + other.checked,
            differing=self.differing + other.differing,
        )

    def __str__(self) -> str:
        if self:
            return f"{self.name}: invariant at {self.rows} rows"
        why = f"at {self.rows} rows a row's result depends on its row index or its neighbours"
        where = (
            f"{self.differing} of {self.checked}, first at {self.row_index}, output {self.column}"
        )
        return f"{self.name}: {why} ({where})"


def unequal_bits(a: Tensor, b: Tensor) -> Tensor:
    """`[rows, ...]` twice -> bool `[rows, elements]`; NaN equals any NaN, -0 is not 0."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    bits = BITS[a.element_size()]
    unequal = a.contiguous().view(bits) != b.contiguous().view(bits)
    return (unequal & ~(a.isnan() & b.isnan())).reshape(len(a), -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether `unequal_bits` finds none; faster where it does not."""
    bits = BITS[a.element_size()]
    if torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)):
        return True
    return not unequal_bits(a, b).any()


def cancelled_outputs(features: int) -> int:
    """How many products of one row with a weight can cancel."""
    return max(1, min(CANCELLED_OUTPUTS, features // 8))


def cancelling_inputs(
    rows: int,
    features: int,
    dtype: torch.dtype,
    seed: int = 0,
    weight: Tensor | None = None,
    sets: int = 1,
) -> Tensor:
    """Inputs `[rows, features]`, on the CPU, whose products with `weight` cancel, so that the order
    of additions shows.

    A third of the features is random; another cancels its products with up to 64 rows of `weight`
    `[out, features]`; the last, orders of magnitude smaller, cancels what rounding the second to
    `dtype` left over. Without a weight the plain sum of a row cancels. sets: of outputs, which rows
    take in turns, evenly spread together.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x = (x * 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)).to(dtype).double()
    weight = torch.ones(1, features) if weight is None else weight.detach()
    count = min(cancelled_outputs(features), len(weight))
    sets = max(1, min(sets, rows, len(weight) // count))
    picks = torch.linspace(0, len(weight) - 1, count * sets).round().long().to(weight.device)
    order = torch.randperm(features, generator=generator)
    third = max(1, features // 3)
    x[:, order[third:]] = 0
    for number in range(sets):
        chosen = weight[picks[number::sets]].to("cpu", torch.float64).nan_to_num(0, 0, 0)
        own = x[number::sets]
        for part in (order[third : 2 * third], order[2 * third :]):
            gram = chosen[:, part] @ chosen[:, part].T
            gram.diagonal().add_(1e-12 * gram.trace() + 1e-30)
            solved = torch.linalg.solve(gram, -chosen @ own.T)  # [count, rows of the set]
            own[:, part] = (solved.T @ chosen[:, part]).to(dtype).double()
    return x.to(dtype)


def position_invariant(
    fn: RowFunction, inputs: Tensor, rows: int, name: str = "", passes: int | None = None
) -> PositionResult:
    """Fact 1: in a pass of `rows` rows, do results keep their bits in every place, among any rows?

    Every second row is a needle, taken from `inputs` `[any, features]`. The needles move through
    every row index while the rows between them change (zeros, ordinary, 1e4 larger): one pass a row
    index, or about `passes`; the first place again at the end, to see whether results repeat.
    """
    dtype, device = inputs.dtype, inputs.device
    needles = inputs[torch.arange(0, (rows + 1) // 2, device=device) % len(inputs)]
    generator = torch.Generator().manual_seed(rows)
    between = torch.randn(rows // 2, inputs.shape[1], generator=generator).to(device)
    largest = 1e3 if dtype == torch.float16 else 1e4
    home = torch.arange(0, rows, 2, device=device)
    others = torch.arange(1, rows, 2, device=device)
    found = PositionResult(name or "function", rows, 0, 0, -1, -1)
    first: Tensor | None = None
    stride = 1 if passes is None else max(1, rows // passes) | 1
    for number, shift in enumerate([*range(0, rows, stride), 0]):
        x, index = inputs.new_empty(rows, inputs.shape[1]), (home + shift) % rows
        x[index] = needles
        scale = (1.0, largest, 0.0, 30.0)[number % 4]
        x[(others + shift) % rows] = (between.roll(number, 0) * scale).to(dtype)
        result = fn(x)[index]
        first = result if first is None else first
        found = found.with_rows(unequal_bits(first, result), index)
    return found


def class_of(result: Tensor, results: list[Tensor]) -> int:
    """Index of the one of ``results`` with the bits of ``result``, which is added if none has."""
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
