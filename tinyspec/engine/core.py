"""One step: propose drafts, schedule a pass, launch it, fetch its results; then commit. Knows no
user and no text.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any

from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.drafts.assistant import Assistant
from tinyspec.drafts.drafter import Drafter, NgramDrafter, in_order, proposals, source_of
from tinyspec.engine.commit import Committer
from tinyspec.engine.trace import PASSES_KEPT, Trace
from tinyspec.errors import named
from tinyspec.model.torch_settings import moved, moves, pin_process
from tinyspec.runner.device_queue import Pending
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.packing import decisions, pack
from tinyspec.runner.sampler import Sampled, Sampler
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.costs import charged_since, clocks
from tinyspec.scheduler.passes import FAST_PATH, GIVEN, PassRecord
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import Step
from tinyspec.thinking.chunks import think
from tinyspec.thinking.taps import ThinkingRows
from tinyspec.thinking.thinker import Thinker

# Records of passes that are kept without a trace.
RECORDS_KEPT = 1000
# What drafts of no drafter are called.
WITHOUT = {FAST_PATH: "fast path", GIVEN: "given"}
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
        self.committer = Committer(admission, tokenizer, runner)
        self.assistant = Assistant(config, runner, admission, self.scheduler, self.sampler)
        kept = PASSES_KEPT if config.trace is True else int(config.trace)
        self.records: deque[PassRecord] = deque(maxlen=kept or RECORDS_KEPT)
        self.trace = Trace(self.records, tokenizer) if kept else None
        self._overlap = config.overlap
        self._under_way: Step | None = None
        # Drafts since the latest pass, and what their sources are called, by what the column
        # ``proposed`` has of them.
        self._drafted: Counter[int] = Counter()
        self._sources = WITHOUT
        # Of the latest ``propose``: each drafter but models, its drafts, and seconds they took.
        self._asked: dict[int, tuple[Drafter, int, float]] = {}

    def propose(self) -> None:
        """Before a step: draft for sequences without drafts, their given tokens or what their
        request's drafter proposes, unless the step's pass is under way. Plain sequences get drafts
        from a real drafter only, not from the fast path."""
        table, rows = self.table, self.table.rows
        self._asked, self.scheduler.chosen = {}, 0
        if self._is_under_way:
            return
        self._sources = dict(WITHOUT)
        models: dict[int, PreTrainedModel] = {}
        asks: dict[int, Drafter] = {}
        if table.any("drafter"):
            users = dict(zip(table.drafter[rows].tolist(), rows.tolist(), strict=True))
            for number, row in users.items():
                for drafter in in_order(table.sequences[row].request.drafter) if number else ():
                    self._sources[id(drafter)] = source_of(drafter)
                    if isinstance(drafter, PreTrainedModel):
                        models[number] = drafter
                        continue
                    self._asked[id(drafter)] = drafter, 0, 0.0
                    if not (isinstance(drafter, NgramDrafter) and drafter.pauses):
                        asks[number] = drafter
        if asks or table.any("given"):
            self._ask_all(asks)
        if models:
            self.scheduler.chosen, which = self.assistant.draft(models)
            self._drafted[which] += self.scheduler.chosen

    def _ask_all(self, asks: dict[int, Drafter]) -> None:
        """Draft for sequences without drafts: their given tokens, or what the one of ``asks``
        proposes that has the number of their drafter."""
        began, table, rows = time.perf_counter(), self.table, self.table.rows
        rows = rows[table.num_drafts[rows] == 0]
        limits = table.draft_limits(rows)
        rows, limits = rows[limits > 0], limits[limits > 0]
        given = table.given[rows]
        for row, limit in zip(rows[given].tolist(), limits[given].tolist(), strict=True):
            sequence = table.sequences[row]
            place, tokens = sequence.num_generated, sequence.given_tokens or []
            self._draft(sequence, tokens[place : place + limit], GIVEN)
        for number, drafter in asks.items():
            own = (table.drafter[rows] == number) & (table.pending(rows) == 1)
            if own.any():
                found = self._ask(drafter, rows[own], limits[own])
                before, began = began, time.perf_counter()
                self._asked[id(drafter)] = drafter, found, began - before

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
                count += self._draft(sequence, drafts[:limit], id(drafter))
        return count

    def _draft(self, sequence: Sequence, drafts: list[int], proposed: int) -> int:
        """Let these be drafts, up to the first that may not follow; how many there are. proposed:
        as in the sequence table."""
        drafts = list(takewhile(range(self.runner.vocab_size).__contains__, drafts))
        if sequence.grammar is not None and sequence.given_tokens is None:
            drafts = sequence.grammar.beginning(sequence.generated, drafts)
        sequence.drafts = drafts
        sequence.proposed = proposed if drafts else FAST_PATH
        sequence.stats.drafted += len(drafts)
        self._drafted[proposed] += len(drafts)
        return len(drafts)

    def begin(self) -> Step | None:
        """Run one pass, in the state of ``runner.torch_state``, and wait for what it finds or
        raises; with ``overlap`` the pass after it is under way then. None where there is nothing to
        run."""
        began = clocks()
        if (step := self._next()) is None:
            return None
        step.began = began
        if self._overlap:
            self._under_way = self._look_ahead(step)
        try:
            found = step.pending.fetch()
            step.special = step.pending.results.special_results(*found[:2])
            step.tokens, step.logprobs, step.prompt_logprobs, step.decisions = found
            self._think(step)
        except Exception as error:
            step.raised = error
        return step

    def _think(self, step: Step) -> None:
        """Let the thinking blocks make the thoughts that a pass has made possible. Raises what they
        raise."""
        rows, settings = step.thinking, moves()
        if self.thinker is None or rows is None or rows.hidden is None:
            return
        requests = {span.sequence.request for span in rows.spans}
        step.thoughts = [(each, len(each.thoughts.found)) for each in requests if each.thoughts]
        step.good_ends = step.ends.copy()
        step.failed = think(self.thinker, rows, step.alive, step.good_ends)
        step.moved = step.moved or moved(settings)

    def _think_again(self, step: Step) -> None:
        """The thoughts that were made behind a pass are not to be kept."""
        for request, count in step.thoughts:
            if request.thoughts is not None and request.finished:
                del request.thoughts.found[count:]
            else:
                request.forget_prompt()

    def finish(self, step: Step, sound: bool) -> None:
        """Commit what a pass found, or find out whose error it raised; nothing of either unless it
        is ``sound``."""
        before = [] if self.trace is None else self.trace.before(step, self._sources)
        if sound:
            try:
                if step.raised is not None:
                    raise step.raised
                self.committer.commit(step)
            except Exception as error:
                self._isolate_failure(step, error)
        else:
            self._think_again(step)
            step.tokens = None
        step.raised = None  # its frames hold what is on the device
        seconds = time.perf_counter() - step.began[0]
        if step.tokens is not None:
            charged = charged_since(step.began, self.runner.device.type)
            settled = step.settled and (self._under_way is None or self._under_way.settled)
            self.scheduler.buckets.ran(step.bucket, step.canonical, charged, settled)
            accepted, rejected = self.committer.accepted, self.committer.rejected
            if accepted or rejected:
                self.scheduler.acceptance.observe(accepted[FAST_PATH], rejected[FAST_PATH])
                self.assistant.observe(accepted, rejected)
                self._add(accepted, self.stats.accepted_by)
                self._add(rejected, self.stats.rollbacks_by)
            for number, (drafter, proposed, asking) in self._asked.items():
                if isinstance(drafter, NgramDrafter):
                    counts = proposed, accepted[number]
                    drafter.account(step.record, *counts, self.scheduler.buckets, asking)
        if self.trace is not None:
            self.trace.after(step, before, self.committer.ended)
        record = step.record
        record.number, record.began = sum(self.stats.passes.values()), step.began[0]
        record.seconds = seconds
        self._drafted[FAST_PATH] = record.drafted
        record.drafted = self._drafted.total()
        self._add(self._drafted, self.stats.drafted_by)
        self._drafted.clear()
        self.records.append(record)
        self.stats.add(record)

    def _add(self, found: Counter[int], sums: Counter[str]) -> None:
        """Add counts by the column ``proposed`` to sums by source."""
        for which, count in found.items():
            if count:
                sums[self._sources[which]] += count

    @property
    def _is_under_way(self) -> bool:
        return self._under_way is not None and bool(self._under_way.alive.any())

    def _next(self) -> Step | None:
        """The pass to be committed next: the one that is under way, or a new one."""
        if self._is_under_way:
            step, self._under_way = self._under_way, None
            return step
        self.drain()
        step = self.scheduler.schedule()
        return None if step is None else self.launch(self._pack(step))

    def _look_ahead(self, step: Step) -> Step | None:
        """Launch the pass after ``step``, whose results are not in, where it can be drawn up
        without them: what they would change is left out when they are committed."""
        ahead = not self.table.any("drafter") and step.predictable
        # A plan that is not launched would leave its mark on the next one: nothing that may not
        # be in the pass is planned.
        if not ahead or any(map(self.table.any, SPECIAL)) or not step.alive.all():
            return None
        with step.ahead():
            if not self.admission.settled or (after := self.scheduler.schedule()) is None:
                return None
            self._pack(after, step)
        # Code of the user's in the model may end requests: the table is set back by then.
        return self.launch(after)

    def _pack(self, step: Step, before: Step | None = None) -> Step:
        pack(step, before, self.admission, self.runner)
        if self.thinker is not None and step.error is None:
            try:
                step.thinking = ThinkingRows.of(step, self.runner.device)
            except Exception as error:
                step.error = error
        return step

    def launch(self, step: Step) -> Step:
        """Start a pass that is packed."""
        step.pending = Pending(partial(self.compute, step))
        return step

    def compute(self, step: Step) -> Sampled:
        """The forward, what is sampled from its logits, and decisions on drafts; and whether
        settings were those of passes throughout. Raises what went wrong while it was packed as
        well."""
        pin_process()
        before = moves()
        try:
            return self._compute(step)
        finally:
            step.moved = moved(before)

    def _compute(self, step: Step) -> Sampled:
        if step.copies:
            self.runner.cache.copy_states(step.copies)
        if step.error is not None:
            raise step.error
        runner, sampler, hooks = self.runner, self.sampler, None
        if self.thinker is not None and step.thinking is not None:
            hooks = step.thinking.hooks(*self.thinker.model.layers)
        before, step.before = step.before, None
        newest = None if before is None else before.pending.results.tokens
        logits, prompt_logprobs = runner.run(step, newest, hooks), None
        step.settled = runner.graphs.settled
        if (targets := step.targets) is not None:
            first = len(targets)
            prompt_logprobs = sampler.kernels.chosen_logprobs(logits[:first], targets)
            logits = logits[first:]
        sampled = sampler.sample(logits, step.samples)
        sampled.prompt_logprobs = prompt_logprobs
        if step.compared is not None:
            given = sampler.kernels, runner.page_size, sampled.tokens, newest
            sampled.decisions = decisions(step, *given)
        return sampled

    def drain(self) -> None:
        """Wait for a pass that is under way, and drop it: whoever goes on runs it again. What it
        raised concerns no other."""
        step, self._under_way = self._under_way, None
        if step is not None:
            with self.runner.torch_state(), suppress(Exception):
                step.pending.fetch()

    def _isolate_failure(self, step: Step, error: Exception) -> None:
        """The pass raised: run its sequences one by one, then without drafts, then with fewer rows;
        the one that raises all the same fails."""
        sequences: list[Sequence] = [
            self.table.sequences[row] for row in step.rows[step.alive].tolist()
        ]
        if len(step) > 1:
            self.admission.isolate(sequences)
        elif not sequences:
            return
        elif sequences[0].num_drafts:
            sequences[0].forbid_drafts()
            self.admission.isolate(sequences)
        elif step.num_rows > 1:
            self.admission.isolate(sequences, row_limit=step.num_rows // 2)
        else:
            why = f"the pass raised {named(error)}"
            self.committer.fail(sequences[0], why, error)
