"""What the reference bucket's proof leaves open, found a slice at a time between the passes of
running requests, or all at once.

Which facts are known changes speed, never a bit; so time may decide when they are found. The bucket
that the running requests would use next comes first. Knows passes and probes, not requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from tqdm import tqdm

from tinyspec.config import EngineConfig
from tinyspec.determinism.probe_results import ProbeResults, Unsound
from tinyspec.determinism.probes.attention import MANY_ROWS, attention_steps
from tinyspec.determinism.probes.buckets import (
    bucket_steps,
    label_steps,
    routing_steps,
    timing_steps,
)
from tinyspec.determinism.probes.linears import tile_counts
from tinyspec.determinism.probes.reference import ALL_PASSES, compare_steps
from tinyspec.determinism.probes.steps import Steps, finished
from tinyspec.determinism.probes.workspace import Workspace
from tinyspec.runner.model_runner import ModelRunner

logger = logging.getLogger("tinyspec")
# Seconds of learning for a second of passes: a quarter of the engine's time while the bucket that
# requests would use next is unknown, a twentieth otherwise.
URGENT, UNHURRIED = 1 / 3, 1 / 19
# A slice takes about so many seconds, or one pass.
SLICE = 0.02
# A bucket is wanted once so many passes in turn would rather have used it: no prompt's is.
STEADY = 4
# The next bucket holds at most so many times the rows of the largest that is canonical.
GROWTH = 4


@dataclass(frozen=True)
class Task:
    """Something to find: kind, and the bucket or the kind of attention that it is about."""

    kind: str
    about: int | str = 0


BUCKET, COSTS, REFERENCE, ATTENTION = "bucket", "costs", "passes", "attention"
# Costs are measured at so many other moments: those of a busy moment would last for ever.
AGAIN, TIMES_AGAIN = "costs again", 2


class Learner:
    """Finds what ``results`` leave open, and keeps it.

    use: called with new results, to let passes go by them and to store them. workspace: that of the
    reference bucket's proof, if there was one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        results: ProbeResults,
        use: Callable[[ProbeResults], None],
        workspace: Workspace | None = None,
    ):
        self.results = results
        self._runner = runner
        self._config = config
        self._use = use
        self._workspace = workspace
        self._running: _Running | None = None
        self._given_up: set[Task] = set()
        self._credit = 0.0
        self._all_known = False
        self._latest: int | None = None
        self._steady: int | None = None
        self._streak = 0

    def tasks(self, attention_rows: int = MANY_ROWS) -> list[Task]:
        """What is open, in order: the bucket that requests would use next, costs of the reference
        bucket, other buckets from the smallest on, more rows for what is sound so far, costs again.
        """
        wanted = self._wanted()
        found = [Task(BUCKET, rows) for rows in wanted]
        found += [Task(COSTS)] if not self.results.costs else []
        found += [Task(BUCKET, rows) for rows in self._unknown() if rows not in wanted]
        found += [Task(REFERENCE)] if self.results.compared < ALL_PASSES else []
        found += [
            Task(ATTENTION, kind.name)
            for kind in self.results.attention
            if kind.checked < attention_rows
        ]
        timed = sorted((bucket.timed, bucket.rows) for bucket in self.results.buckets)
        found += [Task(AGAIN, rows) for times, rows in timed if 0 < times <= TIMES_AGAIN]
        return [task for task in found if task not in self._given_up]

    def _unknown(self) -> list[int]:
        known = set(self.results.sizes)
        return [rows for rows in self._runner.buckets.sizes if rows not in known]

    def _next_bucket(self) -> int | None:
        """The smallest unknown bucket that the last pass would rather have used, if any."""
        buckets = self._runner.buckets
        largest = buckets.canonical[-1]
        rows = min(buckets.wanted, GROWTH * largest, buckets.sizes[-1])
        used = buckets.fit_canonical(rows) if 0 < rows <= largest else inf
        return next((size for size in self._unknown() if 0 < rows <= size < used), None)

    def _wanted(self) -> list[int]:
        """The bucket that running requests would use next, if it is unknown."""
        wanted = self._steady
        if wanted is None or Task(BUCKET, wanted) in self._given_up:
            return []
        return [wanted] if wanted in self._unknown() else []

    # Between passes

    def earn(self, seconds: float) -> bool:
        """Passes took so many more seconds; whether there is time to learn, and anything left."""
        if self.results.unsound or self._all_known:
            return False
        bucket = self._next_bucket()
        self._streak = self._streak + 1 if bucket == self._latest else 1
        self._latest = bucket
        if self._streak >= STEADY:
            self._steady = bucket
        self._credit += seconds * (URGENT if self._wanted() else UNHURRIED)
        return self._credit > 0

    def learn(self) -> None:
        """Go on for the time that passes have earned, a slice at least."""
        while self._credit > 0:
            begun = time.perf_counter()
            if self.results.unsound or not (tasks := self.tasks()):
                self._all_known = True
                return self.rest()
            self._advance(tasks[0])
            self._credit -= time.perf_counter() - begun

    def rest(self) -> None:
        """Free the memory that learning takes."""
        self._running = self._workspace = None
        self._credit = min(self._credit, 0.0)

    def _advance(self, first: Task) -> None:
        """One slice of what runs, or of ``first`` where that is more urgent."""
        running, wanted = self._running, self._wanted()
        if running is None or (wanted and running.task.about not in wanted):
            self._running = running = _Running(first, self._steps(first, SLICE))
        try:
            next(running.steps)
        except StopIteration:
            self._running = None
        except Exception as error:
            # Requests go on without what could not be found.
            self._running = None
            self._given_up.add(running.task)
            logger.warning("%s could not be probed: %s", running.task, error)
        except BaseException:
            self._running = None
            raise

    # At once

    def finish(self, sizes: Iterable[int] | None = None, attention_rows: int = 0) -> None:
        """Find everything, or these buckets, with a bar on a terminal; raises what a probe raises.

        attention_rows: to compare of each kind.
        """
        wanted = set(self._runner.buckets.sizes if sizes is None else sizes)
        self._given_up = set()
        with tqdm(desc="probing", unit="fact", disable=None, leave=False) as bar:
            self._label_all(sorted(wanted), bar)
            while not self.results.unsound and (open_tasks := self._of(wanted, attention_rows)):
                bar.total = bar.n + len(open_tasks)
                finished(self._steps(open_tasks[0], None))
                bar.update()
        self.rest()

    def _of(self, wanted: set[int], attention_rows: int) -> list[Task]:
        buckets = {Task(BUCKET, rows) for rows in self._runner.buckets.sizes}
        left_out = buckets - {Task(BUCKET, rows) for rows in wanted}
        return [task for task in self.tasks(attention_rows) if task not in left_out]

    def _label_all(self, sizes: list[int], bar: tqdm) -> None:
        """The functions of rows in all buckets, those of one together, so that buckets that agree
        without the reference bucket are found as well."""
        labels = self.results.labels
        if all(self.results.known(name, rows) for name in labels for rows in sizes):
            return
        work = self._open(None)
        finished(work.prepare())
        bar.total = len(labels)
        for name in labels:
            finished(self._label(work, name, sizes))
            bar.update()

    # Tasks

    def _open(self, seconds: float | None) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace(self._runner, self._config)
        self._workspace.seconds = seconds
        return self._workspace

    def _keep(self, **changes: Any) -> None:
        self.results = replace(self.results, **changes)
        self._use(self.results)

    def _doubt(self, unsound: list[Unsound]) -> None:
        """The reference bucket is not sound after all."""
        if unsound:
            self.results = self.results.with_unsound(unsound)
            self._use(self.results)

    def _steps(self, task: Task, seconds: float | None) -> Steps[None]:
        work = self._open(seconds)
        yield from work.prepare()
        if task.kind == BUCKET:
            assert isinstance(task.about, int)
            yield from self._bucket(work, task.about)
        elif task.kind == COSTS:
            bucket = yield from bucket_steps(work, self.results, work.reference)
            self._keep(buckets=self.results.with_bucket(bucket).buckets, costs=True)
        elif task.kind == REFERENCE:
            numbers = range(self.results.compared + 1, ALL_PASSES + 1)
            wrong = yield from compare_steps(work, work.probe(), numbers)
            self._keep(compared=ALL_PASSES)
            self._doubt([wrong] if wrong else [])
        elif task.kind == AGAIN:
            (bucket,) = (b for b in self.results.buckets if b.rows == task.about)
            bucket = yield from timing_steps(work, bucket)
            self._keep(buckets=self.results.with_bucket(bucket).buckets)
        else:
            yield from self._attention(task.about)

    def _bucket(self, work: Workspace, rows: int) -> Steps[None]:
        """All that decides whether one bucket is canonical."""
        if rows > work.reference and not self.results.routed:
            routed, unsound = yield from routing_steps(work)
            self._keep(routed=routed)
            self._doubt(unsound)
        for name in self.results.labels:
            yield from self._label(work, name, [rows])
        for name in self.results.differing(rows):
            # Its tiles are row counts below.
            below = [size for size in self._runner.buckets.sizes if size < rows]
            yield from self._label(work, name, below)
        if not self.results.unsound:
            bucket = yield from bucket_steps(work, self.results, rows)
            self._keep(buckets=self.results.with_bucket(bucket).buckets)

    def _label(self, work: Workspace, name: str, sizes: list[int]) -> Steps[None]:
        new = [rows for rows in sizes if not self.results.known(name, rows)]
        if not new:
            return
        whole = self._runner.buckets.sizes
        labels, swapped, unsound = yield from label_steps(work, name, new, whole)
        found = self.results.with_labels(name, labels, swapped)
        tiles = tile_counts(self._runner, found.labels)
        self._keep(labels=found.labels, swapped=found.swapped, tiles=tiles)
        self._doubt(unsound)

    def _attention(self, name: str | int) -> Steps[None]:
        kinds = self.results.attention
        (kind,) = (kind for kind in kinds if kind.name == name)
        found, unsound = yield from attention_steps(self._runner, kind)
        self._keep(attention=tuple(found if other is kind else other for other in kinds))
        self._doubt(unsound)


@dataclass
class _Running:
    """A task that has begun."""

    task: Task
    steps: Steps[None]
