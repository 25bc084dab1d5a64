"""Which rows run next: the choice of a pass and of its rows. Host only.

Nothing decided here can change a deterministic request's result, only when it comes: its prompt and
what it commits run in canonical passes, whatever else those hold. Hence the cheapest of three ways
may be taken at every step: direct, padded, or draft and verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyspec.config import EngineConfig
from tinyspec.scheduler.admission import Admission, age, rank
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import (
    DECODE,
    DIRECT,
    DRAFT,
    DRAFTED,
    PADDED,
    PROMPT,
    VERIFY,
    Pass,
    Work,
)
from tinyspec.scheduler.request import Sequence


@dataclass
class _Wants:
    """What the running sequences could do next, oldest first.

    decoding: plain, one row each, and one for each proposed token. settled: deterministic, one more
    token by a draft or a canonical row. due: deterministic, drafts waiting for their verify, or
    nothing that may be drafted.
    prompts: more than one pending token, of either kind.
    """

    decoding: list[Sequence] = field(default_factory=list)
    settled: list[Sequence] = field(default_factory=list)
    due: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)

    @property
    def deterministic(self) -> bool:
        return bool(self.settled or self.due) or any(s.deterministic for s in self.prompts)


class Scheduler(Admission):
    """Draws up one pass after the other for the sequences that run."""

    def __init__(self, config: EngineConfig, pool: PagePool, buckets: Buckets):
        super().__init__(config, pool)
        self.buckets = buckets
        # Share of proposed drafts that come true.
        self.acceptance = 0.5
        self._left_out = False

    def draft_limit(self, sequence: Sequence) -> int:
        """Drafts that may wait before a verify: the window, cut to what can still be committed."""
        # Siblings start from a prompt alone, never from one with drafts behind it.
        bare = sequence.undrafted or bool(sequence.siblings)
        if bare or not sequence.params.draftable:
            return 0
        if sequence.script is not None:
            return sequence.remaining - 1
        if self.config.verify in ("padded", "direct"):
            return 0
        return min(self.config.draft_window, sequence.remaining - 1)

    def _wants(self) -> _Wants:
        wants = _Wants()
        for sequence in sorted(self.eligible(), key=age):
            if sequence.pending > 1:
                wants.prompts.append(sequence)
            elif not sequence.deterministic:
                wants.decoding.append(sequence)
            else:
                full = len(sequence.drafts) >= self.draft_limit(sequence)
                due = sequence.proposed or sequence.draft_ended or full
                (wants.due if due else wants.settled).append(sequence)
        wants.prompts = self._without_followers(wants.prompts)
        return wants

    def schedule(self) -> Pass | None:
        """The next pass, pages granted; None when nothing can run."""
        self.admit()
        wants = self._wants()
        # A canonical pass may have room for few rows: when it left someone out, the next is fast.
        turn = self._left_out and bool(self._fast_works(wants))
        canonical_first = self._canonical_pays(wants) and not turn
        for canonical in (canonical_first, not canonical_first):
            if canonical and not wants.deterministic:
                continue
            works = self._canonical_works(wants) if canonical else self._fast_works(wants)
            works = self._grant(works)
            if works:
                return self._pass(works, wants, canonical)
        return None

    def _pass(self, works: list[Work], wants: _Wants, canonical: bool) -> Pass:
        rows = sum(work.count for work in works)
        needed = self.buckets.fit(rows)
        bucket = self.buckets.fit_canonical(rows) if canonical else needed
        others = [*wants.decoding, *wants.settled]
        if self._scarce:
            others += [sequence for sequence in wants.prompts if not sequence.deterministic]
        served = {id(work.sequence) for work in works}
        self._left_out = canonical and any(id(s) not in served for s in others)
        way = ""
        if canonical:  # also where no deterministic row found room: its pages may be shared
            way = DIRECT if bucket == needed else PADDED
        elif any(work.sequence.deterministic for work in works):
            way = DRAFTED
        return Pass(works, bucket, canonical, way)

    @property
    def _scarce(self) -> bool:
        """Whether a canonical pass holds fewer rows than a fast one."""
        return self.buckets.canonical[-1:] < [self.buckets.largest]

    def _canonical_pays(self, wants: _Wants) -> bool:
        """Whether the next pass is to be a canonical one."""
        if not wants.deterministic:
            return False
        if self.config.verify in ("padded", "direct") or wants.due:
            return True
        if any(sequence.deterministic for sequence in wants.prompts):
            return True
        if self.config.verify == "always":
            return False
        rows = len(wants.decoding) + len(wants.settled)
        # Of prompts what a canonical pass would hold; the rest has the fast passes.
        pending = sum(sequence.pending for sequence in wants.prompts)
        rows += min(pending, max(0, self.buckets.canonical[-1] - rows))
        rows = min(rows, self.buckets.largest)
        window = max(self.draft_limit(sequence) for sequence in wants.settled)
        return self.buckets.padded_is_cheaper(rows, min(len(wants.settled), rows), window)

    def _canonical_works(self, wants: _Wants) -> list[Work]:
        """A row for everyone who decodes, then drafts to verify, then prompts."""
        capacity = self.buckets.canonical[-1]
        # Where those who decode are more than fit, prompts still get half of the pass.
        pending = sum(sequence.pending for sequence in wants.prompts)
        ahead = (*wants.due, *wants.decoding, *wants.settled)
        ahead = ahead[: capacity - min(pending, capacity // 2)]
        counts = dict.fromkeys(map(id, ahead), 1)
        # All that waits counts towards the bucket; a smaller one may be cheaper, if no prompt
        # stands still for it.
        least = len(ahead) + (pending > 0)
        guesses = sum(len(s.drafts) for s in ahead if s.proposed and s.script is None)
        wanted = len(ahead) + sum(len(s.drafts) for s in ahead) - guesses + pending
        room = self.buckets.cheapest(least, wanted, guesses, self.acceptance) - len(ahead)
        if self.row_limit is not None:
            room = min(room, self.row_limit - len(ahead))
        kept = min(pending, max(1, room // 2)) if pending else 0
        for sequence in ahead:
            extra = min(len(sequence.drafts), room - kept)
            counts[id(sequence)] += extra
            room -= extra
        works = []
        for sequence in ahead:
            kind = VERIFY if counts[id(sequence)] > 1 or sequence.drafts else DECODE
            works.append(Work(sequence, kind, sequence.computed, counts[id(sequence)]))
        prompts = wants.prompts
        if self._scarce:  # plain prompts have the fast passes
            prompts = sorted(prompts, key=lambda s: not s.deterministic)
        return works + self._prompt_works(prompts, room)

    def _fast_works(self, wants: _Wants) -> list[Work]:
        """One row for everyone who decodes or drafts, the rest for what drafters propose to plain
        sequences, at most half of it, and for plain prompts."""
        plain = [sequence for sequence in wants.prompts if not sequence.deterministic]
        most = self.buckets.largest if self.row_limit is None else self.row_limit
        room = most - len(wants.decoding) - len(wants.settled)
        guesses = room // 2 if plain else room
        works = []
        for sequence in wants.decoding:
            extra = min(len(sequence.drafts), max(guesses, 0))
            kind = VERIFY if sequence.drafts else DECODE
            works.append(Work(sequence, kind, sequence.computed, 1 + extra))
            guesses -= extra
            room -= extra
        works += [Work(s, DRAFT, len(s.tokens) + len(s.drafts) - 1, 1) for s in wants.settled]
        return works + self._prompt_works(plain, room)

    @staticmethod
    def _prompt_works(prompts: list[Sequence], room: int) -> list[Work]:
        works = []
        for sequence in prompts:
            count = min(sequence.pending + len(sequence.drafts), room)
            if count == 0:
                break
            works.append(Work(sequence, PROMPT, sequence.computed, count))
            room -= count
        return works

    def _grant(self, works: list[Work]) -> list[Work]:
        """Pages for every row, by rank; whoever ranks lower gives way or waits for another pass."""
        granted = []
        for work in sorted(works, key=lambda w: rank(w.sequence)):
            if work.sequence in self.running and self.make_room(work.sequence, work.end):
                granted.append(work)
        return granted

    def _without_followers(self, prompts: list[Sequence]) -> list[Sequence]:
        """``prompts`` without those whose first page another of them is about to finish computing.

        They wait one pass for it, and start from what it leaves in the prefix cache.
        """
        if self.prefix is None:
            return prompts
        room = self.buckets.largest
        leaders: dict[bytes, bool] = {}
        kept = []
        for sequence in prompts:
            if sequence.computed == 0 and not sequence.pages:
                self.adopt(sequence, *self.match(sequence))
            first = self.prefix.first(sequence)
            fresh = sequence.computed == 0 and not sequence.recompute
            if fresh and first in leaders and leaders[first] >= sequence.deterministic:
                continue
            room -= sequence.pending
            if first is not None and room >= 0:
                leaders.setdefault(first, sequence.deterministic)
            kept.append(sequence)
        return kept
