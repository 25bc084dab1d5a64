"""Hands passes to the device: packed rows, what is sampled from them, drafts to compare.

Waits for nothing. The newest tokens of a pass whose results are not in are taken where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.runner.batch import PackedPass
from tinyspec.runner.device_queue import Pending, to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampled, Sampler, Sampling
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, Pass, PassRecord, ScheduledRows, spread
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable, ahead_of_results
from tinyspec.thinking.taps import ThinkingRows
from tinyspec.thinking.thinker import Thinker

GREEDY = SamplingParams()


@dataclass
class Results:
    """Of a pass, on the device. decisions [5, S] int32: of ``accept_truncate``, in its order;
    prompt_logprobs [P] fp32."""

    sampling: Sampling
    decisions: Tensor | None
    prompt_logprobs: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """What is fetched."""
        sampling = self.sampling
        return [sampling.tokens, sampling.logprobs, self.decisions, self.prompt_logprobs]


@dataclass
class NewTokens:
    """Of n sequences, [n] each: rows of the table, where the tokens of each are among those
    sampled, how many there are. decisions [5, n]: of ``accept_truncate``, in its order, where any
    has drafts to verify; 0 tokens are committed for those without."""

    rows: Array
    firsts: Array
    counts: Array
    decisions: Array | None = None

    def only(self, which: Array) -> NewTokens:
        """Those at ``which``."""
        decisions = None if self.decisions is None else self.decisions[:, which]
        return NewTokens(self.rows[which], self.firsts[which], self.counts[which], decisions)


@dataclass
class Fetched:
    """Results on the host; decisions: of the n sequences of the pass, as ``NewTokens`` has them."""

    sampled: Sampled
    decisions: Array | None
    prompt_logprobs: Array | None


@dataclass(eq=False)
class InFlightPass:
    """A pass under way, and the n sequences that get tokens from it: siblings that start come last.

    generation_ids: of the works' rows when it was launched; a row that has another by now holds
    another sequence, or the same one computed anew. work [n]: which work's rows a sequence's tokens
    come from. new: the n sequences, by a leader's row where a sibling starts. siblings: (place
    among the n, sequence). leads: whether siblings may wait for a prompt that it computes.
    unscored: (work, position, next token) of prompt rows whose logits give a log-probability that
    is missing. verified [S]: places of those with drafts to verify. thinking: rows of prompts that
    are thought about.
    """

    work_pass: Pass
    record: PassRecord
    generation_ids: Array
    work: Array
    new: NewTokens
    siblings: list[tuple[int, Sequence]]
    leads: bool
    unscored: list[tuple[int, int, int]]
    verified: Array
    pending: Pending[Results] = field(init=False)
    thinking: ThinkingRows | None = None

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
        verified = (table.num_drafts[rows] > 0) & (works.kinds[work] != DRAFT)
        ids, unscored = table.generation_id[works.rows], _unscored(work_pass)
        new = NewTokens(rows, firsts, counts)
        parts = (ids, work, new, siblings, leads, unscored, verified.nonzero()[0])
        return cls(work_pass, record, *parts)

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
        return not (len(self.verified) or self.leads or self.pending.failed or thinks)

    @contextmanager
    def committed_ahead(self) -> Iterator[None]:
        """A block in which the sequence table is as it will be once it is committed, but for the
        ids of its tokens. No sequence may enter or leave in it."""
        works, table = self.works, self.work_pass.table
        drafting = works.kinds == DRAFT
        final = ~drafting
        grown = self.new.rows[final[self.work]]
        rows, ends, drafted = works.rows[final], works.ends[final], works.rows[drafting]
        with ahead_of_results(table, rows, ends, self.work_pass.canonical, grown, drafted):
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
        return self.pending.results.sampling.tokens

    def fetch(self) -> Fetched:
        """Wait for the device. Raises what the pass raised."""
        tokens, logprobs, decided, prompts = self.pending.fetch()
        assert tokens is not None
        decisions = None
        if decided is not None:
            decisions = np.zeros((len(decided), len(self.work)), np.int64)
            decisions[:, self.verified] = decided
        return Fetched(self.pending.results.sampling.on_host(tokens, logprobs), decisions, prompts)


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
    """What ``accept_truncate`` reads, for the sequences of a pass that have drafts to verify."""

    def __init__(
        self,
        table: SequenceTable,
        launched: InFlightPass,
        before: InFlightPass | None,
        device: torch.device,
    ):
        """before: whose tokens are the newest drafts of some, which have no ids yet."""
        new = launched.new.only(launched.verified)
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


@dataclass(eq=False)
class Launcher:
    """Packs a pass with all that follows from it on the device, and hands it over."""

    admission: Admission
    runner: ModelRunner
    sampler: Sampler
    thinker: Thinker | None = None

    def launch(self, launched: InFlightPass, work: Callable[[], Results]) -> InFlightPass:
        """Start what ``pack`` has drawn up."""
        launched.pending = Pending(work)
        return launched

    def pack(
        self, work_pass: Pass, before: InFlightPass | None = None
    ) -> tuple[InFlightPass, Callable[[], Results]]:
        """A pass, and its work for the device, which raises what went wrong here as well.

        before: a pass whose results are not in, as if it were committed (``committed_ahead``).
        """
        launched = InFlightPass.of(work_pass, self.admission)
        try:
            return launched, self._drawn_up(launched, before)
        except Exception as error:
            return launched, partial(_fail, error)

    def _drawn_up(
        self, launched: InFlightPass, before: InFlightPass | None
    ) -> Callable[[], Results]:
        """All that the pass is on the device: it reads nothing that may change meanwhile."""
        runner, works, table = self.runner, launched.works, self.admission.table
        fresh, unscored = self.admission.pool.take_fresh(), launched.unscored
        ends, yields = works.cu_rows, works.yields
        wanted = np.arange(len(works)) if works.single else spread(ends - yields, yields)
        targets = newest = comparison = None
        if unscored:  # these rows come first
            more = [ends[n] - works.counts[n] + p - works.starts[n] for n, p, _ in unscored]
            wanted = np.concatenate([more, wanted])
            targets = to_device(np.array([token for *_, token in unscored]), runner.device)
        if before is not None:
            sources = before.sources(works.rows)
            drawn = works.ends == table.length[works.rows] + table.num_drafts[works.rows]
            some = np.flatnonzero((sources >= 0) & drawn)
            newest = np.stack([ends[some] - 1, sources[some]])
        packed = runner.pack(launched.work_pass, fresh, wanted, newest)
        if self.thinker is not None:
            launched.thinking = ThinkingRows.of(launched.work_pass, runner.device)
        if len(launched.verified):
            comparison = Comparison(table, launched, before, runner.device)
        samples = self._samples(launched)
        return partial(self._run, packed, samples, comparison, targets, before, launched.thinking)

    def _run(
        self,
        packed: PackedPass,
        samples: SampleBatch,
        comparison: Comparison | None,
        targets: Tensor | None,
        before: InFlightPass | None,
        thinking: ThinkingRows | None,
    ) -> Results:
        """The forward, what is sampled from its logits, and decisions on drafts.

        targets [P]: tokens of prompts whose log-probabilities the first P rows of logits give.
        before: a pass whose tokens it takes where they lie.
        """
        runner, sampler, hooks = self.runner, self.sampler, None
        if self.thinker is not None and thinking is not None:
            hooks = thinking.hooks(*self.thinker.model.layers)
        newest = None if before is None else before.tokens
        logits = runner.run(packed, newest, hooks)
        prompt_logprobs = decisions = None
        if targets is not None:
            first = len(targets)
            prompt_logprobs = sampler.kernels.chosen_logprobs(logits[:first], targets)
            logits = logits[first:]
        sampling = sampler.sample(logits, samples)
        if comparison is not None:
            decisions = comparison.run(sampler.kernels, runner.page_size, sampling.tokens, newest)
        return Results(sampling, decisions, prompt_logprobs)

    def _samples(self, launched: InFlightPass) -> SampleBatch:
        """What the sampler needs to know of every token."""
        table, works, counts = self.admission.table, launched.works, launched.new.counts
        row, position = launched.new.rows, works.ends[launched.work]
        logits_row = (works.cu_tokens - works.yields)[launched.work]
        if not works.single:
            row, logits_row = row.repeat(counts), spread(logits_row, counts)
            position = spread(position - counts + 1, counts)
        names = ("key", "temperature", "top_k", "top_p", "min_p")
        key, temperature, top_k, top_p, min_p = (getattr(table, name)[row] for name in names)
        wanted = bool(table.places("logprobs_wanted", row))
        special = {
            n: _special_row(table.sequences[row[n]], int(position[n]))
            for n in table.places("special_sampling", row)
        }
        for n, sibling in launched.siblings:
            place = int(launched.new.firsts[n])
            key[place] = sibling.key
            if place in special:
                special[place] = _special_row(sibling, int(position[place]))
        return SampleBatch(
            logits_row, key, position, temperature, top_k, top_p, min_p, wanted, special
        )


def _fail(error: Exception) -> Results:
    raise error


def _special_row(sequence: Sequence, position: int) -> SpecialRow:
    request, params = sequence.request, sequence.params
    if request.supplied:  # its logits are what is wanted
        return SpecialRow(GREEDY, 0, [], keeps_logits=True)
    generated = position - request.num_prompt
    forced = sequence.given_tokens if sequence.teacher_forced else None
    return SpecialRow(
        params,
        generated,
        sequence.before(position) if params.changes_logits else [],
        -1 if forced is None else forced[generated],
        "scores" in request.keeps,
        "logits" in request.keeps,
        request.thread,
        sequence.grammar,
    )
