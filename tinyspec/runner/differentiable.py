"""Whole sequences in canonical passes that may be differentiated, on pages of their own.

The rows of all sequences follow each other and are cut into canonical buckets; a sequence may go on
in the next pass, whose attention then reads, and differentiates, keys and values of the one before.
What is kept for the backward is torch's and the tapes'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyspec.model.gradients import Products, Segment, Tape
from tinyspec.runner.batch import Batch
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner

# Of a canonical bucket, the part that may be padding before rows are cut into smaller ones.
PADDING = 1 / 4
# What another thread may not do while a pass, or a part of one that is computed again, runs.
Exclusive = Callable[[], AbstractContextManager[Any]]


class Cut(NamedTuple):
    """Rows of one sequence in a pass: its number, and its tokens ``first`` to ``end`` - 1."""

    sequence: int
    first: int
    end: int


def bucket_for(rows: int, canonical: Sequence[int]) -> int:
    """The canonical bucket of the next pass over so many rows, of which some may be left."""
    if rows >= canonical[-1]:
        return canonical[-1]
    size = next(size for size in canonical if size >= rows)
    smaller = [each for each in canonical if each < rows]
    return smaller[-1] if smaller and size - rows > PADDING * size else size


def passes(lengths: Sequence[int], canonical: Sequence[int]) -> Iterator[tuple[int, list[Cut]]]:
    """The bucket of each pass over sequences of these lengths, and what it holds."""
    rest = [Cut(n, 0, length) for n, length in enumerate(lengths)][::-1]
    while rest:
        left = room = bucket_for(sum(cut.end - cut.first for cut in rest), canonical)
        held: list[Cut] = []
        while rest and left:
            number, first, end = rest.pop()
            if end - first > left:
                rest.append(Cut(number, first + left, end))
                end = first + left
            held.append(Cut(number, first, end))
            left -= end - first
        yield room, held


class DifferentiablePasses:
    """Passes over ``sequences`` of token ids. exclusive: a block in which nothing else uses the
    model. layers: of the model, to be computed again in the backward instead of being kept."""

    def __init__(
        self,
        runner: ModelRunner,
        sequences: Sequence[Sequence[int]],
        exclusive: Exclusive,
        layers: Sequence[nn.Module] = (),
    ):
        self._runner, self._sequences, self._exclusive = runner, sequences, exclusive
        self._layers = layers
        size, self._tables, first = runner.page_size, [], 0
        for sequence in sequences:
            count = -(-len(sequence) // size)
            self._tables.append(list(range(first, first + count)))
            first += count
        self._cache = KVCache(runner.layers, first, size, runner.kv_dtype, runner.device)
        self._cache.zero(list(range(first)))

    def run(self, wanted: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
        """Logits [N, V], in the dtype of the model, at the places ``wanted`` of each sequence, and
        the output of the last pass."""
        tapes: list[Tape] = []
        found, output = [], None
        lengths = list(map(len, self._sequences))
        with ExitStack() as stack:
            stack.enter_context(self._runner.on_pages(self._cache))
            for layer in self._layers:
                stack.enter_context(self._checkpointed(layer))
            for bucket, cuts in passes(lengths, self._runner.buckets.canonical):
                tape = self._tape(cuts, tapes[-1] if tapes else None)
                tapes.append(tape)
                rows = self._rows_of(cuts, wanted)
                keep = self._kept(rows, bucket)
                with Products():
                    logits, output = self._runner.output(
                        self._batch(bucket, cuts), keep, True, tape=tape
                    )
                found.append(logits[: len(rows)] if keep is not None else logits[rows])
        return torch.cat(found), output

    @staticmethod
    def _tape(cuts: list[Cut], before: Tape | None) -> Tape:
        segments, first = [], 0
        for cut in cuts:
            end = first + cut.end - cut.first
            segments.append(Segment(first, end, cut.end))
            first = end
        goes_on = before is not None and cuts[0].first > 0
        return Tape(segments, before.after if goes_on and before is not None else {})

    @staticmethod
    def _rows_of(cuts: list[Cut], wanted: Sequence[Sequence[int]]) -> list[int]:
        rows, begun = [], 0
        for number, first, end in cuts:
            rows += [begun + at - first for at in wanted[number] if first <= at < end]
            begun += end - first
        return rows

    def _kept(self, rows: list[int], bucket: int) -> Tensor | None:
        """The rows that give logits, as many as a canonical bucket has; None: all."""
        size = next(n for n in self._runner.buckets.canonical if n >= max(len(rows), 1))
        if size >= bucket:
            return None
        padded = rows + [0] * (size - len(rows))
        return torch.tensor(padded, dtype=torch.int64, device=self._runner.device)

    def _batch(self, bucket: int, cuts: list[Cut]) -> Batch:
        held, tables = self._sequences, self._tables
        parts = [(held[number][first:end], first, tables[number]) for number, first, end in cuts]
        return Batch.of(parts, bucket, self._cache.page_size, self._runner.device)

    @contextmanager
    def _checkpointed(self, layer: nn.Module) -> Iterator[None]:
        """``layer`` keeps nothing of its own while the block runs."""
        before, forward = vars(layer).get("forward"), layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            resumed, first = self._runner.resumed(), [True]

            def compute(*args: Any) -> Any:
                if first:
                    first.clear()
                    return forward(*args, **kwargs)
                with self._exclusive(), resumed(), Products():
                    return forward(*args, **kwargs)

            return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)

        vars(layer)["forward"] = run
        try:
            yield
        finally:
            del vars(layer)["forward"]
            if before is not None:
                vars(layer)["forward"] = before
