"""Hands passes to the device: packed rows, what is sampled from them, drafts to compare.

Waits for nothing. The newest tokens of a pass whose results are not in are taken where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from tinyspec.engine.comparison import Comparison
from tinyspec.engine.launched import Launched, Results
from tinyspec.engine.thinking_rows import ThinkingRows
from tinyspec.runner.device_queue import DeviceQueue, to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampler
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import Pass, PassRecord, spread
from tinyspec.scheduler.request import Sequence

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

    def __post_init__(self) -> None:
        self.queue = DeviceQueue()

    def launch(self, work_pass: Pass, record: PassRecord) -> Launched:
        """Pack a pass and start it."""
        return self.start(*self.pack(work_pass, record))

    def start(self, launched: Launched, work: Work) -> Launched:
        """Hand over what ``pack`` returned."""
        launched.pending = self.queue.launch(work)
        return launched

    def pack(
        self, work_pass: Pass, record: PassRecord, before: Launched | None = None
    ) -> tuple[Launched, Work]:
        """A pass, and its work for the device, which reads nothing that may change meanwhile.

        before: a pass whose results are not in, as if it were committed (``ahead_of_results``).
        """
        launched = Launched.of(work_pass, record, self.admission)
        forward = self._forward(launched, before)
        batch = self._samples(launched)
        compare = self._comparison(launched, before)
        sampler = self.sampler
        page_size = self.admission.pool.page_size

        def work() -> Results:
            logits, prompt_logprobs = forward()
            # By Triton logits of padding follow: sampled as well, a launch depends on shapes alone.
            padded = batch.padded(len(logits)) if sampler.kernels.backend == "triton" else batch
            sampling = sampler.sample(logits, padded)
            decisions = None
            if compare is not None:
                tokens = None if before is None else _tokens(before)
                decisions = compare.run(sampler.kernels, page_size, sampling.tokens, tokens)
            return Results(sampling, decisions, prompt_logprobs)

        return launched, work

    def _forward(
        self, launched: Launched, before: Launched | None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """A function that runs the pass: logits of the rows that yield tokens, and the missing
        log-probabilities of prompt tokens. It raises FailedPass."""
        fresh = self.admission.pool.take_fresh()
        try:
            forward = self._packed(launched, fresh, before)
        except Exception as error:
            self.runner.forget_pages()
            return partial(_fail, error)

        def run() -> tuple[Tensor, Tensor | None]:
            try:
                return forward()
            except Exception as error:
                raise FailedPass from error

        return run

    def _packed(
        self, launched: Launched, fresh: list[int], before: Launched | None
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
        taps, thinking = runner.taps, None
        if taps is not None:
            thinking = ThinkingRows.of(launched.work_pass, runner.device)
        launched.thinking = thinking

        def forward() -> tuple[Tensor, Tensor | None]:
            if taps is not None:
                taps.ask(None if thinking is None else thinking.rows)
            logits = runner.run(packed, None if before is None else _tokens(before))
            if taps is not None and thinking is not None:
                thinking.hidden = taps.take()
            if not first:
                return logits, None
            scores = self.sampler.kernels.chosen_logprobs(logits[:first], targets)
            return logits[first:], scores

        return forward

    def _samples(self, launched: Launched) -> SampleBatch:
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

    def _comparison(self, launched: Launched, before: Launched | None) -> Comparison | None:
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


def _tokens(launched: Launched) -> Tensor:
    """Its tokens where they lie."""
    return launched.pending.results.sampling.tokens


def _special_row(sequence: Sequence, position: int) -> SpecialRow:
    request, params = sequence.request, sequence.params
    if request.lock_step is not None:  # sampled when the logits of all are there
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
