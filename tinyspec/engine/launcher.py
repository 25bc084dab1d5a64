"""Hands passes to the device: packed rows, what is sampled from them, drafts to compare.

Waits for nothing. The newest tokens of a pass whose results are not in are taken where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinyspec.engine.in_flight import InFlightPass, Results
from tinyspec.kernels.backend import Kernels
from tinyspec.runner.device_queue import DeviceQueue, to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampler
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import Pass, PassRecord, spread
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable
from tinyspec.thinking.taps import ThinkingRows
from tinyspec.thinking.thinker import Thinker


class Comparison:
    """What ``accept_truncate`` reads, for the sequences of a pass that have drafts to verify."""

    def __init__(
        self,
        table: SequenceTable,
        rows: Array,
        firsts: Array,
        counts: Array,
        unknown: Array,
        device: torch.device,
    ):
        """rows [S]: of ``table``. firsts, counts [S]: places of their tokens among those sampled.
        unknown [S]: for a newest draft without an id its place among the tokens of the pass before,
        else -1."""
        drafts, lengths = table.num_drafts[rows], table.length[rows]
        place = np.arange(max(int(counts.max()), int(drafts.max())))
        places = np.minimum(lengths[:, None] + place, table.ids.shape[1] - 1)
        guesses = table.ids[rows[:, None], places]
        guesses[place >= drafts[:, None]] = -1
        some = np.flatnonzero(unknown >= 0)
        last = np.stack([some, drafts[some] - 1, unknown[some]])
        places = firsts[:, None] + np.minimum(place, counts[:, None] - 1)
        columns = drafts, lengths - 1, table.most[rows] - lengths, table.num_pages[rows]
        self._guesses, self._places, self._excess, self._stops = (
            to_device(x, device)
            for x in (guesses, places, place >= counts[:, None], table.stops[rows])
        )
        packed = to_device(np.stack(columns).astype(np.int32), device)
        self._drafts, self._starts, self._remaining, self._pages = packed.unbind()
        self._last = to_device(last, device) if len(some) else None

    def run(
        self, kernels: Kernels, page_size: int, tokens: Tensor, before: Tensor | None
    ) -> Tensor:
        """Decisions [5, S] int32, in the order of ``AcceptResult``, on the sampled ``tokens``;
        before: tokens of the pass before. A sequence is verified up to its first row without a
        token; where that is its first row, its decision means nothing."""
        targets = tokens[self._places].masked_fill_(self._excess, -1)
        good = (targets >= 0).long().cumprod(1).sum(1).clamp_(min=1).int()
        if self._last is not None:
            assert before is not None
            sequence, place, source = self._last
            self._guesses[sequence, place] = before[source]
        return torch.stack(
            kernels.accept_truncate(
                self._guesses,
                targets,
                good,
                self._drafts,
                self._starts,
                self._remaining,
                self._stops,
                self._pages,
                page_size,
            )
        )


Work = Callable[[], Results]
GREEDY = SamplingParams()


class FailedPass(Exception):
    """The forward of a pass raised ``__cause__``; what else raises is no request's fault."""


@dataclass(eq=False)
class Launcher:
    """Packs a pass with all that follows from it on the device."""

    admission: Admission
    runner: ModelRunner
    sampler: Sampler
    thinker: Thinker | None = None

    def __post_init__(self) -> None:
        self.queue = DeviceQueue()

    def launch(self, work_pass: Pass, record: PassRecord) -> InFlightPass:
        """Pack a pass and start it."""
        return self.start(*self.pack(work_pass, record))

    def start(self, launched: InFlightPass, work: Work) -> InFlightPass:
        """Hand over what ``pack`` returned."""
        launched.pending = self.queue.launch(work)
        return launched

    def pack(
        self, work_pass: Pass, record: PassRecord, before: InFlightPass | None = None
    ) -> tuple[InFlightPass, Work]:
        """A pass, and its work for the device, which reads nothing that may change meanwhile.

        before: a pass whose results are not in, as if it were committed (``committed_ahead``).
        """
        launched = InFlightPass.of(work_pass, record, self.admission)
        forward = self._forward(launched, before)
        batch = self._samples(launched)
        compare = self._comparison(launched, before)
        sampler = self.sampler
        page_size = self.admission.pool.page_size

        def work() -> Results:
            logits, prompt_logprobs = forward()
            sampling = sampler.sample(logits, batch)
            decisions = None
            if compare is not None:
                tokens = None if before is None else _tokens(before)
                decisions = compare.run(sampler.kernels, page_size, sampling.tokens, tokens)
            return Results(sampling, decisions, prompt_logprobs)

        return launched, work

    def _forward(
        self, launched: InFlightPass, before: InFlightPass | None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """A function that runs the pass: logits of the rows that yield tokens, and the missing
        log-probabilities of prompt tokens. It raises FailedPass."""
        fresh = self.admission.pool.take_fresh()
        try:
            forward = self._packed(launched, fresh, before)
        except Exception as error:
            return partial(_fail, error)

        def run() -> tuple[Tensor, Tensor | None]:
            try:
                return forward()
            except Exception as error:
                raise FailedPass from error

        return run

    def _packed(
        self, launched: InFlightPass, fresh: list[int], before: InFlightPass | None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        runner, works, unscored = self.runner, launched.works, launched.unscored
        ends = works.cu_rows
        wanted = launched.offsets if works.single else spread(ends - works.yields, works.yields)
        first = len(unscored)
        if unscored:  # these rows come first
            more = [ends[n] - works.counts[n] + p - works.starts[n] for n, p in unscored]
            wanted = np.concatenate([more, wanted])
            requests = [sequence.request for sequence in launched.work_pass.sequences]
            prompts = np.array([requests[n].prompt[p + 1] for n, p in unscored])
            targets = to_device(prompts, runner.device)
        newest = None
        if before is not None:
            table, rows = self.admission.table, works.rows
            sources = before.sources(rows)
            drawn = works.ends == table.length[rows] + table.num_drafts[rows]
            some = np.flatnonzero((sources >= 0) & drawn)
            newest = np.stack([ends[some] - 1, sources[some]])
        packed = runner.pack(launched.work_pass, fresh, wanted, newest)
        hooks = None
        if self.thinker is not None:
            launched.thinking = thinking = ThinkingRows.of(launched.work_pass, runner.device)
            hooks = None if thinking is None else thinking.hooks(*self.thinker.layers)

        def forward() -> tuple[Tensor, Tensor | None]:
            logits = runner.run(packed, None if before is None else _tokens(before), hooks)
            if not first:
                return logits, None
            scores = self.sampler.kernels.chosen_logprobs(logits[:first], targets)
            return logits[first:], scores

        return forward

    def _samples(self, launched: InFlightPass) -> SampleBatch:
        """What the sampler needs to know of every token."""
        table, works, counts = self.admission.table, launched.works, launched.counts
        row, position = launched.rows, works.ends[launched.work]
        logits_row = launched.offsets[launched.work]
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
            place = int(launched.firsts[n])
            key[place] = sibling.key
            if place in special:
                special[place] = _special_row(sibling, int(position[place]))
        return SampleBatch(
            logits_row, key, position, temperature, top_k, top_p, min_p, wanted, special
        )

    def _comparison(self, launched: InFlightPass, before: InFlightPass | None) -> Comparison | None:
        which = launched.verified
        if not len(which):
            return None
        rows = launched.rows[which]
        unknown = np.full(len(rows), -1) if before is None else before.sources(rows)
        firsts, counts = launched.firsts[which], launched.counts[which]
        table, device = self.admission.table, self.runner.device
        return Comparison(table, rows, firsts, counts, unknown, device)


def _fail(error: Exception) -> tuple[Tensor, Tensor | None]:
    raise FailedPass from error


def _tokens(launched: InFlightPass) -> Tensor:
    """Its tokens where they lie."""
    return launched.pending.results.sampling.tokens


def _special_row(sequence: Sequence, position: int) -> SpecialRow:
    request, params = sequence.request, sequence.params
    if request.supplied:  # its logits are what is wanted
        return SpecialRow(GREEDY, 0, [], keeps_logits=True)
    generated = position - request.num_prompt
    forced = sequence.given_tokens if sequence.teacher_forced else None
    return SpecialRow(
        params,
        generated,
        sequence.before(position) if params.needs_history else [],
        -1 if forced is None else forced[generated],
        "scores" in request.keeps,
        "logits" in request.keeps,
        request.thread,
    )
