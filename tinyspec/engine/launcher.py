"""Hands passes to the device: packed rows, and what is sampled from them.

Waits for nothing. The newest tokens of a pass whose results are not in are taken where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from tinyspec.runner.batch import PackedPass
from tinyspec.runner.device_queue import Pending, to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampled, Sampler, Sampling
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, Pass, PassRecord, ScheduledRows, spread
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, ahead_of_results
from tinyspec.thinking.taps import ThinkingRows
from tinyspec.thinking.thinker import Thinker

# Where tokens come from outside logits are what is wanted.
SUPPLIED = SpecialRow(SamplingParams(), 0, [], keeps_logits=True)


@dataclass
class NewTokens:
    """Of n sequences, [n] each: rows of the table, where the tokens of each are among those
    sampled, how many there are, and whether they verify drafts."""

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

    For the device, once it is packed: packed, samples; targets [P]: tokens of prompts whose
    log-probabilities the first P rows of logits give; before: a pass whose results were not in,
    until this one has run, which takes tokens where they lie; error: why it could not be packed.
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
    targets: Tensor | None = None
    before: InFlightPass | None = None
    error: Exception | None = None

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
        return not (self.new.verified.any() or self.leads or self.pending.failed or thinks)

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


@dataclass(eq=False)
class Launcher:
    """Packs a pass with all that follows from it on the device, and hands it over."""

    admission: Admission
    runner: ModelRunner
    sampler: Sampler
    thinker: Thinker | None = None

    def launch(self, launched: InFlightPass) -> InFlightPass:
        """Start what ``pack`` has drawn up."""
        launched.pending = Pending(partial(self.run, launched))
        return launched

    def pack(self, work_pass: Pass, before: InFlightPass | None = None) -> InFlightPass:
        """A pass with all that it is on the device: what runs there reads nothing that may change
        meanwhile, and raises what went wrong here as well.

        before: a pass whose results are not in, as if it were committed (``committed_ahead``).
        """
        launched = InFlightPass.of(work_pass, self.admission)
        try:
            self._draw_up(launched, before)
        except Exception as error:
            launched.error = error
        return launched

    def _draw_up(self, launched: InFlightPass, before: InFlightPass | None) -> None:
        runner, works, table = self.runner, launched.works, self.admission.table
        launched.before, launched.samples = before, self._samples(launched)
        fresh, unscored = self.admission.pool.take_fresh(), launched.unscored
        ends, yields = works.cu_rows, works.yields
        wanted = np.arange(len(works)) if works.single else spread(ends - yields, yields)
        newest = None
        if unscored:  # these rows come first
            more = [ends[n] - works.counts[n] + p - works.starts[n] for n, p, _ in unscored]
            wanted = np.concatenate([more, wanted])
            tokens = np.array([token for *_, token in unscored])
            launched.targets = to_device(tokens, runner.device)
        if before is not None:
            sources = before.sources(works.rows)
            drawn = works.ends == table.length[works.rows] + table.num_drafts[works.rows]
            some = np.flatnonzero((sources >= 0) & drawn)
            newest = np.stack([ends[some] - 1, sources[some]])
        launched.packed = runner.memory.pack(launched.work_pass, fresh, wanted, newest)
        if self.thinker is not None:
            launched.thinking = ThinkingRows.of(launched.work_pass, runner.device)

    def run(self, launched: InFlightPass) -> Sampling:
        """The forward, and what is sampled from its logits."""
        if launched.error is not None:
            raise launched.error
        runner, sampler, hooks = self.runner, self.sampler, None
        if self.thinker is not None and launched.thinking is not None:
            hooks = launched.thinking.hooks(*self.thinker.model.layers)
        before, launched.before = launched.before, None
        newest = None if before is None else before.tokens
        logits, prompt_logprobs = runner.run(launched.packed, newest, hooks), None
        if (targets := launched.targets) is not None:
            first = len(targets)
            prompt_logprobs = sampler.kernels.chosen_logprobs(logits[:first], targets)
            logits = logits[first:]
        sampling = sampler.sample(logits, launched.samples)
        sampling.prompt_logprobs = prompt_logprobs
        return sampling

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
        owners = {n: table.sequences[row[n]] for n in table.places("special_sampling", row)}
        for n, sibling in launched.siblings:
            place = int(launched.new.firsts[n])
            key[place] = sibling.key
            if place in owners:
                owners[place] = sibling
        special = {
            n: SUPPLIED if one.request.supplied else special_row(one, int(position[n]))
            for n, one in owners.items()
        }
        return SampleBatch(
            logits_row, key, position, temperature, top_k, top_p, min_p, wanted, special
        )


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
    )
