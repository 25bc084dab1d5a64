"""Probes every distinct linear of a patched model by itself, and sets how it runs in each bucket.

Weights are scratch weights. What is found holds for all values of weights: kernel, tiling and order
of additions are chosen by shapes, strides, dtypes and alignment before a number is read, and two
orders that are not the same give other bits on inputs and weights made so that roundings show.

A linear whose bits change with the number of rows runs in tiles of row counts that agree; one with
a faster direct product uses it in the buckets where it has the same bits. Knows a model's linears,
not its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from tinyspec.determinism.probes.row_functions import BucketInvariance, probe_function, probe_pool
from tinyspec.model.cpu.linears import TransposedLinear
from tinyspec.model.linear_kinds import distinct_linears, linear_kinds, linear_shape, linear_weight
from tinyspec.model.linears import is_plain
from tinyspec.model.scratch_model import ScratchModel
from tinyspec.runner.model_runner import ModelRunner

# Linears defined here compute more than their product: routers.
ROUTERS = "transformers.models."
Counts = dict[str, tuple[int, ...]]


def probe_linears(runner: ModelRunner, scratch: ScratchModel) -> list[BucketInvariance]:
    """Every distinct linear of the model by itself, the unembedding included. Transposed linears
    use the direct product from here on where it has the same bits."""
    set_direct(runner, {})
    distinct = distinct_linears(runner.model)
    found, direct = scratch.run(partial(_probe_all, runner, distinct))
    set_direct(runner, direct)
    return found


def _probe_all(
    runner: ModelRunner, distinct: Mapping[str, nn.Module]
) -> tuple[list[BucketInvariance], Counts]:
    found = []
    direct: Counts = {}
    for name, module in distinct.items():
        shape, weight = linear_shape(module), linear_weight(module)
        assert shape is not None
        dtype = runner.model.dtype if weight is None else weight.dtype
        pool = probe_pool(shape[0], dtype, runner.device, weight)
        if isinstance(module, TransposedLinear):
            result, direct[name] = _probe_transposed(runner, module, pool, name)
        elif isinstance(module, nn.Linear) and type(module).__module__.startswith(ROUTERS):
            product = partial(nn.Linear.forward, module)
            result = probe_in_buckets(runner, product, pool, name)
        else:
            result = probe_in_buckets(runner, module, pool, name)
        found.append(result)
    return found, direct


def probe_in_buckets(
    runner: ModelRunner,
    fn: Callable[[Tensor], Tensor],
    pool: Tensor,
    name: str,
    search: bool = False,
    sizes: Collection[int] | None = None,
) -> BucketInvariance:
    """``probe_function`` of a function of [1, R, ...], in the engine's buckets or in ``sizes``."""
    sizes = runner.buckets.sizes if sizes is None else sizes

    def of_rows(rows: Tensor) -> Tensor:
        return fn(rows[None])[0]

    return probe_function(of_rows, pool, sizes, runner.buckets.reference, name, search)


def _probe_transposed(
    runner: ModelRunner, module: TransposedLinear, pool: Tensor, name: str
) -> tuple[BucketInvariance, tuple[int, ...]]:
    """The result for ``module``, and the buckets in which it uses the direct product: where that is
    faster and has the bits of the reference bucket."""
    reference = runner.buckets.reference

    def direct(x: Tensor) -> Tensor:
        product = module.transposed_product if x.shape[1] == reference else module.direct_product
        return product(x[0])[None]

    faster = [n for n in runner.buckets.sizes if n in module.fast_rows and n != reference]
    equal = probe_in_buckets(runner, direct, pool, name, sizes=[reference, *faster])
    counts = tuple(n for n in faster if equal.canonical(n))
    rest = [n for n in runner.buckets.sizes if n not in counts]
    result = probe_in_buckets(runner, module, pool, name, sizes=rest)
    same: dict[int, int | None] = dict.fromkeys(counts, result.labels[reference])
    return replace(result, labels=result.labels | same), counts


def direct_counts(runner: ModelRunner) -> Counts:
    """First name of each kind of transposed linears, and the buckets of their direct product."""
    modules = distinct_linears(runner.model).items()
    transposed = {name: m for name, m in modules if isinstance(m, TransposedLinear)}
    return {name: tuple(m.direct) for name, m in transposed.items() if m.direct}


def set_direct(runner: ModelRunner, direct: Mapping[str, Collection[int]]) -> None:
    """Let transposed linears use the direct product in these buckets (``ProbeResults.direct``)."""
    for first, names in linear_kinds(runner.model).items():
        for name in names:
            module = runner.model.get_submodule(name)
            if isinstance(module, TransposedLinear):
                module.direct = direct.get(first, ())


def tile_counts(runner: ModelRunner, linears: list[BucketInvariance]) -> Counts:
    """First name of each kind of plain linears with buckets that are not canonical, and those that
    are: the row counts of its tiles."""
    found = {}
    for c in linears:
        counts = tuple(rows for rows in runner.buckets.sizes if c.canonical(rows))
        if counts and len(counts) < len(c.labels) and is_plain(runner.model.get_submodule(c.name)):
            found[c.name] = counts
    return found


def set_tiles(runner: ModelRunner, tiles: Mapping[str, Collection[int]]) -> None:
    """Let linears run in tiles of rows in canonical passes (``ProbeResults.tiles``)."""
    kinds = linear_kinds(runner.model)
    for name, counts in tiles.items():
        modules = [runner.model.get_submodule(other) for other in kinds[name]]
        runner.tiles.bind([module for module in modules if is_plain(module)], counts)
