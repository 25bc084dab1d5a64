"""Chooses the next pass: its bucket, and which rows of which sequences run in it. Host only.

The choice changes the time of a deterministic request's tokens and never their bits: its prompt
and its commits run in canonical passes, whatever rows share them. So each step may take the
cheapest of three ways: direct, padded, or draft and verify.
"""

from __future__ import annotations

import numpy as np

from tinyspec.config import EngineConfig
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.costs import Acceptance
from tinyspec.scheduler.sequence_table import Array, SequenceTable
from tinyspec.scheduler.step import DIRECT, DRAFTING, PADDED, Step

# Drafts of the fast path that were accepted and that were not: what an engine begins with.
BEGINS = 20.0, 0.1
NONE: Array = np.zeros(0, np.int64)


# Rows of the sequence table by what they can do next, in the order in which they start.
#   plain: decode one row, and one more for each proposed token.
#   drafting: deterministic, get one more token from a draft row or a canonical row.
#   verifying: deterministic, have drafts to verify or may not draft.
#   exact_prompts, plain_prompts: more than one pending token, of deterministic and of plain ones.
Candidates = dict[str, Array]
DETERMINISTIC = ("drafting", "verifying", "exact_prompts")


class Scheduler:
    """Plans one pass after the other for the sequences that ``admission`` lets run.

    chosen: drafts whose number ``how_many`` has chosen; the next canonical pass has room for them.
    acceptance: of the fast path's drafts.
    """

    def __init__(self, config: EngineConfig, admission: Admission, buckets: Buckets):
        self._verify = config.verify
        self._waits = config.verify not in ("padded", "direct")  # drafts of the fast path
        self._free = config.draft_window is None
        self.admission = admission
        self.table: SequenceTable = admission.table
        self.buckets = buckets
        self.acceptance = Acceptance(BEGINS)
        self._left_out = False
        self.chosen = 0

    def _candidates(self) -> Candidates:
        table, rows = self.table, self.table.rows
        if self.admission.suspects:  # after a failed pass one alone
            rows = np.array([next(iter(self.admission.suspects)).row])
        elif table.is_ahead:  # there are sequences that have all their tokens and are still here
            rows = rows[table.length[rows] < table.most[rows]]
        uncomputed = table.pending(rows)
        if np.count_nonzero(uncomputed) < len(rows):  # some wait for a token from outside
            rows, uncomputed = rows[uncomputed > 0], uncomputed[uncomputed > 0]
        waiting = uncomputed > 1
        if table.any("thinking"):  # a last token alone may wait for a thought
            waiting |= table.unthought[rows] > 0
        prompts = NONE
        if np.count_nonzero(waiting):
            rows, prompts = rows[~waiting], rows[waiting]
        found = dict.fromkeys(DETERMINISTIC, NONE) | {"plain": rows, "plain_prompts": prompts}
        if table.any("deterministic"):
            exact, asked = table.deterministic[rows], table.deterministic[prompts]
            others, found["plain"] = rows[exact], rows[~exact]
            full = (table.num_drafts[others] >= table.draft_limits(others)) | (not self._waits)
            full |= (table.proposed[others] != 0) | table.draft_ended[others]
            found |= {"drafting": others[~full], "verifying": others[full]}
            found |= {"exact_prompts": prompts[asked], "plain_prompts": prompts[~asked]}
        return found

    def schedule(self) -> Step | None:
        """The next pass, its pages granted; None when nothing can run."""
        if self.table.is_ahead:  # the table as it will be: no sequence enters or leaves
            return self._plan()
        self.admission.admit()
        while (planned := self._plan()) is None and self.admission.make_way():
            pass
        return planned

    def _plan(self) -> Step | None:
        """A pass of the first kind, canonical or fast, that has rows with pages."""
        candidates = self._candidates()
        # After a canonical pass without room for every decoding sequence, a fast pass comes first.
        fast_first = self._left_out and len(self._fast(candidates)[0]) > 0
        canonical_first = self._canonical_pays(candidates) and not fast_first
        for canonical in (canonical_first, not canonical_first):
            if canonical and not any(len(candidates[name]) for name in DETERMINISTIC):
                continue
            plan = self._canonical if canonical else self._fast
            step = self._grant(*plan(candidates), canonical)
            if len(step):
                self._choose_bucket(step, candidates)
                return step
            candidates = self._candidates()  # without those that were preempted
        return None

    def _choose_bucket(self, step: Step, candidates: Candidates) -> None:
        """Its bucket, and the way that it is."""
        step.bucket = smallest = self.buckets.fit(step.num_rows)
        self._left_out = False
        if step.canonical and len(step) < len(self.table):
            # Whether a sequence that should run in a fast pass has no row.
            others = [candidates["plain"], candidates["drafting"]]
            if self.buckets.canonical[-1] < self.buckets.largest:
                others.append(candidates["plain_prompts"])
            without = np.isin(np.concatenate(others), step.rows, invert=True)
            self._left_out = bool(without.any())
        if step.canonical:  # also without a deterministic row: canonical pages may be shared
            step.bucket = self.buckets.fit_canonical(step.num_rows)
            step.way = DIRECT if step.bucket == smallest else PADDED
        elif len(candidates["drafting"]) and self.table.deterministic[step.rows].any():
            step.way = DRAFTING

    def _canonical_pays(self, candidates: Candidates) -> bool:
        """Whether the next pass should be a canonical one."""
        if not any(len(candidates[name]) for name in DETERMINISTIC):
            return False
        waiting = len(candidates["verifying"]) or len(candidates["exact_prompts"])
        if waiting or not self._waits:
            return True
        if self._verify == "always":
            return False
        drafting = len(candidates["drafting"])
        rows = len(candidates["plain"]) + drafting
        # Prompt rows beyond a canonical pass run in fast ones.
        pending = self._pending(candidates["plain_prompts"])
        rows += min(pending, max(0, self.buckets.canonical[-1] - rows))
        rows = min(rows, self.buckets.largest)
        most = int(self.table.draft_limits(candidates["drafting"]).max())
        accepted = self.accepted(candidates["drafting"])
        window = self.buckets.window(rows, min(drafting, rows), most, accepted, self._free)
        if window == 0:
            return True
        return self._free and bool(self.table.num_drafts[candidates["drafting"]].max() >= window)

    def _pending(self, prompts: Array) -> int:
        """Positions of prompts that wait to be computed, with those of their drafts."""
        return int(self.table.runnable(prompts).sum()) if len(prompts) else 0

    def accepted(self, drafting: Array = NONE) -> float:
        """Chance that a draft of the fast path is accepted, if those before it were: what those of
        these sequences were, where no drafter has proposed any, beside some of all requests'."""
        table = self.table
        drafting = drafting[table.drafter[drafting] == 0]
        own = table.accepted[drafting].sum(), table.rollbacks[drafting].sum()
        return self.acceptance.chance(*map(int, own))

    def how_many(self, asking: int, most: int, accepted: float, seconds: float) -> int:
        """How many drafts should be proposed to each of ``asking`` sequences that decode, so that a
        token costs least; 0 where none pay. most: that each may have. accepted: chance that one is,
        if those before it were; less than 1. seconds: that one for each of them takes."""
        table, buckets = self.table, self.buckets
        decoding = table.rows[table.pending(table.rows) == 1]
        rows, exact = len(decoding), int(np.count_nonzero(table.deterministic[decoding]))
        if exact and not buckets.canonical:
            return 0
        best = 0
        waiting = int(table.draft_limits(decoding).max()) if self._waits else 0
        given = rows, exact, waiting, self.accepted(decoding), self._free
        if exact:  # what it costs without
            least = buckets.cheapest_way(buckets.canonical, *given)[0]
        else:
            least = buckets.seconds(buckets.fit(rows)) / rows
        for count in range(1, most + 1):
            if (verified := rows + asking * count) > buckets.largest:
                break
            if exact:
                cost = buckets.canonical_cost(buckets.canonical, verified)
            else:
                cost = buckets.seconds(buckets.fit(verified))
            tokens = rows - asking + asking * (1 - accepted ** (count + 1)) / (1 - accepted)
            if (each := (cost + count * seconds) / tokens) < least:
                least, best = each, count
        return best

    def _canonical(self, candidates: Candidates) -> tuple[Array, Array]:
        """One row for every decoding sequence, then drafts to verify, then prompts; rows of the
        table, and how many positions of each."""
        prompts = np.concatenate([candidates["exact_prompts"], candidates["plain_prompts"]])
        pending, capacity = self._pending(prompts), self.buckets.canonical[-1]
        # Prompts get half of the pass, even if the decoding sequences would fill it.
        decoding = np.concatenate([candidates[n] for n in ("verifying", "plain", "drafting")])
        decoding = decoding[: capacity - min(pending, capacity // 2)]
        # The bucket is chosen for all that waits; a smaller one may be cheaper, but must hold a
        # row of the prompts.
        least = min(len(decoding) + self.chosen + min(pending, 1), capacity)
        drafts = self.table.num_drafts[decoding]
        wanted = len(decoding) + int(drafts.sum()) + pending
        room = self.buckets.cheapest(least, wanted) - len(decoding)
        if self.admission.row_limit is not None:
            room = min(room, self.admission.row_limit - len(decoding))
        return self._rows(decoding, drafts, prompts, room)

    def _fast(self, candidates: Candidates) -> tuple[Array, Array]:
        """One row for every decoding or drafting sequence, then drafts proposed to plain ones, then
        plain prompts. As ``_canonical``."""
        limit, prompts = self.admission.row_limit, candidates["plain_prompts"]
        decoding = np.concatenate([candidates["plain"], candidates["drafting"]])
        drafts = self.table.num_drafts[decoding]
        drafts[len(candidates["plain"]) :] = 0
        most = self.buckets.largest if limit is None else limit
        if len(prompts):
            wanted = len(decoding) + self._pending(prompts)
            most = min(most, self.buckets.room(len(decoding) + 1, wanted))
        return self._rows(decoding, drafts, prompts, most - len(decoding))

    def _rows(
        self, decoding: Array, drafts: Array, prompts: Array, room: int
    ) -> tuple[Array, Array]:
        """The newest token of each of ``decoding`` [n]; behind these as many of ``drafts`` [n] as
        leave half of ``room`` to ``prompts``; of these and their drafts what is left. By
        priority."""
        rows, counts = decoding, np.ones_like(decoding)
        if np.count_nonzero(drafts):
            most = max(room - min(self._pending(prompts), max(1, room // 2)), 0)
            counts += np.clip(most - (np.cumsum(drafts) - drafts), 0, drafts)
            room -= int(counts.sum()) - len(counts)
        if len(prompts) and room > 0:
            wanted = self.table.runnable(prompts)
            more = np.clip(room - (np.cumsum(wanted) - wanted), 0, wanted)
            if self.admission.prefix.on:
                computed, lengths = self.table.computed[prompts], self.table.length[prompts]
                more = self.admission.checkpoints.cut(computed, more, lengths)
            rows, counts = np.concatenate([rows, prompts]), np.concatenate([counts, more])
            rows, counts = rows[counts > 0], counts[counts > 0]
        elif not self.table.any("deterministic"):  # they are in order
            return rows, counts
        # Deterministic ones get pages first: who is preempted for pages has none yet.
        table = self.table
        order = np.lexsort((table.order[rows], table.priority[rows], ~table.deterministic[rows]))
        return rows[order], counts[order]

    def _grant(self, rows: Array, counts: Array, canonical: bool) -> Step:
        """A step of ``counts`` [n] positions of each of ``rows`` [n] that have pages; others wait
        for another pass."""
        step = Step.of(self.table, rows, counts, canonical)
        granted = self.admission.make_room(step.rows, step.ends)
        if granted is None or granted.all():
            return step
        if self.table.is_ahead:  # to be planned with preemption
            granted[:] = False
        return step.only(granted)
