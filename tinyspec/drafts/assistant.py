"""Drafts by an assistant model, which the engine serves beside its own, on pages of the same
numbers.

A draft is drawn as the target's token will be: by its rule for logits and with its noise, from the
assistant's logits; so both agree where the two distributions do, sampled ones too. No bit depends
on it: the token is the target's, whatever was drafted. What the assistant has read is a column of
the sequence table and a flag of each page; a sequence that it has not read to the end gets no
drafts, and waits for none. Knows no user and no commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from weakref import ref

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.drafts.mtp import HeadRunner
from tinyspec.errors import named
from tinyspec.model.install import install
from tinyspec.model.quantized import trace
from tinyspec.model.supported import max_positions
from tinyspec.runner.batch import Batch
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.packing import samples
from tinyspec.runner.sampler import NOT_FINITE, Sampler
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.costs import Acceptance, charged_since, clocks
from tinyspec.scheduler.passes import FAST_PATH, PROMPT
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import NONE, Scheduler
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import Step, spread

logger = logging.getLogger("tinyspec")
# Rows before a pass for sequences that it has not read to the end, beside one for each sequence.
CATCH_UP = 256
# Before costs and acceptance are known: drafts of a sequence, in so many passes.
TRIAL, TRIALS = 4, 3
# Passes without drafts before another trial: at first, doubled whenever one did not pay, at most.
PAUSE, LONGEST_PAUSE = 32, 4096
# Drafts accepted and sequences with a wrong one that it begins with.
BEGINS = 3.0, 1.0


class Assistant:
    """The assistant of one engine: one model at a time, for the sequences of its requests.

    target: runs the engine's own model. Another model takes its place once no sequence of the
    present one runs. Held weakly: it is gone with the user's model.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: ModelRunner,
        admission: Admission,
        scheduler: Scheduler,
        sampler: Sampler,
    ):
        self._target, self._scheduler, self._sampler = target, scheduler, sampler
        self._admission, self._table, self._pool = admission, admission.table, admission.pool
        self._always = config.verify == "always" and (config.draft_window or TRIAL)
        self.runner: ModelRunner | None = None
        self._model: ref[PreTrainedModel] | None = None
        self._tensors: list[tuple[int, ...]] = []
        self._users: list[int] = []
        self._drawn = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of how it does, and nothing was logged."""
        self._acceptance = Acceptance(BEGINS)
        self._trials, self._pause, self._pausing, self._warned = TRIALS, PAUSE, 0, False

    def release(self, of: ref[PreTrainedModel] | None = None) -> None:
        """Hold no model any more; of: unless it is another than this."""
        if of is None or of is self._model:
            self.runner = self._model = self._target.beside = None
            if self._target.holds_memory:
                self._target.cache.beside = None

    def serve(self, model: PreTrainedModel) -> None:
        """Draft by this model from now on. Raises what keeps it from being served."""
        self.release()
        # As it is now it is not tried again.
        self._model, self._tensors = ref(model, self.release), _tensors(model)
        self._begin()
        target = self._target
        assert target.config.max_model_len and target.config.max_rows
        positions = min(target.config.max_model_len, max_positions(model))
        is_head = hasattr(model, "mtp_head")
        config = replace(target.config, max_model_len=positions, cuda_graphs=False)
        config = replace(config, drafter="mtp" if is_head else None)
        served = install(model, config, None, target.served.autocast.dtype)
        served.let_go()
        served.hidden = 0  # a head's lie with the target's
        buckets = Buckets(target.config.max_rows, target.buckets.reference)
        given = served, self._pool, target.kernels, buckets, config
        self.runner = HeadRunner(target, *given) if is_head else ModelRunner(*given)
        self.runner.memory.shares, self.runner.prepacked = True, target.prepacked
        target.beside = served

    @property
    def _shift(self) -> int:
        """Of the place of a token's row before the token's own."""
        return 0 if self.runner is None else self.runner.memory.shift

    def observe(self, accepted: Mapping[int, int], rejected: Mapping[int, int]) -> None:
        """A pass verified drafts: by what proposed them, how many were accepted, and how many
        sequences had one that was not."""
        present = id(self._model and self._model())
        more = accepted.get(present, 0), rejected.get(present, 0)
        if any(more):
            self._acceptance.observe(*more)
            self._trials -= self._trials > 0

    def draft(self, models: dict[int, PreTrainedModel]) -> tuple[int, int]:
        """Before a pass: draft for sequences without drafts of one of ``models``, by the table's
        numbers of their drafters; how many drafts there are, and the model's id. An assistant that
        fails is logged once, and ends no request."""
        present = None if self._model is None else self._model()
        known = any(one is present for one in models.values())
        model = present if present is not None and known else next(iter(models.values()))
        self._users, self._drawn = [n for n, one in models.items() if one is model], 0
        try:
            if model is not present or (self.runner is None and self._is_stale(model)):
                self.serve(model)
            if self.runner is not None:
                self._draft(self.runner, model)
        except Exception as error:
            self._warn(f"raised {named(error)}")
            self._sit_out()
        if not self._drawn:
            self._sampler.keep_noise(NONE, NONE, 0)
        return self._drawn, id(model)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the assistant %s; requests go on without its drafts", what)

    def _sit_out(self) -> None:
        self._pausing, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._trials = TRIALS

    def _is_stale(self, model: PreTrainedModel) -> bool:
        """Whether its parameters are not those that are served."""
        return self._tensors != _tensors(model)

    def _draft(self, runner: ModelRunner, model: PreTrainedModel) -> None:
        table = self._table
        if self._target.vocab_size > runner.vocab_size:  # it has grown
            return
        longest, rows = runner.config.max_model_len or 0, table.rows
        rows = rows[np.isin(table.drafter[rows], self._users) & (table.num_drafts[rows] == 0)]
        rows = rows[(table.length[rows] < longest) & ~table.has_embeds[rows]]
        decoding = (table.pending(rows) == 1) & (table.unthought[rows] == 0)
        most = np.minimum(table.draft_limits(rows), longest - table.length[rows])
        most = np.where(decoding, np.maximum(most, 0), 0)
        if not (asking := int(np.count_nonzero(most))) or not (count := self._count(asking, most)):
            return
        if self._is_stale(model):  # looked at where drafts follow: it takes a while for all
            self.serve(model)
            assert self.runner is not None
            runner = self.runner
        if (cache := self._target.cache).beside is None:  # it has read nothing of what is there
            cache.beside = runner.pages(self._pool.num_pages)
            table.seen[:], self._pool.seen[:] = 0, False
        limits, grown = self._grow(rows, np.minimum(most, count))
        self._keep_noise(rows, limits)
        held = table.num_pages[rows] * self._pool.page_size
        ends = np.where(decoding, table.length[rows], table.computed[rows])
        ends = np.where(decoding & (limits == 0), 0, np.minimum(ends, held))
        try:
            self._draw(*self._read(rows, ends, limits), id(model))
        finally:
            for sequence in grown:
                self._admission.truncate(sequence, sequence.length + sequence.num_drafts)

    def _keep_noise(self, rows: Array, limits: Array) -> None:
        """Let the sampler draw the noise of up to ``limits`` [n] drafts of ``rows`` [n], and of the
        token behind them, in one call, which takes hardly longer than one for a token."""
        table = self._table
        some = (limits > 0) & (table.temperature[rows] > 0)
        rows, counts = rows[some], limits[some] + 1
        positions = spread(table.length[rows], counts)
        keys = table.key[rows].repeat(counts)
        self._sampler.keep_noise(keys, positions, self._target.vocab_size)

    def seconds(self, runs: int = 4) -> float:
        """What a draft for one sequence takes: in the latest passes, or in a few on a page of their
        own, without sampling. 0 without a model."""
        if (runner := self.runner) is None:
            return 0.0
        bucket = runner.buckets.fit(1)
        if not runner.buckets.costs.known:
            batch = Batch.of([([0], 0, [0])], bucket, self._pool.page_size, runner.device)
            for _ in range(runs):
                began = clocks()
                with runner.torch_state(), runner.on_pages(runner.pages(1)):
                    runner.forward(batch, None, canonical=False)
                runner.buckets.ran(bucket, False, charged_since(began, runner.device.type))
        return runner.buckets.seconds(bucket)

    def _count(self, asking: int, most: Array) -> int:
        """How many drafts each of ``asking`` sequences is to get, of the ``most`` [n] it may."""
        assert self.runner is not None
        if self._always:
            return self._always
        if self._pausing:
            self._pausing -= 1
            return 0
        if self._trials:
            return TRIAL
        buckets, chance = self.runner.buckets, self._acceptance.chance()
        seconds = buckets.seconds(buckets.fit(min(asking, buckets.largest)))
        count = self._scheduler.how_many(asking, int(most.max()), chance, seconds)
        if count:
            self._pause = PAUSE
        else:
            self._sit_out()
        return count

    def _grow(self, rows: Array, limits: Array) -> tuple[Array, list[Sequence]]:
        """[n]: ``limits`` [n], fewer where there are no pages for the drafts of ``rows`` [n] that
        nobody else needs; and the sequences that have got pages."""
        table, pool, size = self._table, self._pool, self._pool.page_size
        own = -(-(table.length + 1) // size)
        needed = np.maximum(self._admission.lacking(), 0).sum()
        spare = 0 if self._admission.waiting else max(pool.num_free - int(needed), 0)
        held = np.maximum(table.num_pages[rows], own[rows] if needed <= pool.num_free else 0)
        more = np.where(limits > 0, -(-(table.length[rows] + limits) // size) - held, 0)
        fits = (np.maximum(more, 0).cumsum() <= spare) | (more <= 0)
        limits = np.where(fits, limits, np.minimum(limits, held * size - table.length[rows]))
        limits = np.maximum(limits, 0)
        tokens = table.length[rows] + limits
        short = (limits > 0) & (tokens > table.num_pages[rows] * size)
        grown = [table.sequences[row] for row in rows[short].tolist()]
        for sequence, end in zip(grown, tokens[short].tolist(), strict=True):
            pool.grow(sequence.pages, end, sequence.most_tokens)
            sequence.set_pages(sequence.pages)
        return limits, grown

    def _read(self, rows: Array, ends: Array, limits: Array) -> tuple[Array, Array, Array]:
        """Read the tokens of ``rows`` [n] up to ``ends`` [n], as many as a pass has room for, those
        first that lack least; rows that may have drafts and are read to the end, how many drafts
        each may have, and the first of each."""
        table, pool = self._table, self._pool
        pages = table.pages[rows]
        place = np.arange(pages.shape[1])
        known = pool.seen[pages] & (place < table.num_pages[rows, None])
        known = known.cumprod(1).sum(1) * pool.page_size  # what others have read
        starts = np.maximum(table.seen[rows], np.minimum(known, table.computed[rows]))
        starts = np.maximum(starts, self._shift)
        behind = np.maximum(ends - starts, 0)
        order = np.argsort(behind, kind="stable")
        rows, starts, behind, limits = (x[order] for x in (rows, starts, behind, limits))
        assert self.runner is not None
        room = min(len(rows) + CATCH_UP, self.runner.buckets.largest)
        counts = np.clip(room - (behind.cumsum() - behind), 0, behind)
        rows, starts, counts, limits = (x[counts > 0] for x in (rows, starts, counts, limits))
        ends = starts + counts
        whole = (ends == table.length[rows]) & (limits > 0)
        tokens = self._run(rows, starts, ends, whole.astype(np.int64))
        pages, full = table.pages[rows], ends // pool.page_size
        pool.seen[pages[np.arange(pages.shape[1]) < full[:, None]]] = True
        return rows[whole], limits[whole], tokens

    def _draw(self, rows: Array, limits: Array, tokens: Array, proposed: int) -> None:
        """Draft up to ``limits`` [n] tokens for ``rows`` [n], the first of which are ``tokens``
        [n]; one after the other, all rows in one pass."""
        table = self._table
        table.proposed[rows] = np.where(tokens >= 0, proposed, FAST_PATH)
        asked, begun = len(rows), rows
        for number in range(1, int(limits.max(initial=0)) + 1):
            found = tokens >= 0
            rows, limits, tokens = rows[found], limits[found], tokens[found]
            ends = table.length[rows] + number
            table.ids[rows, ends - 1] = tokens
            table.num_drafts[rows] = number
            table.drafted[rows] += 1
            self._drawn += len(rows)
            more = (limits > number) & ~table.stops_at(rows, tokens)
            rows, limits, ends = rows[more], limits[more], ends[more]
            if not len(rows):
                break
            tokens = self._run(rows, ends - 1, ends, np.ones_like(rows))
        if asked and not self._drawn:
            self._sit_out()
        if self._shift:  # read again, from the hidden states that the target will have computed
            table.seen[begun] = np.minimum(table.seen[begun], table.length[begun])

    def _run(self, rows: Array, starts: Array, ends: Array, yields: Array) -> Array:
        """Read positions ``starts`` to ``ends - 1`` of ``rows`` [n]; the tokens that follow those
        that yield one, -1 where there is none."""
        runner, table = self.runner, self._table
        assert runner is not None
        if not len(rows):
            return rows
        began = clocks()
        step = Step(table, rows, np.full_like(rows, PROMPT), starts, ends, yields, canonical=False)
        step.bucket = runner.buckets.fit(step.num_rows)
        runner.memory.pack(step, step.cu_rows[yields > 0] - 1, None)
        cache = self._target.cache.beside
        assert cache is not None
        with runner.on_pages(cache):
            logits = self._logits(runner, step)
        sampled = self._sampler.sample(logits, replace(samples(step), logprobs=False))
        tokens: Array = sampled.tokens.cpu().numpy()
        if any(n not in sampled.errors for n in np.flatnonzero(tokens < 0).tolist()):
            self._warn(f"gave no token: {NOT_FINITE}")
        table.seen[rows] = ends
        if isinstance(runner, HeadRunner):
            last = ends[yields > 0] - 1
            page, offset = np.divmod(last, self._pool.page_size)
            runner.guess(table.pages[rows[yields > 0], page] * self._pool.page_size + offset)
        runner.buckets.ran(step.bucket, False, charged_since(began, runner.device.type))
        return tokens

    def _logits(self, runner: ModelRunner, step: Step) -> Tensor:
        """[N, V] of the rows that yield a token, over the target's vocabulary."""
        runner.memory.send(step, None)
        batch, keep = runner.memory.batch(step)
        runner.use_prepacked()
        logits = runner.forward(batch, keep, canonical=False)
        return logits[: step.num_logits, : self._target.vocab_size]


def _tensors(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Which parameters it has now, and how often they were written to."""
    return [(id(parameter), *trace(parameter)) for parameter in model.parameters()]
