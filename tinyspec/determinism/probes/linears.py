"""Every distinct linear of a patched model by itself, in every bucket, and how it may run there.

A linear whose bits change with the number of rows runs in tiles of those that agree; one that knows
a quicker way runs it in the buckets where that has the same bits. Knows a model's linears, not its
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from tinyspec.determinism.probes.row_functions import BucketClasses, bucket_classes, probe_pool
from tinyspec.model.cpu.linears import TransposedLinear
from tinyspec.model.linear_kinds import distinct_linears, linear_kinds, linear_shape, linear_weight
from tinyspec.model.linears import is_plain
from tinyspec.runner.model_runner import ModelRunner

# Where subclasses of nn.Linear are defined that call its forward.
ROUTERS = "transformers.models."
Counts = dict[str, tuple[int, ...]]


def probe_linears(runner: ModelRunner) -> list[BucketClasses]:
    """Every distinct linear of the model, the unembedding included, by itself; from here on those
    that can run straight where they were found to."""
    run_direct(runner, {})
    found = []
    direct: Counts = {}
    for name, module in distinct_linears(runner.model).items():
        shape, weight = linear_shape(module), linear_weight(module)
        assert shape is not None
        dtype = runner.model.dtype if weight is None else weight.dtype
        pool = probe_pool(shape[0], dtype, runner.device, weight)
        if isinstance(module, TransposedLinear):
            classes, direct[name] = _turned(runner, module, pool, name)
            found.append(classes)
        # A router that is a linear does more with its logits; here the matmul alone is meant.
        elif isinstance(module, nn.Linear) and type(module).__module__.startswith(ROUTERS):
            found.append(classes_of(runner, partial(nn.Linear.forward, module), pool, name))
        else:
            found.append(classes_of(runner, module, pool, name))
    run_direct(runner, direct)
    return found


def classes_of(
    runner: ModelRunner,
    fn: Callable[[Tensor], Tensor],
    pool: Tensor,
    name: str,
    search: bool = False,
    sizes: Collection[int] | None = None,
) -> BucketClasses:
    """``bucket_classes`` of a function of [1, R, ...] in the engine's buckets, or those of
    ``sizes``."""
    sizes = runner.buckets.sizes if sizes is None else sizes

    def rows_alone(rows: Tensor) -> Tensor:
        return fn(rows[None])[0]  # as in the model: [1, R, ...]

    return bucket_classes(rows_alone, pool, sizes, runner.buckets.reference, name, search)


def _turned(
    runner: ModelRunner, module: TransposedLinear, pool: Tensor, name: str
) -> tuple[BucketClasses, tuple[int, ...]]:
    """The classes of ``module`` if it runs straight wherever that has the bits of the reference
    bucket and is quicker, and the buckets where it does."""
    reference = runner.buckets.reference

    def direct(x: Tensor) -> Tensor:
        way = module.transposed_product if x.shape[1] == reference else module.direct_product
        return way(x[0])[None]

    quick = [n for n in runner.buckets.sizes if n in module.fast_rows and n != reference]
    alike = classes_of(runner, direct, pool, name, sizes=[reference, *quick])
    counts = tuple(n for n in quick if alike.canonical(n))
    rest = [n for n in runner.buckets.sizes if n not in counts]
    found = classes_of(runner, module, pool, name, sizes=rest)
    same: dict[int, int | None] = dict.fromkeys(counts, found.labels[reference])
    return replace(found, labels=found.labels | same), counts


def find_direct(runner: ModelRunner) -> Counts:
    """Kinds of linears that run straight, and the buckets that they do it in."""
    modules = distinct_linears(runner.model).items()
    turned = {name: m for name, m in modules if isinstance(m, TransposedLinear)}
    return {name: tuple(m.direct) for name, m in turned.items() if m.direct}


def run_direct(runner: ModelRunner, direct: Mapping[str, Collection[int]]) -> None:
    """Let turned linears run straight where ``straight`` says, as in ``Facts``, and no others."""
    for first, names in linear_kinds(runner.model).items():
        for name in names:
            module = runner.model.get_submodule(name)
            if isinstance(module, TransposedLinear):
                module.direct = direct.get(first, ())


def find_tiles(runner: ModelRunner, linears: list[BucketClasses]) -> Counts:
    """Kinds of plain linears that tell some buckets from the reference one, and the buckets that
    they do not."""
    found = {}
    for c in linears:
        counts = tuple(rows for rows in runner.buckets.sizes if c.canonical(rows))
        if counts and len(counts) < len(c.labels) and is_plain(runner.model.get_submodule(c.name)):
            found[c.name] = counts
    return found


def run_in_tiles(runner: ModelRunner, tiles: Mapping[str, Collection[int]]) -> None:
    """Let linears run in tiles of rows in canonical passes; ``tiles`` as in ``Facts``."""
    kinds = linear_kinds(runner.model)
    for name, counts in tiles.items():
        modules = [runner.model.get_submodule(other) for other in kinds[name]]
        runner.tiles.bind([module for module in modules if is_plain(module)], counts)
