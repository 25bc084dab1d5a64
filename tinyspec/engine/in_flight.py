"""A pass under way: what it is on the device, and whose tokens it gives. Knows no user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.runner.batch import PackedPass
from tinyspec.runner.device_queue import Pending, to_device
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampled, Sampling
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, Pass, PassRecord, ScheduledRows
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.sequence_table import Array
from tinyspec.thinking.taps import ThinkingRows


@dataclass
class NewTokens:
    """Of n sequences, [n] each: rows of the table, where the tokens of each are among those
    sampled, how many there are, and its place among those that verify drafts, or -1."""

    rows: Array
    firsts: Array
    counts: Array
    verified: Array

    def only(self, which: Array) -> NewTokens:
        """Those at ``which``."""
        columns = (self.rows, self.firsts, self.counts, self.verified)
        return NewTokens(*(column[which] for column in columns))


@dataclass(eq=False)
class InFlightPass:
    """A pass under way, and the n sequences that get tokens from it: siblings that start come last.

    generation_ids: of the works' rows when it was launched; a row that has another by now holds
    another sequence, or the same one computed anew. work [n]: which work's rows a sequence's tokens
    come from. new: the n sequences, by a leader's row where a sibling starts. siblings: (place
    among the n, sequence). leads: whether siblings may wait for a prompt that it computes.
    unscored: (work, position, next token) of prompt rows whose logits give a log-probability that
    is missing. thinking: rows of prompts that are thought about.

    For the device, once it is packed: packed, samples; comparison: of drafts with what is sampled;
    targets [P]: tokens of prompts whose log-probabilities the first P rows of logits give; before:
    a pass whose results were not in, until this one has run, which takes tokens where they lie;
    moves, copies: of recurrent states, as of ``Checkpoints``; error: why it could not be packed.
    settled: whether it was launched as all later ones of its shape will be. moved: a setting of
    torch's that another thread has set since it was pinned for it.

    For its commit: began: wall and process time at its begin. results, raised: what it found, or
    raised. ends [works]: up to where their positions are good, given what was thought about those
    before. thoughts: whose prompts were thought about, and how many thoughts each had. failed:
    sequences without a thought, and why.
    """

    work_pass: Pass
    record: PassRecord
    generation_ids: Array
    work: Array
    new: NewTokens
    siblings: list[tuple[int, Sequence]]
    leads: bool
    unscored: list[tuple[int, int, int]]
    pending: Pending[Sampling] = field(init=False)
    thinking: ThinkingRows | None = None
    packed: PackedPass = field(init=False)
    samples: SampleBatch = field(init=False)
    comparison: Comparison | None = None
    targets: Tensor | None = None
    before: InFlightPass | None = None
    moves: Array | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None
    settled: bool = True
    moved: str | None = None
    began: tuple[float, float] = (0.0, 0.0)
    results: Sampled | None = None
    raised: Exception | None = None
    ends: Array = field(init=False)
    thoughts: list[tuple[Request, int]] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)

    @classmethod
    def of(cls, work_pass: Pass, admission: Admission) -> InFlightPass:
        """Before it is handed to the device."""
        record = PassRecord.of(work_pass, len(admission.waiting), admission.pool.num_held)
        table, works = work_pass.table, work_pass.works
        firsts = works.cu_tokens - works.yields
        work, rows, counts = firsts, works.rows, works.yields
        if not works.single:
            work = counts.nonzero()[0]
            rows, firsts, counts = rows[work], firsts[work], counts[work]
        siblings: list[tuple[int, Sequence]] = []
        leading = table.draft_free[rows]
        if leads := bool(np.count_nonzero(leading)):
            leaders = [(n, table.sequences[works.rows[n]]) for n in work[leading].tolist()]
            started = [(n, sibling) for n, leader in leaders for sibling in leader.siblings]
            del started[max(admission.free_places, 0) :]
            siblings = [(len(work) + n, sibling) for n, (_, sibling) in enumerate(started)]
            work = np.concatenate([work, [n for n, _ in started]]).astype(np.int64)
            rows, counts = works.rows[work], works.yields[work]
            firsts = counts.cumsum() - counts
        verifies = (table.num_drafts[rows] > 0) & (works.kinds[work] != DRAFT)
        verified = np.where(verifies, verifies.cumsum() - 1, -1)
        ids, unscored = table.generation_id[works.rows], _unscored(work_pass)
        new = NewTokens(rows, firsts, counts, verified)
        return cls(work_pass, record, ids, work, new, siblings, leads, unscored)

    @property
    def works(self) -> ScheduledRows:
        """Its rows."""
        return self.work_pass.works

    @property
    def alive(self) -> Array:
        """[works] bool: whose sequences are still those that it was launched for."""
        found: Array = self.work_pass.table.generation_id[self.works.rows] == self.generation_ids
        return found

    @property
    def predictable(self) -> bool:
        """Whether all but the ids of its tokens is known: each of its sequences gets one token or
        one draft, none starts, and nothing is thought about."""
        thinks = self.thinking is not None and bool(self.thinking.spans)
        return not (self.verifies or self.leads or self.pending.failed or thinks)

    @property
    def verifies(self) -> bool:
        """Whether any of its sequences has drafts to verify."""
        return bool(np.count_nonzero(self.new.verified >= 0))

    @contextmanager
    def committed_ahead(self) -> Iterator[None]:
        """A block in which the sequence table is as it will be once it is committed, but for the
        ids of its tokens. No sequence may enter or leave in it."""
        works, table = self.works, self.work_pass.table
        drafting = works.kinds == DRAFT
        final = ~drafting
        grown = self.new.rows[final[self.work]]
        with table.ahead():
            table.advance(works.rows[final], works.ends[final], self.work_pass.canonical)
            table.length[grown] += 1
            table.mark_final(grown)
            table.num_drafts[works.rows[drafting]] += 1
            yield

    def sources(self, rows: Array) -> Array:
        """[n]: where among its tokens the newest one of each of ``rows`` is; -1: elsewhere."""
        places = np.full(len(self.work_pass.table.sequences), -1)
        places[self.new.rows] = self.new.firsts
        found: Array = places[rows]
        return found

    @property
    def tokens(self) -> Tensor:
        """What was sampled, where it lies."""
        return self.pending.results.tokens

    def fetch(self) -> Sampled:
        """Wait for the device. Raises what the pass raised."""
        fetched = self.pending.fetch()
        return self.pending.results.on_host(*fetched)


def _unscored(work_pass: Pass) -> list[tuple[int, int, int]]:
    """As in ``InFlightPass``."""
    table, works = work_pass.table, work_pass.works
    found: list[tuple[int, int, int]] = []
    for n in table.places("scores_prompt", works.rows):
        request = table.sequences[works.rows[n]].request
        known, prompt = request.prompt_logprobs, request.prompt
        positions = range(int(works.starts[n]), min(int(works.ends[n]), len(prompt) - 1))
        found += [(n, p, prompt[p + 1]) for p in positions if known[p + 1] is None]
    return found


class Comparison:
    """What ``accept_truncate`` reads, for the S sequences of a pass that have drafts to verify."""

    def __init__(self, launched: InFlightPass, before: InFlightPass | None, device: torch.device):
        """before: whose tokens are the newest drafts of some, which have no ids yet."""
        table, new = launched.work_pass.table, launched.new.only(launched.new.verified >= 0)
        rows, firsts, counts = new.rows, new.firsts, new.counts
        unknown = np.full(len(rows), -1) if before is None else before.sources(rows)
        drafts, lengths = table.num_drafts[rows], table.length[rows]
        place = np.arange(max(int(counts.max()), int(drafts.max())))
        columns = np.minimum(lengths[:, None] + place, table.ids.shape[1] - 1)
        guesses = table.ids[rows[:, None], columns]
        guesses[place >= drafts[:, None]] = -1
        some = np.flatnonzero(unknown >= 0)
        last = np.stack([some, drafts[some] - 1, unknown[some]])
        places = firsts[:, None] + np.minimum(place, counts[:, None] - 1)
        numbers = drafts, lengths - 1, table.most[rows] - lengths, table.num_pages[rows]
        self._guesses, self._places, self._excess, self._stops = (
            to_device(x, device)
            for x in (guesses, places, place >= counts[:, None], table.stops[rows])
        )
        packed = to_device(np.stack(numbers).astype(np.int32), device)
        self._drafts, self._starts, self._remaining, self._pages = packed.unbind()
        self._last = to_device(last, device) if len(some) else None

    def run(
        self, kernels: Kernels, page_size: int, tokens: Tensor, before: Tensor | None
    ) -> Tensor:
        """Decisions [5, S] int32 on the sampled ``tokens``; before: those of the pass before. A
        sequence is verified up to its first row without a token; where that is its first row, its
        decision means nothing."""
        targets = tokens[self._places].masked_fill_(self._excess, -1)
        good = (targets >= 0).long().cumprod(1).sum(1).clamp_(min=1).int()
        if self._last is not None:
            assert before is not None
            sequence, place, source = self._last
            self._guesses[sequence, place] = before[source]
        held = (self._drafts, self._starts, self._remaining, self._stops, self._pages)
        found = kernels.accept_truncate(self._guesses, targets, good, *held, page_size)
        return torch.stack(found)


def special_row(sequence: Sequence, position: int, forced: int = -1) -> SpecialRow:
    """For its token at ``position``, which is ``forced`` unless that is -1."""
    request, params = sequence.request, sequence.params
    generated = position - request.num_prompt
    if sequence.teacher_forced and sequence.given_tokens is not None:
        forced = sequence.given_tokens[generated]
    return SpecialRow(
        params,
        generated,
        sequence.before(position) if params.changes_logits else [],
        forced,
        "scores" in request.keeps,
        "logits" in request.keeps,
        request.thread,
        sequence.grammar,
        generated if sequence.teacher_forced else min(generated, sequence.num_generated),
    )
