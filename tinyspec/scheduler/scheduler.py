"""Chooses the next pass: its bucket, and which rows of which sequences run in it. Host only.

The choice changes the time of a deterministic request's tokens and never their bits: its prompt
and its commits run in canonical passes, whatever rows share them. So each step may take the
cheapest of three ways: direct, padded, or draft and verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyspec.config import EngineConfig
from tinyspec.scheduler.admission import Admission, arrival_order, priority
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import DECODE, DIRECT, DRAFT, PADDED, PROMPT, VERIFY, Pass, Work
from tinyspec.scheduler.request import Sequence


@dataclass
class _Candidates:
    """The running sequences by what they can do next, in order of arrival.

    plain: decode one row, and one more for each proposed token. drafting: deterministic, get one
    more token from a draft row or a canonical row. verifying: deterministic, have drafts to verify
    or may not draft. prompts: more than one pending token, deterministic or plain.
    """

    plain: list[Sequence] = field(default_factory=list)
    drafting: list[Sequence] = field(default_factory=list)
    verifying: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)

    @property
    def deterministic_prompts(self) -> list[Sequence]:
        return [sequence for sequence in self.prompts if sequence.deterministic]

    @property
    def plain_prompts(self) -> list[Sequence]:
        return [sequence for sequence in self.prompts if not sequence.deterministic]

    @property
    def deterministic(self) -> bool:
        return bool(self.drafting or self.verifying or self.deterministic_prompts)

    @property
    def pending(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(sequence.pending for sequence in self.prompts)


class Scheduler(Admission):
    """Plans one pass after the other for the running sequences."""

    def __init__(self, config: EngineConfig, pool: PagePool, buckets: Buckets):
        super().__init__(config, pool)
        self.buckets = buckets
        # Share of proposed drafts that are accepted.
        self.acceptance = 0.5
        self._left_out = False

    def draft_limit(self, sequence: Sequence) -> int:
        """Drafts that may wait before a verify: the window, cut to what can still be committed."""
        # Siblings start from a prompt without drafts behind it.
        if sequence.draft_free or sequence.siblings or not sequence.params.draftable:
            return 0
        if sequence.given_tokens is not None:
            return sequence.remaining - 1
        if self.config.verify in ("padded", "direct"):
            return 0
        return min(self.config.draft_window, sequence.remaining - 1)

    def _candidates(self) -> _Candidates:
        found = _Candidates()
        for sequence in sorted(self.eligible(), key=arrival_order):
            if sequence.pending > 1:
                found.prompts.append(sequence)
            elif not sequence.deterministic:
                found.plain.append(sequence)
            elif (
                sequence.proposed
                or sequence.draft_ended
                or len(sequence.drafts) >= self.draft_limit(sequence)
            ):
                found.verifying.append(sequence)
            else:
                found.drafting.append(sequence)
        found.prompts = self._without_followers(found.prompts)
        return found

    def schedule(self) -> Pass | None:
        """The next pass, its pages granted; None when nothing can run."""
        self.admit()
        while (planned := self._plan()) is None and len(self.running) > 1:
            # The rows of a pass went to sequences that found no pages.
            self._preempt(max(self.running, key=priority))
        return planned

    def _plan(self) -> Pass | None:
        """A pass of the first kind, canonical or fast, that has rows with pages."""
        candidates = self._candidates()
        # After a canonical pass without room for every decoding sequence, a fast pass comes first.
        fast_first = self._left_out and bool(self._fast_works(candidates))
        canonical_first = self._canonical_pays(candidates) and not fast_first
        for canonical in (canonical_first, not canonical_first):
            if canonical and not candidates.deterministic:
                continue
            plan = self._canonical_works if canonical else self._fast_works
            granted = self._grant(plan(candidates))
            if granted:
                return self._pass(granted, candidates, canonical)
        return None

    def _pass(self, works: list[Work], candidates: _Candidates, canonical: bool) -> Pass:
        rows = sum(work.count for work in works)
        smallest = self.buckets.fit(rows)
        bucket = self.buckets.fit_canonical(rows) if canonical else smallest
        others = candidates.plain + candidates.drafting
        if self._canonical_is_smaller:
            others += candidates.plain_prompts
        served = {id(work.sequence) for work in works}
        self._left_out = canonical and any(id(s) not in served for s in others)
        way = ""
        if canonical:  # also without a deterministic row: canonical pages may be shared
            way = DIRECT if bucket == smallest else PADDED
        elif any(work.sequence.deterministic for work in works):
            way = DRAFT
        return Pass(works, bucket, canonical, way)

    @property
    def _canonical_is_smaller(self) -> bool:
        """Whether a canonical pass holds fewer rows than a fast one."""
        canonical = self.buckets.canonical
        return not canonical or canonical[-1] < self.buckets.largest

    def _canonical_pays(self, candidates: _Candidates) -> bool:
        """Whether the next pass should be a canonical one."""
        if not candidates.deterministic:
            return False
        if self.config.verify in ("padded", "direct") or candidates.verifying:
            return True
        if candidates.deterministic_prompts:
            return True
        if self.config.verify == "always":
            return False
        rows = len(candidates.plain) + len(candidates.drafting)
        # Prompt rows beyond a canonical pass run in fast ones.
        rows += min(candidates.pending, max(0, self.buckets.canonical[-1] - rows))
        rows = min(rows, self.buckets.largest)
        window = max(self.draft_limit(sequence) for sequence in candidates.drafting)
        return self.buckets.padded_is_cheaper(rows, min(len(candidates.drafting), rows), window)

    def _canonical_works(self, candidates: _Candidates) -> list[Work]:
        """One row for every decoding sequence, then drafts to verify, then prompts."""
        capacity = self.buckets.canonical[-1]
        pending = candidates.pending
        # Prompts get half of the pass, even if the decoding sequences would fill it.
        decoding = candidates.verifying + candidates.plain + candidates.drafting
        decoding = decoding[: capacity - min(pending, capacity // 2)]
        # The bucket is chosen for all that waits; a smaller one may be cheaper, but must hold a
        # row of the prompts.
        least = len(decoding) + min(pending, 1)
        drafts = sum(len(s.drafts) for s in decoding)
        proposed = sum(len(s.drafts) for s in decoding if s.proposed and s.given_tokens is None)
        wanted = len(decoding) + drafts - proposed + pending
        room = self.buckets.cheapest(least, wanted, proposed, self.acceptance) - len(decoding)
        if self.row_limit is not None:
            room = min(room, self.row_limit - len(decoding))
        for_prompts = min(pending, max(1, room // 2))
        works = []
        for sequence in decoding:
            extra = min(len(sequence.drafts), room - for_prompts)
            kind = VERIFY if sequence.drafts else DECODE
            works.append(Work(sequence, kind, sequence.computed, 1 + extra))
            room -= extra
        prompts = candidates.prompts
        if self._canonical_is_smaller:  # plain prompts can run in fast passes
            prompts = candidates.deterministic_prompts + candidates.plain_prompts
        return works + self._prompt_works(prompts, room)

    def _fast_works(self, candidates: _Candidates) -> list[Work]:
        """One row for every decoding or drafting sequence; of the rest up to half for drafts
        proposed to plain sequences, and the remainder for plain prompts."""
        most = self.buckets.largest if self.row_limit is None else self.row_limit
        room = most - len(candidates.plain) - len(candidates.drafting)
        for_drafts = room // 2 if candidates.plain_prompts else room
        works = []
        for sequence in candidates.plain:
            extra = min(len(sequence.drafts), max(for_drafts, 0))
            kind = VERIFY if sequence.drafts else DECODE
            works.append(Work(sequence, kind, sequence.computed, 1 + extra))
            for_drafts -= extra
            room -= extra
        for sequence in candidates.drafting:
            newest = len(sequence.tokens) + len(sequence.drafts) - 1
            works.append(Work(sequence, DRAFT, newest, 1))
        return works + self._prompt_works(candidates.plain_prompts, room)

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
        """Pages for the rows, by priority; works without pages wait for another pass."""
        granted = []
        for work in sorted(works, key=lambda w: priority(w.sequence)):
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
        canonical_leaders: dict[bytes, bool] = {}
        kept = []
        for sequence in prompts:
            if sequence.computed == 0 and not sequence.pages:
                self.adopt(sequence, *self.match(sequence))
            first = self.prefix.first(sequence)
            leader = canonical_leaders.get(first) if first is not None else None
            # A deterministic sequence cannot start from a plain leader's pages.
            usable = leader is not None and (leader or not sequence.deterministic)
            if usable and sequence.computed == 0 and not sequence.recompute:
                continue
            room -= sequence.pending
            if first is not None and room >= 0:
                canonical_leaders.setdefault(first, sequence.deterministic)
            kept.append(sequence)
        return kept
