"""Fact 3 on this device: attention of a row depends on its own sequence alone.

Rows of a prompt of more than two tiles, computed all at once, against the same rows in other
segments and passes. Knows kinds of attention calls and kernels, not models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from tinyspec.determinism.probe_results import ComparedRows, Unsound
from tinyspec.determinism.probes.bits import PositionResult, unequal_bits
from tinyspec.kernels import launch
from tinyspec.kernels.backend import AttentionMetadata, Kernels
from tinyspec.kernels.twins.attention import KEYS_UNIT
from tinyspec.kernels.twins.attention_plan import TILE
from tinyspec.kernels.twins.layers import CODES, stored
from tinyspec.model.attention_calls import LayerShape, Reach
from tinyspec.model.served_model import served_of
from tinyspec.runner.model_runner import ModelRunner

PAGE_SIZE = 128
PAGES = 5
LENGTH = PAGE_SIZE * PAGES - 40
# Kernels sum tiles of keys and splits of this length, or of a part of it. For bounds that no row of
# the probe comes to stand those that leave as much over of it: rows begin and end at the same
# places of tiles and splits. They are at least LEAST_BOUND long, and less than both together.
SPLIT, LEAST_BOUND = 512, 64
# A difference in one row of 10,000 shows in so many with a probability of 99 %.
MANY_ROWS = 50_000
# Of a kind, after its first round: what the proof before a first token takes.
SECONDS = 0.05
# Both sides of every boundary of 64 tokens, both ends, and rows all over: with some head sizes only
# one row in a hundred shows a difference.
BOUNDARIES = (p + d for p in range(64, LENGTH, 64) for d in (-1, 0))
PLACES = sorted({0, 1, 2, 3, LENGTH - 1, *BOUNDARIES, *range(0, LENGTH, 7)})
# Rows of segments: every number of query rows that a segment may be padded to comes up.
COUNTS = (*range(2, 9), 10, 11, 12, 14, 16, 17, 20, 21, 24, 28, 32, 40, 42, 48, 56, 64, 80)
COUNTS = (*COUNTS, 85, 96, 106, 112, 128)
# One in so many of the rows also runs in a pass of its own.
SINGLE = 15
REMEDY = (
    "attention does not depend on reference_rows: try another dtype, bfloat16 before all others"
)


def probe_attention(
    runner: ModelRunner,
    rows: int = MANY_ROWS,
    seconds: float | None = SECONDS,
    pause: Callable[[], None] = lambda: None,
) -> list[PositionResult]:
    """``probe_rows`` of the kinds of attention calls of the runner's model that a first token waits
    for, by the kernels that its passes call; of the others no rows yet. pause: called between
    passes."""
    waited_for = {*_kinds(runner, far=runner.kernels.backend == "triton")}
    return [
        _of_runner(runner, kind, rows, seconds, pause) if kind in waited_for else _nothing(*kind)
        for kind in _kinds(runner)
    ]


def _of_runner(
    runner: ModelRunner,
    kind: tuple[LayerShape, Reach],
    rows: int,
    seconds: float | None,
    pause: Callable[[], None],
    first: int = 0,
) -> PositionResult:
    shape, reach = kind
    dtype, device = runner.model.dtype, runner.device
    more = (runner.kv_dtype, pause, first)
    return probe_rows(runner.kernels, shape, dtype, device, reach, rows, seconds, *more)


def longest_split(runner: ModelRunner) -> int:
    """Most tokens of a context that the runner's kernels sum at once before they merge sums; 0:
    fewer than the probes' contexts have anyway."""
    if runner.kernels.backend != "triton":
        return 0
    dtype, device, codes = runner.model.dtype, runner.device, runner.kv_dtype == CODES
    dims = {layer.head_dim for layer in runner.layers}
    return max(launch.attention(dtype, dim, device, codes).split for dim in dims)


def compare_more(
    runner: ModelRunner,
    known: ComparedRows,
    rows: int,
    pause: Callable[[], None] = lambda: None,
) -> tuple[ComparedRows, list[Unsound]]:
    """More rounds of a kind of attention calls until ``rows`` were compared; what they show."""
    if known.checked >= rows:
        return known, []
    (kind,) = (kind for kind in _kinds(runner) if _name(*kind) == known.name)
    first = known.checked // sum(end - begin for spans in _passes() for begin, end in spans)
    found = _of_runner(runner, kind, rows - known.checked, None, pause, first)
    (compared,), unsound = summary([found])
    checked, differing = known.checked + compared.checked, known.differing + compared.differing
    return ComparedRows(known.name, checked, differing), unsound


def _kinds(runner: ModelRunner, far: bool = True) -> list[tuple[LayerShape, Reach]]:
    """The distinct kinds of attention calls; first without bounds that no row of the probe comes
    to, and then (``far``) with nearer ones in their place."""
    reaches = [layer.reach for layer in served_of(runner.model).context.layers]
    layers = list(zip(runner.layers, reaches, strict=True))
    kinds = [(shape, _within(reach)) for shape, reach in layers]
    if far:
        kinds += [(shape, _nearer(reach)) for shape, reach in layers]
    return list(dict.fromkeys(kinds))


def summary(found: list[PositionResult]) -> tuple[list[ComparedRows], list[Unsound]]:
    """What ``probe_attention`` found, as ``ProbeResults`` hold it."""
    compared = [ComparedRows(r.name, r.checked, r.differing) for r in found]
    return compared, [Unsound(r.name, str(r), REMEDY) for r in found if not r]


def _within(reach: Reach) -> Reach:
    """``reach`` without bounds that no row of the probe comes to."""
    near = {name: bound for name, bound in vars(reach).items() if bound < LENGTH}
    return Reach(**near)


def _nearer(reach: Reach) -> Reach:
    """``reach`` with bounds that rows of the probe come to, which cut tiles and splits alike."""
    return Reach(**{name: n if n < LENGTH else _near(n) for name, n in vars(reach).items()})


def _near(bound: int) -> int:
    rest = bound % SPLIT
    return rest if rest >= LEAST_BOUND else rest + SPLIT


def _passes() -> Iterator[list[tuple[int, int]]]:
    """Spans of rows first..last of every pass: of one row and of several, all together and some by
    themselves."""
    singles = [(place, place + 1) for place in PLACES]
    # Two of each number of rows, at places that the numbers spread over the sequence.
    several = [
        (first, first + rows)
        for n, rows in enumerate(COUNTS)
        for first in (97 * n % (LENGTH - rows + 1), (LENGTH - rows) * (n % 5) // 4)
    ]
    yield [*singles, *several]
    # The twin leaves out what is behind all contexts of a pass, where these are short.
    for end in range(KEYS_UNIT, TILE, KEYS_UNIT):
        yield [span for span in (*singles, *several) if span[1] <= end]
    yield from ([span] for span in (*singles[::SINGLE], *several[::2]))


def probe_rows(
    kernels: Kernels,
    shape: LayerShape,
    dtype: torch.dtype,
    device: torch.device,
    reach: Reach | None = None,
    rows: int = 1,
    seconds: float | None = None,
    kv_dtype: torch.dtype | None = None,
    pause: Callable[[], None] = lambda: None,
    first: int = 0,
) -> PositionResult:
    """Rounds until ``rows`` are compared or ``seconds`` are over (None: no limit); one at least.
    kv_dtype: of the cache (None: ``dtype``). first: number of the first round."""
    begun = time.perf_counter()
    reach = reach or Reach()
    like = torch.empty(0, dtype=dtype, device=device)
    found = _nothing(shape, reach)
    for seed in count(first):
        found = found.plus(_round(kernels, shape, like, reach, seed, kv_dtype or dtype, pause))
        late = seconds is not None and time.perf_counter() - begun > seconds
        if late or found.checked >= rows:
            break
    return found


def _round(
    kernels: Kernels,
    shape: LayerShape,
    like: Tensor,
    reach: Reach,
    seed: int,
    kv_dtype: torch.dtype,
    pause: Callable[[], None],
) -> PositionResult:
    """Compares the rows of ``_passes`` with the same rows of the whole prompt. like: of the dtype
    and on the device of queries."""

    def metadata(spans: list[tuple[int, int]]) -> AttentionMetadata:
        return AttentionMetadata.of(spans, [range(PAGES)] * len(spans), PAGE_SIZE, like.device)

    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(like)

    size = PAGES, PAGE_SIZE, shape.num_kv_heads, shape.head_dim
    k, v = (stored(draw(*size), kv_dtype) for _ in range(2))
    q = draw(LENGTH, shape.num_heads, shape.head_dim)
    scores = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap, **vars(reach)}
    if shape.sinks:
        scores["sinks"] = draw(shape.num_heads)
    whole = kernels.paged_attention(q, k, v, metadata([(0, LENGTH)]), **scores)
    found = _nothing(shape, reach)
    for spans in _passes():
        pause()
        index = torch.cat([torch.arange(*span, device=like.device) for span in spans])
        out = kernels.paged_attention(q[index], k, v, metadata(spans), **scores)
        found = found.with_rows(unequal_bits(whole[index], out))
    return found


def _nothing(shape: LayerShape, reach: Reach) -> PositionResult:
    """No rows compared."""
    return PositionResult(_name(shape, reach), LENGTH, 0, 0, -1, -1)


def _name(shape: LayerShape, reach: Reach) -> str:
    bounds = [f"{name} {bound}" for name, bound in vars(reach).items() if bound]
    bounds += [f"softcap {shape.softcap:g}"] if shape.softcap else []
    bounds += ["sinks"] if shape.sinks else []
    heads = f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV heads"
    return f"attention ({', '.join([heads, *bounds])})"
