"""Probes a served model end to end: does a pass give every row the logits, log-probabilities, keys
and values that the reference bucket gives it, and how long does it take?

Compared is on scratch weights, which the caller sees to, so that no value of the model's own can
hide a difference. Rows of every kind share its passes: single rows, verifies, prompt chunks,
padding. Knows passes and KV, not modules.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.config import STATE_TILE
from tinyspec.interrupts import flush
from tinyspec.kernels import launch
from tinyspec.kernels.twins.layers import CODES, stored, values
from tinyspec.model.checksum import row_checksums, same_bits, unequal_bits
from tinyspec.runner.batch import Batch, Owned, Part
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner

# Sequences: rows that each has in the probe, and position of the first. 120 + 17 crosses a tile.
SEGMENTS = ((1, 7), (5, 0), (1, 64), (1, 30), (17, 120), (1, 127), (5, 21), (1, 128), (96, 3))
# Rows of the sequence whose context goes beyond a split, and its place among them: there every
# bucket's second pass begins.
BEYOND, PLACE = 9, 4
# Places of a ring: what is left of a tile before a segment, and the longest one.
RING = 128
# Log-probabilities compared a row.
COLUMNS = 16
# About so many rows are distinct; larger buckets repeat them.
DISTINCT_ROWS = 96
KINDS = {True: "canonical", False: "other"}


class Segment(NamedTuple):
    """Rows ``first`` to ``end`` of the probe: of one sequence, on its own pages."""

    first: int
    end: int
    position: int
    pages: list[int]


def segments(rows: int, page_size: int, max_model_len: int, split: int = 0) -> list[Segment]:
    """Sequences with ``rows`` rows together. split: one of them has as many tokens before its
    first row; 0: none has."""
    kinds = list(SEGMENTS)
    if split:
        kinds.insert(PLACE, (BEYOND, split))
    found: list[Segment] = []
    first = page = 0
    while first < rows:
        cycle, kind = divmod(len(found), len(kinds))
        count, position = kinds[kind]
        count = min(count, max_model_len, rows - first)
        if position == split < max_model_len:  # shorter rather than elsewhere
            count = min(count, max_model_len - split)
        position = (position + 5 * cycle) % (max_model_len - count + 1)
        pages = -(-(position + count) // page_size)
        found.append(Segment(first, first + count, position, list(range(page, page + pages))))
        first, page = first + count, page + pages
    return found


def longest_split(runner: ModelRunner) -> int:
    """Most tokens of a context that the runner's kernels sum at once before they merge sums; 0:
    fewer than the probes' contexts have anyway."""
    if runner.kernels.backend != "triton":
        return 0
    dtype, device, codes = runner.dtype, runner.device, runner.kv_dtype == CODES
    dims = {layer.head_dim for layer in runner.layers}
    return max((launch.attention(dtype, dim, device, codes).split for dim in dims), default=0)


def distinct_rows(runner: ModelRunner) -> list[Segment]:
    """The sequences of a probe whose rows are distinct."""
    reference, largest = runner.buckets.reference, runner.buckets.sizes[-1]
    count = min(largest, -(-DISTINCT_ROWS // reference) * reference)
    longest = runner.config.max_model_len
    assert longest
    return segments(count, runner.page_size, longest, longest_split(runner))


def needed_bytes(runner: ModelRunner, rows: int) -> int:
    """Memory for the pages and states of a probe of up to ``rows`` rows."""
    own = distinct_rows(runner)
    page = KVCache.page_bytes(runner.served, runner.page_size, runner.kv_dtype)
    states = KVCache.state_bytes(runner.served, (len(own), RING))
    return -(-rows // own[-1].end) * ((own[-1].pages[-1] + 1) * page + states)


class ModelProbe:
    """Passes of up to ``rows`` rows, on pages of their own, and what the reference bucket gives
    the same rows.

    The first few hundred rows are distinct; the others repeat them on other pages. took: seconds of
    the fastest pass that was compared, by rows. Its memory lasts as long as the probe.

    Once the reference rows are computed: tables: of the logits and log-probabilities of every
    distinct row. written: their keys and values, by pool. sound: rows [N] of sequences without NaN.
    """

    def __init__(self, runner: ModelRunner, rows: int = 0):
        self._runner, self._page_size = runner, runner.page_size
        self.took: dict[int, float] = {}
        own = distinct_rows(runner)
        self.distinct = distinct = own[-1].end
        self._pages, self._copies = own[-1].pages[-1] + 1, max(1, -(-rows // distinct))
        self._segments = [
            Segment(first + rows, end + rows, position, [page + pages for page in own_pages])
            for rows, pages in ((n * distinct, n * self._pages) for n in range(self._copies))
            for first, end, position, own_pages in own
        ]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(runner.vocab_size, (distinct,), generator=generator)
        self._ids: list[int] = ids.tolist()
        states = len(self._segments), RING
        self._cache = runner.pages(self._copies * self._pages, states=states)
        self._rings = [part for layer in self._cache.states for part in layer[:-1]]
        self._pools = [p.flatten(0, 1).flatten(1) for p in (*self._cache.pools, *self._rings)]
        self._fill_pages()

    def run_tokens(self, ids: Tensor, canonical: bool = True) -> None:
        """A pass of as many of the first distinct rows, with these tokens."""
        assert len(ids) <= self.distinct
        batch = self._batch(0, len(ids))
        batch.input_ids.copy_(ids)
        self._run(batch, canonical)

    def compute_reference(self, recording: AbstractContextManager[object]) -> None:
        """Compute the rows in passes of the reference bucket, after contexts of random KV.

        recording: around the first pass.
        """
        self._fill_pages()
        reference = self._runner.buckets.reference
        parts, slots = [], []
        for first in range(0, self.distinct, reference):
            batch = self._batch(first, reference)
            with nullcontext() if first else recording:
                logits, _ = self._run(batch)
            parts.append([part[: self.distinct - first] for part in self._reduce(logits)])
            slots.append(self._slots(batch, self.distinct - first))
        self.tables = [torch.cat(table) for table in zip(*parts, strict=True)]
        own = [torch.cat(each) for each in zip(*slots, strict=True)]
        self.written = [p.index_select(0, at) for p, at in zip(self._pools, own, strict=True)]
        # A NaN in keys or values reaches other rows of its sequence, and which ones depends on the
        # order of passes: such sequences are not compared.
        numbers = (values(rows, self._runner.dtype) for rows in self.written)
        finite = torch.stack([rows.isfinite().all(dim=1) for rows in numbers]).all(dim=0)
        sound = [
            finite[p.first : p.end].all().expand(p.end - p.first)
            for p in self._segments
            if p.first < self.distinct
        ]
        self.sound = torch.cat(sound)
        states = [part for layer in self._cache.states for part in layer]
        for pool in (*self._cache.pools, *states):  # for the rows that repeat these
            copies = pool.view(self._copies, -1, *pool.shape[1:])
            copies[1:] = copies[:1]

    def difference(self, rows: int, numbers: Collection[int]) -> str | None:
        """What in canonical passes of ``rows`` rows with these ``numbers`` differs from the
        reference bucket."""
        for number in numbers:
            # Each pass begins with other sequences, so that neighbours differ, and every second
            # one has padding.
            first = self._segments[number * 4 % len(self._segments)].first
            live = rows - rows // 4 * (number % 2)
            batch = self._batch(first, rows, live)
            place = torch.arange(first, first + live, device=self._runner.device) % self.distinct
            slots = self._slots(batch, live)
            for pool, at in zip(self._pools, slots, strict=True):
                pool.index_fill_(0, at, 0)  # so that this pass must write what is compared
            logits, seconds = self._run(batch)
            self.took[rows] = min(seconds, self.took.get(rows, seconds))
            kept = self._logit_rows(rows)
            kept = kept[kept < live]
            tables = [part[: len(kept)] for part in self._reduce(logits)]
            wrong = {"logits": self._differ(tables, self.tables, place[kept])}
            written = [p.index_select(0, at) for p, at in zip(self._pools, slots, strict=True)]
            wrong["keys and values"] = self._differ(written, self.written, place)
            for pool, own, at in zip(self._pools, self.written, slots, strict=True):
                pool.index_copy_(0, at, own[place])
            if any(wrong.values()):
                return " and ".join(name for name, differs in wrong.items() if differs)
        return None

    def _slots(self, batch: Batch, live: int) -> list[Tensor]:
        """Where the first ``live`` rows of a pass are written, by pool."""
        pages, given = batch.slot_mapping[:live], batch.metadata.checkpoints
        rings = pages if given is None else given.slots[:live]
        return [pages] * len(self._cache.pools) + [rings] * len(self._rings)

    def _differ(self, found: list[Tensor], tables: list[Tensor], rows: Tensor) -> bool:
        """Whether ``found`` are other than these rows of the tables, where these are sound."""
        for own, table in zip(found, tables, strict=True):
            expected = table[rows]
            if not same_bits(own, expected):
                unlike = unequal_bits(own, expected).any(dim=1)
                if (unlike & self.sound[rows]).any():
                    return True
        return False

    def _fill_pages(self) -> None:
        """Finite noise, different on every page of the distinct rows."""
        generator = torch.Generator().manual_seed(1)
        scale = torch.rand(self._pages, 1, 1, 1, generator=generator) + 0.5
        scale = scale.to(self._runner.device, self._runner.dtype)
        for pool in self._cache.pools:
            noise = torch.randn(pool.shape[1:], generator=generator).to(scale)
            own = pool[: self._pages]
            filled = torch.mul(noise, scale, out=own if own.dtype == noise.dtype else None)
            own.copy_(stored(filled, own.dtype))
        # Gigabytes for the rows of a large pass: drawn once for all sequences and layers.
        drawn: dict[tuple[int, ...], Tensor] = {}
        for layer in self._cache.states:
            for part in layer:
                if (shape := tuple(part.shape[1:])) not in drawn:
                    drawn[shape] = torch.randn(shape, generator=generator).to(part.device)
                scale = torch.rand(len(part), generator=generator).to(part.device, part.dtype)
                noise = drawn[shape].to(part.dtype)
                torch.mul(noise, scale.view(-1, *(1 for _ in shape)) + 0.5, out=part)
            layer.gates.abs_().neg_()  # decays

    def _logit_rows(self, rows: int) -> Tensor:
        """Rows of a pass that are unembedded: all, or in a large pass as many as the reference
        bucket has, evenly spread; other counts may have other bits."""
        count = min(rows, self._runner.buckets.reference)
        return torch.arange(count, device=self._runner.device) * rows // count

    def _batch(self, first: int, rows: int, live: int | None = None) -> Batch:
        """``rows`` rows from ``first`` on, cyclically, those behind ``live`` padding; the first and
        the last of their segments may be cut."""
        parts: list[Part] = []
        owned: list[Owned] = []
        left = rows if live is None else live
        number = next(n for n, segment in enumerate(self._segments) if first < segment.end)
        while left > 0:
            segment = self._segments[number % len(self._segments)]
            cut = 0 if parts else first - segment.first
            begin = (segment.first + cut) % self.distinct
            ids = self._ids[begin : begin + min(segment.end - segment.first - cut, left)]
            parts.append((ids, segment.position + cut, segment.pages))
            # What came since the state that precedes the segment is read from rings.
            at = segment.position // STATE_TILE * STATE_TILE
            owned.append((number % len(self._segments), at, at))
            left -= len(ids)
            number += 1
        states = owned, RING
        return Batch.of(parts, rows, self._page_size, self._runner.device, states)

    def _run(self, batch: Batch, canonical: bool = True) -> tuple[Tensor, float]:
        """Logits of those rows of a pass that are unembedded, and seconds."""
        kept = self._logit_rows(len(batch.input_ids))
        flush()
        begun = self._clock()
        with self._runner.on_pages(self._cache):
            logits = self._runner.forward(batch, kept, canonical)
        return logits, self._clock() - begun

    def _clock(self) -> float:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        return time.perf_counter()

    def _reduce(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is compared of logits [R, V]: a checksum of each row's bits [R, 1], to save memory,
        and log-probabilities of a few tokens [R, COLUMNS], which share one sum."""
        columns = (
            torch.linspace(0, logits.shape[1] - 1, COLUMNS, device=logits.device).round().long()
        )
        chosen = self._runner.kernels.log_softmax(logits).index_select(1, columns)
        return row_checksums(logits.float())[:, None], chosen


def graph_refusals(runner: ModelRunner) -> dict[str, str]:
    """Why passes are not captured as graphs, by kind; empty for the twins, which know no graphs.

    Runs a pass of each kind. None of ``runner`` may be running.
    """
    if runner.kernels.backend != "triton":
        return {}
    with runner.torch_state():
        probe = ModelProbe(runner)
        for canonical in KINDS:
            probe.run_tokens(torch.zeros(runner.buckets.reference, dtype=torch.int64), canonical)
    found = {kind: runner.graphs.refusal(canonical) for canonical, kind in KINDS.items()}
    return {kind: why for kind, why in found.items() if why is not None}
