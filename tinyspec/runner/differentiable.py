"""Whole sequences in canonical passes that may be differentiated, on pages of their own.

The rows of all sequences follow each other and are cut into canonical buckets; a sequence may go on
in the next pass, whose attention then reads, and differentiates, keys and values of the one before.
What is kept for the backward is torch's and the tapes'.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyspec.config import STATE_TILE
from tinyspec.kernels.twins.attention_plan import as_slice
from tinyspec.model.gradients import Products, Segment, Tape
from tinyspec.runner.batch import Batch
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import next_bucket

# Places of a ring: the rest of a tile and what convolutions read before it.
RING = 2 * STATE_TILE
# What another thread may not do while a pass, or a part of one that is computed again, runs.
Exclusive = Callable[[], AbstractContextManager[Any]]


def passes(rows: int, canonical: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The bucket of each pass over so many rows, the first of them that it holds, and their end."""
    first = 0
    while first < rows:
        bucket = next_bucket(rows - first, canonical)
        yield bucket, first, min(first + bucket, rows)
        first += bucket


def run_passes(
    runner: ModelRunner,
    sequences: Sequence[Sequence[int]],
    wanted: list[int],
    exclusive: Exclusive,
    layers: Sequence[nn.Module] = (),
) -> tuple[Tensor, Any]:
    """Logits [N, V], in the dtype of the model, of the rows ``wanted``, and the output of the last
    pass.

    sequences: of token ids, whose rows follow each other. wanted: ascending. exclusive: a block in
    which nothing else uses the model. layers: of the model, to be computed again in the backward
    instead of being kept.
    """
    size, buckets = runner.page_size, runner.buckets
    begins = list(accumulate(map(len, sequences), initial=0))
    counts = [-(-len(sequence) // size) for sequence in sequences]
    tables = [list(range(end - n, end)) for n, end in zip(counts, accumulate(counts), strict=True)]
    cache = runner.pages(sum(counts), states=(len(sequences), RING))
    found, output, tape = [], None, Tape([])
    with ExitStack() as stack:
        stack.enter_context(runner.on_pages(cache))
        for layer in layers:
            stack.enter_context(_checkpointed(runner, layer, exclusive))
        for bucket, first, end in passes(begins[-1], buckets.canonical):
            parts, segments, owned = [], [], []
            for n, (begin, ids, table) in enumerate(zip(begins, sequences, tables, strict=False)):
                low, high = max(first, begin), min(end, begin + len(ids))
                if low < high:
                    parts.append((ids[low - begin : high - begin], low - begin, table))
                    at, to = ((x - begin) // STATE_TILE * STATE_TILE for x in (low, high))
                    owned.append((n, at, to))
                    segments.append(Segment(low - first, high - first, high - begin))
            tape, keep = Tape(segments, tape.after), None
            rows = [
                n - first for n in wanted[bisect_left(wanted, first) : bisect_left(wanted, end)]
            ]
            # As many give logits as a canonical bucket has.
            if (count := buckets.fit_canonical(max(len(rows), 1))) < bucket:
                padded = rows + [0] * (count - len(rows))
                keep = torch.tensor(padded, dtype=torch.int64, device=runner.device)
            batch = Batch.of(parts, bucket, size, runner.device, (owned, RING))
            with Products():
                logits, output = runner.output(batch, keep, True, tape=tape)
            found.append(logits[: len(rows)] if keep is not None else logits[as_slice(rows)])
    return torch.cat(found) if len(found) > 1 else found[0], output


@contextmanager
def _checkpointed(runner: ModelRunner, layer: nn.Module, exclusive: Exclusive) -> Iterator[None]:
    """``layer`` keeps nothing of its own while the block runs."""
    before, forward = vars(layer).get("forward"), layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        resumed, first = runner.resumed(), [True]

        def compute(*args: Any) -> Any:
            if first:
                first.clear()
                return forward(*args, **kwargs)
            with exclusive(), resumed(), Products():
                return forward(*args, **kwargs)

        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)

    vars(layer)["forward"] = run
    try:
        yield
    finally:
        del vars(layer)["forward"]
        if before is not None:
            vars(layer)["forward"] = before
