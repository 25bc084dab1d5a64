"""Chooses the next pass: its bucket, and which rows of which sequences run in it. Host only.

The choice changes the time of a deterministic request's tokens and never their bits: its prompt
and its commits run in canonical passes, whatever rows share them. So each step may take the
cheapest of three ways: direct, padded, or draft and verify.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyspec.config import EngineConfig
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.passes import DIRECT, DRAFTING, PADDED, Pass, ScheduledRows
from tinyspec.scheduler.sequence_table import Array, SequenceTable

# Rows of the sequence table, and how many positions of each.
_Part = tuple[Array, Array]
# Drafts of the fast path that were accepted and that were not: what an engine begins with, and how
# many it remembers, as other requests may have others.
BEGINS, REMEMBERED = (20.0, 0.1), 200.0
# However many drafts in a row were accepted, the next one may not be.
SUREST = 1 - 1e-6
NONE: Array = np.zeros(0, np.int64)


@dataclass
class _Candidates:
    """Rows of the sequence table by what they can do next, in the order in which they start.

    plain: decode one row, and one more for each proposed token. drafting: deterministic, get one
    more token from a draft row or a canonical row. verifying: deterministic, have drafts to verify
    or may not draft. exact_prompts, plain_prompts: more than one pending token, of deterministic
    and of plain sequences. pending: their tokens that wait to be computed.
    """

    plain: Array
    drafting: Array
    verifying: Array
    exact_prompts: Array
    plain_prompts: Array
    pending: int

    @property
    def deterministic(self) -> bool:
        return bool(len(self.drafting) or len(self.verifying) or len(self.exact_prompts))


class Scheduler:
    """Plans one pass after the other for the sequences that ``admission`` lets run."""

    def __init__(self, config: EngineConfig, admission: Admission, buckets: Buckets):
        self._verify = config.verify
        self._free = config.draft_window is None
        self.admission = admission
        self.table: SequenceTable = admission.table
        self.buckets = buckets
        self._verified = BEGINS
        self._left_out = False

    def _candidates(self) -> _Candidates:
        table, rows = self.table, self.admission.eligible()
        uncomputed = table.pending(rows)
        if np.count_nonzero(uncomputed) < len(rows):  # some wait for a token from outside
            rows, uncomputed = rows[uncomputed > 0], uncomputed[uncomputed > 0]
        waiting = uncomputed > 1
        if table.any("thinking"):  # a last token alone may wait for a thought
            waiting |= table.unthought[rows] > 0
        prompts, pending = NONE, 0
        if np.count_nonzero(waiting):
            rows, prompts = rows[~waiting], self._without_followers(rows[waiting])
            pending = int(np.minimum(table.pending(prompts), table.runnable(prompts)).sum())
        if not table.any("deterministic"):
            return _Candidates(rows, NONE, NONE, NONE, prompts, pending)
        exact, asked = table.deterministic[rows], table.deterministic[prompts]
        others = rows[exact]
        full = table.drafts_are_full(others)
        parts = rows[~exact], others[~full], others[full], prompts[asked], prompts[~asked]
        return _Candidates(*parts, pending)

    def schedule(self) -> Pass | None:
        """The next pass, its pages granted; None when nothing can run."""
        if self.table.is_ahead:  # the table as it will be: no sequence enters or leaves
            return self._plan()
        self.admission.admit()
        while (planned := self._plan()) is None and self.admission.make_way():
            pass
        return planned

    def _plan(self) -> Pass | None:
        """A pass of the first kind, canonical or fast, that has rows with pages."""
        candidates = self._candidates()
        # After a canonical pass without room for every decoding sequence, a fast pass comes first.
        fast_first = self._left_out and any(len(rows) for rows, _ in self._fast(candidates))
        canonical_first = self._canonical_pays(candidates) and not fast_first
        for canonical in (canonical_first, not canonical_first):
            if canonical and not candidates.deterministic:
                continue
            plan = self._canonical if canonical else self._fast
            granted = self._grant(plan(candidates), canonical)
            if len(granted):
                return self._pass(granted, candidates, canonical)
            candidates = self._candidates()  # without those that were preempted
        return None

    def _pass(self, works: ScheduledRows, candidates: _Candidates, canonical: bool) -> Pass:
        smallest = self.buckets.fit(works.num_rows)
        bucket = self.buckets.fit_canonical(works.num_rows) if canonical else smallest
        everyone = len(works) == len(self.table)
        self._left_out = canonical and not everyone and self._leaves_out(works, candidates)
        way = ""
        if canonical:  # also without a deterministic row: canonical pages may be shared
            way = DIRECT if bucket == smallest else PADDED
        elif len(candidates.drafting) and self.table.deterministic[works.rows].any():
            way = DRAFTING
        return Pass(works, self.table, bucket, canonical, way)

    def _leaves_out(self, works: ScheduledRows, candidates: _Candidates) -> bool:
        """Whether a sequence that should run in a fast pass has no row."""
        others = [candidates.plain, candidates.drafting]
        if self.buckets.canonical[-1] < self.buckets.largest:
            others.append(candidates.plain_prompts)
        return bool(np.isin(np.concatenate(others), works.rows, invert=True).any())

    def _canonical_pays(self, candidates: _Candidates) -> bool:
        """Whether the next pass should be a canonical one."""
        if not candidates.deterministic:
            return False
        if self._verify in ("padded", "direct"):
            return True
        if len(candidates.verifying) or len(candidates.exact_prompts):
            return True
        if self._verify == "always":
            return False
        drafting = len(candidates.drafting)
        rows = len(candidates.plain) + drafting
        # Prompt rows beyond a canonical pass run in fast ones.
        rows += min(candidates.pending, max(0, self.buckets.canonical[-1] - rows))
        rows = min(rows, self.buckets.largest)
        most = int(self.table.draft_limits(candidates.drafting).max())
        accepted = self.accepted(candidates.drafting)
        window = self.buckets.window(rows, min(drafting, rows), most, accepted, self._free)
        if window == 0:
            return True
        return self._free and bool(self.table.num_drafts[candidates.drafting].max() >= window)

    def observe(self, accepted: int, rejected: int) -> None:
        """A pass verified drafts: so many were accepted, and so many sequences had one that was
        not."""
        good, bad = self._verified[0] + accepted, self._verified[1] + rejected
        part = min(1.0, REMEMBERED / (good + bad))
        self._verified = good * part, bad * part

    def accepted(self, drafting: Array = NONE) -> float:
        """Chance that a draft of these sequences is accepted, if those before it were: what theirs
        were, beside some of all requests'."""
        table, (good, bad) = self.table, self._verified
        part = min(1.0, sum(BEGINS) / (good + bad))
        good = good * part + int(table.accepted[drafting].sum())
        bad = bad * part + int(table.rollbacks[drafting].sum())
        return min(good / (good + bad), SUREST)

    def _canonical(self, candidates: _Candidates) -> list[_Part]:
        """One row for every decoding sequence, then drafts to verify, then prompts."""
        table = self.table
        capacity = self.buckets.canonical[-1]
        pending = candidates.pending
        # Prompts get half of the pass, even if the decoding sequences would fill it.
        decoding = np.concatenate([candidates.verifying, candidates.plain, candidates.drafting])
        decoding = decoding[: capacity - min(pending, capacity // 2)]
        # The bucket is chosen for all that waits; a smaller one may be cheaper, but must hold a
        # row of the prompts.
        least = len(decoding) + min(pending, 1)
        drafts = table.num_drafts[decoding]
        wanted = len(decoding) + int(drafts.sum()) + pending
        room = self.buckets.cheapest(least, wanted) - len(decoding)
        if self.admission.row_limit is not None:
            room = min(room, self.admission.row_limit - len(decoding))
        for_prompts = min(pending, max(1, room // 2))
        works, room = self._decoding(decoding, drafts, room - for_prompts, room)
        prompts = np.concatenate([candidates.exact_prompts, candidates.plain_prompts])
        return [works, *self._prompts(prompts, room)]

    def _fast(self, candidates: _Candidates) -> list[_Part]:
        """One row for every decoding or drafting sequence; of the rest up to half for drafts
        proposed to plain sequences, and the remainder for plain prompts."""
        limit = self.admission.row_limit
        most = self.buckets.largest if limit is None else limit
        plain, drafting = candidates.plain, candidates.drafting
        decoding = len(plain) + len(drafting)
        if len(candidates.plain_prompts):
            pending = int(self.table.runnable(candidates.plain_prompts).sum())
            most = min(most, self.buckets.room(decoding + 1, decoding + pending))
        room = most - decoding
        for_drafts = room // 2 if len(candidates.plain_prompts) else room
        works, room = self._decoding(plain, self.table.num_drafts[plain], for_drafts, room)
        prompts = self._prompts(candidates.plain_prompts, room)
        return [works, (drafting, np.ones_like(drafting)), *prompts]

    @staticmethod
    def _decoding(rows: Array, drafts: Array, for_drafts: int, room: int) -> tuple[_Part, int]:
        """The newest token of each of ``rows`` and as many ``drafts`` [n], from the first on, as
        there is room for; what is left of ``room``."""
        if not np.count_nonzero(drafts):
            return (rows, np.ones_like(rows)), room
        before = np.cumsum(drafts) - drafts
        extra = np.clip(max(for_drafts, 0) - before, 0, drafts)
        return (rows, 1 + extra), room - int(extra.sum())

    def _prompts(self, rows: Array, room: int) -> list[_Part]:
        """As many tokens of the prompts as there is room for, and their drafts."""
        if not len(rows) or room <= 0:
            return []
        wanted = self.table.runnable(rows)
        counts = np.clip(room - (np.cumsum(wanted) - wanted), 0, wanted)
        if self.admission.prefix.on:
            computed, lengths = self.table.computed[rows], self.table.length[rows]
            counts = self.admission.checkpoints.cut(computed, counts, lengths)
        return [(rows[counts > 0], counts[counts > 0])]

    def _grant(self, plan: list[_Part], canonical: bool) -> ScheduledRows:
        """The works of a plan that have pages, by priority; others wait for another pass."""
        rows, counts = (np.concatenate(column) for column in zip(*plan, strict=True))
        if len(rows) > len(plan[0][0]) or self.table.any("deterministic"):  # else they are in order
            order = self.table.by_priority(rows)
            rows, counts = rows[order], counts[order]
        works = ScheduledRows.of(self.table, rows, counts, canonical)
        granted = self.admission.make_room(works.rows, works.ends)
        if granted is None or granted.all():
            return works
        if self.table.is_ahead:  # to be planned with preemption
            granted[:] = False
        return works.only(granted)

    def _without_followers(self, rows: Array) -> Array:
        """Prompts without those whose first page another of them is about to finish computing.

        They wait one pass for it, and start from what it leaves in the prefix cache.
        """
        prefix, table = self.admission.prefix, self.table
        for row in rows[table.computed[rows] == 0].tolist():
            sequence = table.sequences[row]
            if not sequence.pages:
                self.admission.adopt(sequence, *prefix.match(sequence))
        if len(rows) == 1 or not prefix.on:
            return rows
        room = self.buckets.largest
        canonical_leaders: dict[bytes, bool] = {}
        kept = []
        for row in rows.tolist():
            sequence = table.sequences[row]
            first = prefix.first(sequence)
            leader = canonical_leaders.get(first) if first is not None else None
            # A deterministic sequence cannot start from a plain leader's pages.
            usable = leader is not None and (leader or not sequence.deterministic)
            if usable and sequence.computed == 0 and not sequence.recompute:
                continue
            room -= sequence.pending
            if first is not None and room >= 0:
                canonical_leaders.setdefault(first, sequence.deterministic)
            kept.append(row)
        return np.array(kept, np.int64)
