"""Which rows run next: admission, the choice of a pass, its rows, and pages for them. Host only.

Nothing decided here can change a deterministic request's result, only when it comes: its prompt
and its verifies run in canonical passes, whatever else those hold.
"""

from __future__ import annotations

from bisect import insort

from tinyspec.buckets import Buckets
from tinyspec.config import EngineConfig
from tinyspec.pages import PagePool
from tinyspec.passes import DECODE, DRAFT, PROMPT, VERIFY, Pass, Work
from tinyspec.request import Sequence


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    """Who gets pages first, and is preempted last: deterministic before plain, old before new."""
    return not sequence.deterministic, *_age(sequence)


class Scheduler:
    """Holds the waiting and the running sequences and draws up one pass after the other."""

    def __init__(self, config: EngineConfig, pool: PagePool, buckets: Buckets):
        self.config = config
        self.pool = pool
        self.buckets = buckets
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._left_out = False
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, by the age of its request."""
        insort(self.waiting, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its pages."""
        sequence.drop_drafts()
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.pool.free(sequence.pages)

    def can_fork(self, leader: Sequence) -> bool:
        """Whether there is a place and a page for a sibling that starts on a computed prompt."""
        room = len(self.running) < self.config.max_sequences
        return room and self.pool.can_fork(leader.computed)

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Start ``sibling`` on the prompt that ``leader`` has computed.

        Returns (from, to) of the page that must be copied, if there is one.
        """
        sibling.pages, copy = self.pool.fork(leader.pages, leader.computed)
        sibling.computed = leader.computed
        self.running.append(sibling)
        return copy

    def draft_limit(self, sequence: Sequence) -> int:
        """Drafts that may wait before a verify: the window, cut to what can still be committed."""
        padded = self.config.verify == "padded"
        # Siblings start from a prompt alone, never from one with drafts behind it.
        bare = sequence.undrafted or bool(sequence.siblings)
        if padded or bare or not sequence.params.draftable:
            return 0
        return min(self.config.draft_window, sequence.remaining - 1)

    def _due(self, sequence: Sequence) -> bool:
        """Whether a decoding deterministic sequence can only go on in a canonical pass."""
        full = len(sequence.drafts) >= self.draft_limit(sequence)
        return sequence.proposed or sequence.draft_ended or full

    def schedule(self) -> Pass | None:
        """The next pass, pages granted; None when nothing can run."""
        self._admit()
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        canonical: list[Sequence] = []
        drafting: list[Sequence] = []
        for sequence in self.running:
            if sequence.deterministic:
                settled = sequence.pending == 1 and not self._due(sequence)
                (drafting if settled else canonical).append(sequence)
            else:
                (decoding if sequence.pending == 1 else prompts).append(sequence)
        # A canonical pass has room for few rows: when it left someone out, the next one is fast.
        others = (*decoding, *drafting, *prompts)
        fast_first = not canonical or (self._left_out and bool(others))
        for is_fast in (fast_first, not fast_first):
            if is_fast:
                works = self._fast_works(decoding, drafting, prompts)
            else:
                works = self._canonical_works(canonical, decoding, drafting, prompts)
            works = self._grant(works)
            if works:
                break
        else:
            return None
        rows = sum(work.count for work in works)
        bucket = self.buckets.fit(rows) if is_fast else self.buckets.reference
        served = {id(work.sequence) for work in works}
        self._left_out = not is_fast and any(id(s) not in served for s in others)
        return Pass(works, bucket, self.buckets.is_canonical(bucket))

    def _canonical_works(
        self,
        canonical: list[Sequence],
        decoding: list[Sequence],
        drafting: list[Sequence],
        prompts: list[Sequence],
    ) -> list[Work]:
        """Prompts and verifies of deterministic requests; what room they leave goes to the rest."""
        room = self.buckets.reference
        # Decode rows ride along; where they are many, half the pass is theirs.
        riding = min(len(decoding), room // 2)
        works = []
        for sequence in sorted(canonical, key=_age):
            count = min(sequence.pending + len(sequence.drafts), room - riding)
            if count == 0:
                break
            kind = PROMPT if sequence.pending > 1 else VERIFY
            works.append(Work(sequence, kind, sequence.computed, count))
            room -= count
        for sequence in decoding[:room]:
            works.append(Work(sequence, DECODE, sequence.computed, 1))
            room -= 1
        for sequence in drafting:
            count = 1 + len(sequence.drafts)
            if count <= room:
                works.append(Work(sequence, VERIFY, sequence.computed, count))
                room -= count
        return works + self._prompt_works(prompts, room)

    def _fast_works(
        self, decoding: list[Sequence], drafting: list[Sequence], prompts: list[Sequence]
    ) -> list[Work]:
        """One row for everyone who decodes or drafts, the rest for plain prompts."""
        works = [Work(s, DECODE, s.computed, 1) for s in decoding]
        works += [Work(s, DRAFT, len(s.tokens) + len(s.drafts) - 1, 1) for s in drafting]
        return works + self._prompt_works(prompts, self.buckets.largest - len(works))

    @staticmethod
    def _prompt_works(prompts: list[Sequence], room: int) -> list[Work]:
        works = []
        for sequence in sorted(prompts, key=_age):
            count = min(sequence.pending, room)
            if count == 0:
                break
            works.append(Work(sequence, PROMPT, sequence.computed, count))
            room -= count
        return works

    def _admit(self) -> None:
        """Move waiting sequences in while there is a place and pages that are likely to last."""
        while self.waiting and len(self.running) < self.config.max_sequences:
            need = self.pool.pages_for(len(self.waiting[0].tokens) + 1)
            if self.running and self.pool.num_free < need + len(self.running):
                break
            self.running.append(self.waiting.pop(0))

    def _grant(self, works: list[Work]) -> list[Work]:
        """Pages for every row, by rank; whoever ranks lower gives way or waits for another pass."""
        granted = []
        for work in sorted(works, key=lambda w: _rank(w.sequence)):
            sequence = work.sequence
            if sequence not in self.running:
                continue
            while not self.pool.can_grow(sequence.pages, work.end):
                victim = max(self.running, key=_rank)
                if victim is sequence:
                    break
                self._preempt(victim)
            if self.pool.can_grow(sequence.pages, work.end):
                self.pool.grow(sequence.pages, work.end)
                granted.append(work)
        return granted

    def _preempt(self, sequence: Sequence) -> None:
        """Give back its pages; it is computed again, to the same bits, when there is room."""
        self.running.remove(sequence)
        self.pool.free(sequence.pages)
        sequence.reset()
        sequence.stats.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def preempt_all(self) -> None:
        """After a failed pass: everything that ran goes back to be computed again."""
        for sequence in list(self.running):
            self._preempt(sequence)
