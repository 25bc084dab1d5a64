"""Fact 3 on this device: attention of a row depends on its own sequence alone.

Rows of a prompt of more than two tiles, computed all at once, against the same rows in other
segments and passes. Knows kinds of attention calls and kernels, not models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.determinism.results import ComparedRows
from tinyspec.interrupts import flush
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins.attention import KEYS_UNIT
from tinyspec.kernels.twins.attention_plan import TILE, CausalMask
from tinyspec.kernels.twins.layers import stored
from tinyspec.model.attention import LayerShape
from tinyspec.model.checksum import unequal_bits
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
Spans = list[tuple[int, int]]


class AttentionKind(NamedTuple):
    """Calls of one shape; two of a kind differ in nothing that a kernel looks at."""

    shape: LayerShape
    reach: CausalMask = CausalMask()

    @property
    def name(self) -> str:
        shape = self.shape
        bounds = [f"{name} {bound}" for name, bound in self.reach._asdict().items() if bound]
        bounds += [f"softcap {shape.softcap:g}"] if shape.softcap else []
        bounds += ["sinks"] if shape.sinks else []
        heads = f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV heads"
        return f"attention ({', '.join([heads, *bounds])})"


def attention_kinds(runner: ModelRunner, far: bool = True) -> list[AttentionKind]:
    """The distinct kinds of attention calls of the runner's model: without bounds that no row of
    the probe comes to, and then (``far``) with nearer ones in their place."""
    reaches = [layer.reach for layer in runner.served.context.layers]
    layers = list(zip(runner.layers, reaches, strict=True))
    kinds = []
    for shape, reach in layers:
        bounds = {name: bound for name, bound in reach._asdict().items() if bound < LENGTH}
        kinds.append(AttentionKind(shape, CausalMask(**bounds)))
    if far:
        kinds += [AttentionKind(shape, nearer(reach)) for shape, reach in layers]
    return list(dict.fromkeys(kinds))


def nearer(reach: CausalMask) -> CausalMask:
    """``reach`` with bounds that rows of the probe come to, which cut tiles and splits alike."""

    def near(bound: int) -> int:
        rest = bound % SPLIT
        return rest if rest >= LEAST_BOUND else rest + SPLIT

    return CausalMask(**{name: n if n < LENGTH else near(n) for name, n in reach._asdict().items()})


def _passes() -> list[Spans]:
    """Spans of rows first..last of every pass: of one row and of several, all together and some by
    themselves."""
    singles = [(place, place + 1) for place in PLACES]
    # Two of each number of rows, at places that the numbers spread over the sequence.
    several = [
        (first, first + rows)
        for n, rows in enumerate(COUNTS)
        for first in (97 * n % (LENGTH - rows + 1), (LENGTH - rows) * (n % 5) // 4)
    ]
    every = [*singles, *several]
    # The twin leaves out what is behind all contexts of a pass, where these are short.
    short = [
        [span for span in every if span[1] <= end] for end in range(KEYS_UNIT, TILE, KEYS_UNIT)
    ]
    return [every, *short, *([span] for span in (*singles[::SINGLE], *several[::2]))]


PASSES = _passes()
ROWS_OF_ROUND = sum(end - first for spans in PASSES for first, end in spans)


def compare_attention(
    runner: ModelRunner,
    kinds: Collection[AttentionKind],
    known: Collection[ComparedRows] = (),
    rows: int | None = None,
    seconds: float | None = None,
    pause: Callable[[], object] = flush,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ComparedRows]:
    """``known`` with further rounds of ``kinds``, by the kernels that the runner's passes call.

    rows: to have compared of each kind, or seconds to be over, but one round where nothing is
    known; None: one round more than are known, no limit. pause: called before every round. clock:
    tells seconds.
    """
    found = {kind.name: kind for kind in known}
    for kind in kinds:
        compared, begun = found.get(kind.name, ComparedRows(kind.name)), clock()
        wanted = compared.checked + 1 if rows is None else rows
        while compared.checked < wanted:
            pause()
            seed = compared.checked // ROWS_OF_ROUND
            wrong = torch.cat(_round(runner, kind, seed)).any(dim=1)
            differing = compared.differing + int(wrong.sum())
            compared = ComparedRows(kind.name, compared.checked + len(wrong), differing)
            if seconds is not None and clock() - begun > seconds:
                break
        found[kind.name] = compared
    return list(found.values())


def _round(runner: ModelRunner, kind: AttentionKind, seed: int) -> list[Tensor]:
    """Where the rows of ``PASSES`` differ from the same rows of the whole prompt, by pass."""
    attend, device = runner.kernels.paged_attention, runner.device

    def metadata(spans: Spans) -> AttentionMetadata:
        return AttentionMetadata.of(spans, [range(PAGES)] * len(spans), PAGE_SIZE, device)

    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(device, runner.dtype)

    shape = kind.shape
    size = PAGES, PAGE_SIZE, shape.num_kv_heads, shape.head_dim
    k, v = (stored(draw(*size), runner.kv_dtype) for _ in range(2))
    q = draw(LENGTH, shape.num_heads, shape.head_dim)
    scores = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap, **kind.reach._asdict()}
    if shape.sinks:
        scores["sinks"] = draw(shape.num_heads)
    whole = attend(q, k, v, metadata([(0, LENGTH)]), **scores)
    wrong = []
    for spans in PASSES:
        flush()
        index = torch.cat([torch.arange(*span, device=device) for span in spans])
        out = attend(q[index], k, v, metadata(spans), **scores)
        wrong.append(unequal_bits(whole[index], out))
    return wrong
