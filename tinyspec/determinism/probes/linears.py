"""Probes every distinct linear of a patched model by itself, and sets how it runs in each bucket.

Weights are scratch weights. What is found holds for all values of weights: kernel, tiling and order
of additions are chosen by shapes, strides, dtypes and alignment before a number is read, and two
orders that are not the same give other bits on inputs and weights made so that roundings show.

A linear whose bits change with the number of rows runs in tiles of row counts that agree; one whose
product is faster with its operands swapped swaps them in the buckets where that has the same bits.
Knows a model's linears, not its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from tinyspec.determinism.probes.bits import PositionResult
from tinyspec.determinism.probes.row_functions import BucketInvariance, function_steps, probe_pool
from tinyspec.determinism.probes.steps import Steps
from tinyspec.model.cpu.linears import CpuLinear
from tinyspec.model.linear_kinds import linear_kinds, linear_shape, linear_weight
from tinyspec.model.linears import is_plain
from tinyspec.runner.model_runner import ModelRunner

# Linears defined here compute more than their product: routers.
ROUTERS = "transformers.models."
Counts = Mapping[str, Collection[int]]


def linear_steps(
    runner: ModelRunner,
    name: str,
    sizes: Collection[int],
    proven: PositionResult | None = None,
) -> Steps[tuple[BucketInvariance, tuple[int, ...]]]:
    """The result for the linear of this name in the buckets ``sizes``, the reference bucket's among
    them, and those of them in which its operands are swapped from now on.

    proven: fact 1 in the reference bucket, where that is known.
    """
    module = runner.model.get_submodule(name)
    shape, weight = linear_shape(module), linear_weight(module)
    assert shape is not None
    dtype = runner.model.dtype if weight is None else weight.dtype
    pool = probe_pool(shape[0], dtype, runner.device, weight)
    yield
    probe = partial(steps_in_buckets, runner, pool=pool, name=name, proven=proven)
    if isinstance(module, CpuLinear):
        return (yield from _swapped_steps(runner, module, sizes, probe))
    product: Callable[[Tensor], Tensor] = module
    if isinstance(module, nn.Linear) and type(module).__module__.startswith(ROUTERS):
        product = partial(nn.Linear.forward, module)
    return (yield from probe(product, sizes)), ()


def steps_in_buckets(
    runner: ModelRunner,
    fn: Callable[[Tensor], Tensor],
    sizes: Collection[int],
    pool: Tensor,
    name: str,
    search: bool = False,
    proven: PositionResult | None = None,
) -> Steps[BucketInvariance]:
    """``function_steps`` of a function of [1, R, ...]."""

    def of_rows(rows: Tensor) -> Tensor:
        return fn(rows[None])[0]

    reference = runner.buckets.reference
    return function_steps(of_rows, pool, sizes, reference, name, search, proven)


def _swapped_steps(
    runner: ModelRunner,
    module: CpuLinear,
    sizes: Collection[int],
    probe: Callable[..., Steps[BucketInvariance]],
) -> Steps[tuple[BucketInvariance, tuple[int, ...]]]:
    """Operands are swapped where that is faster and has the bits of the reference bucket."""
    reference = runner.buckets.reference

    def swapped(x: Tensor) -> Tensor:
        return module.product(x) if x.shape[1] == reference else module.product_swapped(x)

    faster = [n for n in sizes if module.faster_swapped(n) and n != reference]
    counts: tuple[int, ...] = ()
    if faster:
        equal = yield from probe(swapped, [reference, *faster])
        counts = tuple(n for n in faster if equal.canonical(n))
    result = yield from probe(module, [n for n in sizes if n not in counts])
    same: dict[int, int | None] = dict.fromkeys(counts, result.labels[reference])
    return replace(result, labels=result.labels | same), counts


def set_swapped(runner: ModelRunner, swapped: Counts) -> None:
    """Let linears swap their operands in these buckets (``ProbeResults.swapped``)."""
    for first, names in linear_kinds(runner.model).items():
        for name in names:
            module = runner.model.get_submodule(name)
            if isinstance(module, CpuLinear):
                module.swapped = swapped.get(first, ())


def tile_counts(
    runner: ModelRunner, labels: Mapping[str, Mapping[int, int | None]]
) -> dict[str, tuple[int, ...]]:
    """First name of each kind of plain linears with buckets that are not canonical, and those that
    are: the row counts of its tiles.

    labels: by name and bucket, equal where rows have the same bits.
    """
    found = {}
    reference = runner.buckets.reference
    for name in linear_kinds(runner.model).keys() & labels.keys():
        own = labels[name]
        counts = tuple(rows for rows in sorted(own) if own[rows] == own[reference] is not None)
        module = runner.model.get_submodule(name)
        plain = is_plain(module) or runner.tiles.holds(module)
        if plain and 0 < len(counts) < len(own):
            found[name] = counts
    return found


def set_tiles(runner: ModelRunner, tiles: Counts) -> None:
    """Let linears run in tiles of rows in canonical passes (``ProbeResults.tiles``)."""
    runner.tiles.unbind()
    kinds = linear_kinds(runner.model)
    for name, counts in tiles.items():
        modules = [runner.model.get_submodule(other) for other in kinds[name]]
        runner.tiles.bind([module for module in modules if is_plain(module)], counts)
