"""One step: propose drafts, schedule a pass, launch it, fetch its results; then commit. Knows no
user and no text.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from tinyspec.config import EngineConfig
from tinyspec.drafts.drafter import Drafter, NgramDrafter, proposals
from tinyspec.engine.commit import Committer
from tinyspec.engine.in_flight import Comparison, InFlightPass, special_row
from tinyspec.engine.trace import PASSES_KEPT, Trace
from tinyspec.errors import named
from tinyspec.model.torch_settings import moved, moves, pin_process
from tinyspec.runner.device_queue import Pending, to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import SampleBatch, Sampler, Sampling
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import Pass, PassRecord, spread
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.scheduler.sequence_table import Array
from tinyspec.thinking.chunks import think
from tinyspec.thinking.taps import ThinkingRows
from tinyspec.thinking.thinker import Thinker

# Records of passes that are kept without a trace.
RECORDS_KEPT = 1000
# Where tokens come from outside logits are what is wanted.
SUPPLIED = SpecialRow(SamplingParams(), 0, [], keeps_logits=True)
# Columns of the sequence table: code of the user's, or more than ids, has part in sampling or
# committing what a sequence gets.
SPECIAL = ("special_sampling", "special_commit", "scores_prompt")


class EngineCore:
    """Runs scheduler, runner, sampler and committer in turn; keeps a record of each pass, and with
    ``trace`` what became of its rows."""

    def __init__(
        self,
        config: EngineConfig,
        admission: Admission,
        runner: ModelRunner,
        tokenizer: Any,
        thinker: Thinker | None,
    ):
        self.admission, self.table, self.stats = admission, admission.table, admission.stats
        self.runner, self.thinker = runner, thinker
        self.scheduler = Scheduler(config, admission, runner.buckets)
        self.sampler = Sampler(runner.kernels)
        self.committer = Committer(admission, tokenizer, runner, thinker)
        kept = PASSES_KEPT if config.trace is True else int(config.trace)
        self.trace = Trace(kept, tokenizer) if kept else None
        self.records: deque[PassRecord] = deque(maxlen=kept or RECORDS_KEPT)
        self._overlap = config.overlap
        self._under_way: InFlightPass | None = None
        self._proposed = 0
        # Of the latest ``propose``: each drafter, its drafts, and seconds that they took.
        self._asked: dict[int, tuple[Drafter, int, float]] = {}

    @property
    def drafters(self) -> dict[int, Drafter]:
        """Of the running requests that may be drafted for, by their numbers in the table."""
        table, rows = self.table, self.table.rows
        if not table.any("drafter"):
            return {}
        found = dict(zip(table.drafter[rows].tolist(), rows.tolist(), strict=True))
        return {n: table.sequences[row].request.drafter for n, row in found.items() if n}

    def propose(self) -> None:
        """Before a step: draft for sequences without drafts, their given tokens or what their
        request's drafter proposes, unless the step's pass is under way. Plain sequences get drafts
        from a real drafter only, not from the fast path."""
        began, table, rows = time.perf_counter(), self.table, self.table.rows
        self._asked = {}
        if self._is_under_way:
            return
        drafters = self.drafters
        self._asked = {number: (drafter, 0, 0.0) for number, drafter in drafters.items()}
        for number, drafter in [*drafters.items()]:
            if isinstance(drafter, NgramDrafter) and drafter.pauses:
                del drafters[number]
        if not (drafters or table.any("given")):
            return
        rows = rows[table.num_drafts[rows] == 0]
        limits = table.draft_limits(rows)
        rows, limits = rows[limits > 0], limits[limits > 0]
        given = table.given[rows]
        for row, limit in zip(rows[given].tolist(), limits[given].tolist(), strict=True):
            sequence = table.sequences[row]
            place, tokens = sequence.num_generated, sequence.given_tokens or []
            self._draft(sequence, tokens[place : place + limit])
        for number, drafter in drafters.items():
            own = (table.drafter[rows] == number) & (table.pending(rows) == 1)
            if own.any():
                found = self._ask(drafter, rows[own], limits[own])
                before, began = began, time.perf_counter()
                self._asked[number] = drafter, found, began - before

    def _ask(self, drafter: Drafter, rows: Array, limits: Array) -> int:
        """Let ``drafter`` propose up to ``limits`` [n] drafts for each of ``rows`` [n], of its own
        requests; how many there are."""
        table, most, count = self.table, int(limits.max()), 0
        sequences = [table.sequences[row] for row in rows.tolist()]
        if isinstance(drafter, NgramDrafter):  # it reads the table itself
            hidden = (one.request.num_hidden for one in sequences)
            texts = zip(rows.tolist(), hidden, table.length[rows].tolist(), strict=True)
            found: Any = drafter.propose([table.ids[row, a:b] for row, a, b in texts], most)
        else:
            thread = sequences[0].request.thread
            found = proposals(drafter, [one.history for one in sequences], most, thread)
        for sequence, limit, drafts in zip(sequences, limits.tolist(), found, strict=True):
            if isinstance(drafts, Exception):
                self.committer.fail(sequence, f"the drafter raised {named(drafts)}", drafts)
            elif drafts:
                count += self._draft(sequence, drafts[:limit])
        return count

    def _draft(self, sequence: Sequence, drafts: list[int]) -> int:
        """Let these be drafts, up to the first that may not follow; how many there are."""
        drafts = list(takewhile(range(self.runner.vocab_size).__contains__, drafts))
        if sequence.grammar is not None and sequence.given_tokens is None:
            drafts = sequence.grammar.beginning(sequence.generated, drafts)
        sequence.drafts = drafts
        sequence.proposed = bool(drafts)
        sequence.stats.drafted += len(drafts)
        self._proposed += len(drafts)
        return len(drafts)

    def begin(self) -> InFlightPass | None:
        """Run one pass, in the state of ``runner.torch_state``, and wait for what it finds or
        raises; with ``overlap`` the pass after it is under way then. None where there is nothing to
        run."""
        began, own = time.perf_counter(), time.process_time()
        done = self._next()
        if done is None:
            return None
        done.began, done.ends = (began, own), done.works.ends
        if self._overlap:
            self._under_way = self._look_ahead(done)
        try:
            done.results = done.fetch()
            self._think(done)
        except Exception as error:
            done.raised = error
        return done

    def _think(self, done: InFlightPass) -> None:
        """Let the thinking blocks make the thoughts that a pass has made possible. Raises what they
        raise."""
        rows, settings = done.thinking, moves()
        if self.thinker is None or rows is None or rows.hidden is None:
            return
        requests = {span.sequence.request for span in rows.spans}
        done.thoughts = [(each, len(each.thoughts.found)) for each in requests if each.thoughts]
        done.ends = done.works.ends.copy()
        done.failed = think(self.thinker, rows, done.alive, done.ends)
        done.moved = done.moved or moved(settings)

    def _think_again(self, done: InFlightPass) -> None:
        """The thoughts that were made behind a pass are not to be kept."""
        for request, count in done.thoughts:
            if request.thoughts is not None and request.finished:
                del request.thoughts.found[count:]
            else:
                request.forget_prompt()

    def finish(self, done: InFlightPass, sound: bool) -> None:
        """Commit what a pass found, or find out whose error it raised; nothing of either unless it
        is ``sound``."""
        began, own = done.began
        committer, results = self.committer, done.results if sound else None
        before = [] if self.trace is None else self.trace.before(done)
        if sound:
            try:
                if done.raised is not None:
                    raise done.raised
                assert results is not None
                committer.commit(done, results)
            except Exception as error:
                self._isolate_failure(done, error)
        else:
            self._think_again(done)
        done.raised = None  # its frames hold what is on the device
        seconds = time.perf_counter() - began
        if results is not None:  # a CPU is not charged with waiting for another process
            of_process = time.process_time() - own
            charged = min(seconds, of_process) if self.runner.device.type == "cpu" else seconds
            settled = done.settled and (self._under_way is None or self._under_way.settled)
            kind = done.record.bucket, done.record.canonical
            self.scheduler.buckets.ran(*kind, charged, settled)
            for number, (drafter, proposed, asking) in self._asked.items():
                if isinstance(drafter, NgramDrafter):
                    counts = proposed, committer.looked_up[number]
                    drafter.account(done.record, *counts, self.scheduler.buckets, asking)
        self._record(done.record, seconds)
        if self.trace is not None:
            self.trace.after(done, before, results, began, committer.ended)

    @property
    def _is_under_way(self) -> bool:
        return self._under_way is not None and bool(self._under_way.alive.any())

    def _next(self) -> InFlightPass | None:
        """The pass to be committed next: the one that is under way, or a new one."""
        if self._is_under_way:
            launched, self._under_way = self._under_way, None
            return launched
        self.drain()
        work_pass = self.scheduler.schedule()
        if work_pass is None:
            return None
        return self.launch(self.pack(work_pass))

    def _look_ahead(self, launched: InFlightPass) -> InFlightPass | None:
        """Launch the pass after ``launched``, whose results are not in, where it can be drawn up
        without them: what they would change is left out when they are committed."""
        ahead = not self.table.any("drafter") and launched.predictable
        # A plan that is not launched would leave its mark on the next one: nothing that may not
        # be in the pass is planned.
        if not ahead or any(map(self.table.any, SPECIAL)) or not launched.alive.all():
            return None
        with launched.committed_ahead():
            if not self.admission.settled or (work_pass := self.scheduler.schedule()) is None:
                return None
            packed = self.pack(work_pass, launched)
        # Code of the user's in the model may end requests: the table is set back by then.
        return self.launch(packed)

    def launch(self, launched: InFlightPass) -> InFlightPass:
        """Start what ``pack`` has drawn up."""
        launched.pending = Pending(partial(self.compute, launched))
        return launched

    def pack(self, work_pass: Pass, before: InFlightPass | None = None) -> InFlightPass:
        """A pass with all that it is on the device: what runs there reads nothing that may change
        meanwhile, and raises what went wrong here as well.

        before: a pass whose results are not in, as if it were committed (``committed_ahead``).
        """
        launched = InFlightPass.of(work_pass, self.admission)
        if (checkpoints := self.admission.checkpoints).on:
            self.admission.prefix.keep_states(work_pass.works)
            launched.moves = checkpoints.move(work_pass.works)
            launched.copies = checkpoints.take_copies()
        try:
            self._draw_up(launched, before)
        except Exception as error:
            launched.error = error
        return launched

    def _draw_up(self, launched: InFlightPass, before: InFlightPass | None) -> None:
        runner, works, table = self.runner, launched.works, self.table
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
        if launched.verifies:
            launched.comparison = Comparison(launched, before, runner.device)
        given = launched.work_pass, fresh, wanted, newest, launched.moves
        launched.packed = runner.memory.pack(*given)
        if self.thinker is not None:
            launched.thinking = ThinkingRows.of(launched.work_pass, runner.device)

    def compute(self, launched: InFlightPass) -> Sampling:
        """The forward, what is sampled from its logits, and decisions on drafts; and whether
        settings were those of passes throughout."""
        pin_process()
        before = moves()
        try:
            return self._compute(launched)
        finally:
            launched.moved = moved(before)

    def _compute(self, launched: InFlightPass) -> Sampling:
        if launched.copies:
            self.runner.cache.copy_states(launched.copies)
        if launched.error is not None:
            raise launched.error
        runner, sampler, hooks = self.runner, self.sampler, None
        if self.thinker is not None and launched.thinking is not None:
            hooks = launched.thinking.hooks(*self.thinker.model.layers)
        before, launched.before = launched.before, None
        newest = None if before is None else before.tokens
        logits, prompt_logprobs = runner.run(launched.packed, newest, hooks), None
        launched.settled = runner.graphs.settled
        if (targets := launched.targets) is not None:
            first = len(targets)
            prompt_logprobs = sampler.kernels.chosen_logprobs(logits[:first], targets)
            logits = logits[first:]
        sampling = sampler.sample(logits, launched.samples)
        sampling.prompt_logprobs = prompt_logprobs
        if (comparison := launched.comparison) is not None:
            given = sampler.kernels, runner.page_size, sampling.tokens, newest
            sampling.decisions = comparison.run(*given)
        return sampling

    def _samples(self, launched: InFlightPass) -> SampleBatch:
        """What the sampler needs to know of every token."""
        table, works, counts = self.table, launched.works, launched.new.counts
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

    def drain(self) -> None:
        """Wait for a pass that is under way, and drop it: whoever goes on runs it again. What it
        raised concerns no other."""
        launched, self._under_way = self._under_way, None
        if launched is not None:
            with self.runner.torch_state(), suppress(Exception):
                launched.pending.fetch()

    def _isolate_failure(self, failed: InFlightPass, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        table, works = self.table, failed.works
        sequences: list[Sequence] = [table.sequences[n] for n in works.rows[failed.alive].tolist()]
        if len(works) > 1:
            self.admission.isolate(sequences)
        elif not sequences:
            return
        elif sequences[0].num_drafts:
            sequences[0].forbid_drafts()
            self.admission.isolate(sequences)
        elif works.num_rows > 1:
            self.admission.isolate(sequences, row_limit=works.num_rows // 2)
        else:
            why = f"the pass raised {named(error)}"
            self.committer.fail(sequences[0], why, error)

    def _record(self, record: PassRecord, seconds: float) -> None:
        record.number, record.seconds = sum(self.stats.passes.values()), seconds
        record.drafted += self._proposed
        self._proposed = 0
        self.records.append(record)
        self.stats.add(record)
        self.scheduler.observe(record.accepted, record.rollbacks)
