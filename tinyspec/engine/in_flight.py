"""A pass that the device is running: which sequences its tokens are for. Holds no logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinyspec.runner.device_queue import Pending
from tinyspec.runner.sampler import Sampled, Sampling
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT, Pass, PassRecord, ScheduledRows
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array, SequenceTable, ahead_of_results
from tinyspec.thinking.taps import ThinkingRows


@dataclass
class Results:
    """Of a pass, on the device. decisions [5, S] int32: of ``accept_truncate``; prompt_logprobs [P]
    fp32."""

    sampling: Sampling
    decisions: Tensor | None
    prompt_logprobs: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        sampling = self.sampling
        return [sampling.tokens, sampling.logprobs, self.decisions, self.prompt_logprobs]


@dataclass(eq=False)
class InFlightPass:
    """A pass under way, and the n sequences that get tokens from it: siblings that start come last.

    generation_ids: of the works' rows when it was launched; a row that has another by now holds
    another sequence, or the same one computed anew. work [n]: which work's rows a sequence's tokens
    come from. rows [n]: of the table, a leader's for siblings. firsts, counts [n]: places of its
    tokens among those sampled. offsets: of each work, its first row of logits. siblings: (place
    among the n, sequence). leads: whether siblings wait for a prompt that it computes. unscored:
    (work, position) of prompt rows whose logits give a missing log-probability. verified [S]:
    places of those with drafts to verify. thinking: rows of prompts that are thought about.
    """

    work_pass: Pass
    record: PassRecord
    generation_ids: Array
    work: Array
    rows: Array
    firsts: Array
    counts: Array
    offsets: Array
    siblings: list[tuple[int, Sequence]]
    leads: bool
    unscored: list[tuple[int, int]]
    verified: Array
    pending: Pending[Results] = field(init=False)
    thinking: ThinkingRows | None = None

    @classmethod
    def of(cls, work_pass: Pass, record: PassRecord, admission: Admission) -> InFlightPass:
        """Before it is handed to the device."""
        table, works = work_pass.table, work_pass.works
        offsets = works.cu_tokens - works.yields
        work, rows, firsts, counts = offsets, works.rows, offsets, works.yields
        if not works.single:
            work = counts.nonzero()[0]
            rows, firsts, counts = rows[work], firsts[work], counts[work]
        siblings: list[tuple[int, Sequence]] = []
        leads = False
        leading = table.draft_free[rows]
        if np.count_nonzero(leading):
            started, leads = _siblings(work_pass, work[leading], admission)
            siblings = [(len(work) + n, sibling) for n, (_, sibling) in enumerate(started)]
            work = np.concatenate([work, [n for n, _ in started]]).astype(np.int64)
            rows, counts = works.rows[work], works.yields[work]
            firsts = counts.cumsum() - counts
        verified = (table.num_drafts[rows] > 0) & (works.kinds[work] != DRAFT)
        return cls(
            work_pass,
            record,
            table.generation_id[works.rows],
            work,
            rows,
            firsts,
            counts,
            offsets,
            siblings,
            leads,
            _unscored(work_pass),
            verified.nonzero()[0],
        )

    @property
    def works(self) -> ScheduledRows:
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
        grown = self.rows[final[self.work]]
        rows, ends = works.rows[final], works.ends[final]
        drafted = works.rows[drafting]
        with ahead_of_results(table, rows, ends, self.work_pass.canonical, grown, drafted):
            yield

    def sources(self, rows: Array) -> Array:
        """[n]: where among its tokens the newest one of each of ``rows`` is; -1: elsewhere."""
        places = np.full(len(self.work_pass.table.sequences), -1)
        places[self.rows] = self.firsts
        found: Array = places[rows]
        return found

    def fetch(self) -> tuple[Sampled, Array | None, Array | None]:
        """What was sampled, decisions [5, n] (0 for those without drafts) and log-probabilities of
        prompt tokens; waits for the device. Raises what the pass raised."""
        tokens, logprobs, decided, prompts = self.pending.fetch()
        assert tokens is not None
        decisions = None
        if decided is not None:
            decisions = np.zeros((len(decided), len(self.rows)), np.int64)
            decisions[:, self.verified] = decided
        return self.pending.results.sampling.on_host(tokens, logprobs), decisions, prompts

    def keep_prompt_logprobs(self, alive: Array, ends: Array, values: Array) -> None:
        """Give requests the log-probabilities ``values`` of their prompts' tokens, of the works
        that are ``alive``, by rows before ``ends`` [works]."""
        table, rows = self.work_pass.table, self.works.rows
        for (n, position), value in zip(self.unscored, values.tolist(), strict=True):
            if alive[n] and position < ends[n]:
                request = table.sequences[rows[n]].request
                request.prompt_logprobs[position + 1] = value


def is_special(table: SequenceTable) -> bool:
    """Whether code of the user's, or more than ids, has part in sampling or committing what the
    running sequences get."""
    names = ("special_sampling", "special_commit", "scores_prompt")
    return any(table.any(name) for name in names)


def _siblings(
    work_pass: Pass, leaders: Array, admission: Admission
) -> tuple[list[tuple[int, Sequence]], bool]:
    """(work, sibling) of those that can start once the works ``leaders`` are computed, and whether
    any wait for them."""
    found = []
    places, pages = max(admission.free_places, 0), admission.pool.num_free
    leads = False
    for n in leaders.tolist():
        siblings = work_pass.table.sequences[work_pass.works.rows[n]].siblings
        copies = work_pass.works.ends[n] % admission.pool.page_size != 0
        count = min(len(siblings), places, pages if copies else places)
        places, pages = places - count, pages - (count if copies else 0)
        found += [(n, sibling) for sibling in siblings[:count]]
        leads = leads or bool(siblings)
    return found, leads


def _unscored(work_pass: Pass) -> list[tuple[int, int]]:
    """(work, position) of prompt rows whose logits give a log-probability that is missing."""
    table, works = work_pass.table, work_pass.works
    found: list[tuple[int, int]] = []
    for n in table.places("scores_prompt", works.rows):
        request = table.sequences[works.rows[n]].request
        last = min(int(works.ends[n]), request.num_prompt - 1)
        positions = range(int(works.starts[n]), last)
        found += [(n, p) for p in positions if request.prompt_logprobs[p + 1] is None]
    return found
