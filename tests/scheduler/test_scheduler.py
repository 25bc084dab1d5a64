"""The scheduler by itself: random traces with made-up tokens in place of a model."""

import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from tinyspec.config import EngineConfig
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import MOST_DRAFTS, Buckets
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import DECODE, DRAFT, PROMPT, VERIFY
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.scheduler.step import Step


class Work(NamedTuple):
    """Positions ``start`` to ``end - 1`` of one sequence; see ``Step``."""

    sequence: Sequence
    kind: int
    start: int
    end: int
    yields: int

    @property
    def count(self) -> int:
        return self.end - self.start


def works_of(drawn: Step) -> list[Work]:
    """To be called before any of its sequences ends."""
    columns = (drawn.kinds, drawn.starts, drawn.ends, drawn.yields)
    return [Work(*one) for one in zip(drawn.sequences, *(c.tolist() for c in columns), strict=True)]


class Logged(Admission):
    """Notes whom it preempts."""

    def __init__(self, *args):
        super().__init__(*args)
        self.preempted = []

    def preempt(self, sequence):
        self.preempted.append(sequence)
        super().preempt(sequence)


def rank(sequence):
    request = sequence.request
    return not sequence.deterministic, request.priority, request.arrival, sequence.index


class Simulation:
    """A scheduler and what the loop would do with its passes, tokens being drawn at random."""

    def __init__(self, seed, num_pages, page_size=4, canonical=0.0, **settings):
        """canonical: the share of buckets that are, beside the reference."""
        self.rng = random.Random(seed)
        config = EngineConfig(num_pages=num_pages, page_size=page_size, **settings)
        self.config = config.resolve(device_type="cpu", model_positions=4096)
        self.buckets = Buckets(self.config.max_rows, self.config.reference_rows)
        share = 0.0 if self.config.verify == "always" else canonical
        found = {size for size in self.buckets.sizes if self.rng.random() < share}
        found.add(self.config.reference_rows)
        self.apart = {size for size in found if self.rng.random() < 0.3}
        self.buckets.learn(found, {}, self.apart)
        self.pool = PagePool(num_pages, page_size)
        self.admission = Logged(self.config, self.pool)
        self.scheduler = Scheduler(self.config, self.admission, self.buckets)
        self.table = self.admission.table
        self.requests = []
        self.left_out = []
        self.forked = 0
        self.acceptance = self.rng.choice((0.0, 0.5, 0.9, 1.0))
        self.proposing = self.rng.random() < 0.4

    def add(self, prompt, new, deterministic, num=1):
        params = SamplingParams(
            max_new_tokens=new, deterministic=deterministic, num_return_sequences=num
        )
        request = Request("", [0] * prompt, params, len(self.requests))
        self.requests.append(request)
        for sequence in request.sequences:
            self.admission.add(sequence)

    @property
    def unfinished(self):
        return [s for r in self.requests for s in r.sequences if not s.finished]

    def step(self):
        """Propose, schedule, check, and take the results in; the pass. Afterwards ``works``."""
        self.admission.preempted = []
        self._propose()
        drawn = self.scheduler.schedule()
        assert drawn is not None, "nothing can run, yet not all is finished"
        self.admission.copies.clear()
        self.works = works_of(drawn)
        self.check(drawn)
        served = {id(work.sequence) for work in self.works}
        self.left_out = [
            s for s in self.admission.running if id(s) not in served and self._decodes(s)
        ]
        for work in self.works:
            if work.kind != DRAFT:
                work.sequence.computed = min(work.end, work.sequence.length)
        self._fork()
        for work in self.works:
            if work.kind == DRAFT:
                self._draft(work.sequence)
            elif work.yields:
                self._commit(work.sequence, work.yields)
        self.check_pool()
        return drawn

    def _decodes(self, sequence):
        """Whether one row on the fast path would bring it further."""
        if sequence.computed != sequence.length - 1 or sequence.proposed or sequence.draft_ended:
            return False
        waits = self.config.verify not in ("padded", "direct")
        limit = self._limit(sequence) if waits else 0
        return not sequence.deterministic or len(sequence.drafts) < limit

    def _limit(self, sequence):
        return int(self.table.draft_limits(np.array([sequence.row]))[0])

    def _propose(self):
        for sequence in self.admission.running:
            limit = self._limit(sequence)
            settled = (
                sequence.deterministic
                and sequence.computed == sequence.length - 1
                and not sequence.drafts
            )
            if self.proposing and settled and limit > 0:
                sequence.drafts = [0] * self.rng.randint(0, limit)
                sequence.proposed = bool(sequence.drafts)

    def _fork(self):
        """Completions start from the prompt of another, all but its last token."""
        before = set(map(id, self.admission.running))
        self.admission.admit()
        copies = {target: source for source, target in self.admission.copies}
        for sequence in self.admission.running:
            if id(sequence) in before or sequence.num_generated:
                continue
            known = sequence.request.num_prompt - 1
            own = [s for s in sequence.request.sequences if s.running and s is not sequence]
            sources = [s for s in own if s.computed >= known]
            full, rest = divmod(known, self.pool.page_size)
            if rest and sequence.pages[full:] and sequence.pages[full] in copies:
                assert copies.pop(sequence.pages[full]) in [s.pages[full] for s in sources]
            if any(id(s) in before for s in sources):
                assert sequence.computed == known
                assert sequence.pages[:full] in [s.pages[:full] for s in sources]
                self.forked += 1
        assert not copies
        self.admission.copies.clear()

    def _draft(self, sequence):
        self.table.draft(np.array([sequence.row]), np.zeros(1, np.int64))
        sequence.draft_ended = self.rng.random() < 0.05
        assert len(sequence.drafts) <= (self.config.draft_window or MOST_DRAFTS)

    def _commit(self, sequence, rows):
        """As many of ``rows`` tokens as luck accepts; a plain sequence has one."""
        drafts, committed, right = len(sequence.drafts), 0, True
        while right and committed < min(rows, sequence.remaining):
            right = committed < drafts and self.rng.random() < self.acceptance
            committed += 1
        row = np.array([sequence.row])
        self.table.commit(row, np.array([committed]), np.zeros((1, committed), np.int64))
        assert sequence.remaining >= 0
        if sequence.remaining == 0 or self.rng.random() < 0.02:
            sequence.finish_reason = "stop"
            self.admission.remove(sequence)
            return
        sequence.num_drafts = max(drafts - committed, 0) if right else 0
        if not sequence.drafts:
            sequence.proposed = sequence.draft_ended = False
        self.table.mark_final(row)
        self.admission.prefix.insert(sequence)
        if sequence.deterministic:
            self.admission.truncate(sequence, sequence.computed + len(sequence.drafts))

    def check(self, drawn):
        """What holds of every pass, whatever it was drawn from."""
        assert 0 < drawn.num_rows <= drawn.bucket
        assert drawn.bucket in self.buckets.sizes
        assert drawn.canonical == (drawn.way in ("direct", "padded"))
        assert drawn.bucket in self.buckets.canonical or not drawn.canonical
        assert len({id(work.sequence) for work in self.works}) == len(self.works)
        for work in self.works:
            sequence = work.sequence
            assert sequence in self.admission.running and not sequence.finished
            assert work.count >= 1 and len(sequence.ids(work.start, work.end)) == work.count
            assert self.table.pages[sequence.row, : len(sequence.pages)].tolist() == sequence.pages
            assert not self.table.pages[sequence.row, len(sequence.pages) :].any()
            assert work.end <= len(sequence.pages) * self.pool.page_size
            assert work.end <= len(sequence.tokens) + len(sequence.drafts)
            if work.kind == DRAFT:
                assert work.start == len(sequence.tokens) + len(sequence.drafts) - 1
            else:
                assert work.start == sequence.computed
            if sequence.deterministic:
                assert drawn.canonical == (work.kind != DRAFT)
                assert (drawn.way == "draft") == (work.kind == DRAFT)
            else:
                assert work.kind in (PROMPT, DECODE)
        stayed = [rank(s) for s in self.admission.running]
        for sequence in self.admission.preempted:
            assert rank(sequence) > max(stayed), "someone who ranks lower kept its place"
            assert not sequence.pages and not sequence.drafts and sequence.computed == 0
        order = [rank(s) for s in self.admission.preempted]
        assert order == sorted(order, reverse=True)

    def check_pool(self):
        running = self.admission.running
        assert len(running) <= self.config.max_sequences
        assert all(not s.pages for s in self.admission.waiting)
        owned = Counter(page for s in running for page in s.pages)
        assert all(self.pool.owners(page) == count for page, count in owned.items())
        assert self.pool.num_held == len(owned)

    def run(self, passes=20_000):
        """To the end; the passes that it took. Whoever ranks first is served within a window of
        passes, and whom a canonical pass leaves out for want of rows in the next one."""
        drawn, unserved, first = [], 0, None
        while self.unfinished:
            left_out = self.left_out
            drawn.append(self.step())
            served = [work.sequence for work in self.works]
            leader = min(self.admission.running, key=rank, default=None)
            unserved = 0 if leader in served or leader is not first else unserved + 1
            first = leader
            assert unserved <= (self.config.draft_window or MOST_DRAFTS) + 2
            if self.pool.num_pages > 2000 and not self.proposing:
                assert all(sequence in served for sequence in left_out)
            assert len(drawn) < passes, "no end in sight"
        assert self.pool.num_held == 0 and self.scheduler.schedule() is None
        assert not self.admission.running and not self.admission.waiting
        return drawn


def random_simulation(seed, tight=False, **settings):
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 16))
    shapes = [
        (rng.choice((1, 2, rng.randint(1, 60))), rng.randint(1, 30), rng.random() < 0.5)
        for _ in range(rng.randint(1, 12))
    ]
    longest = max(-(-(prompt + new) // page_size) for prompt, new, _ in shapes)
    chosen = {
        "reference_rows": rng.choice((4, 8, 16)),
        "max_rows": rng.choice((40, 64)),
        "max_sequences": rng.choice((1, 3, 30)),
        "draft_window": rng.choice((None, None, 1, 2, 5, 16, 40)),
        "verify": rng.choice(("auto", "always", "padded")),
        "canonical": rng.choice((0.0, 0.3, 1.0)),
    }
    pages = longest + (0 if tight else rng.choice((1, 5, 2000)))
    simulation = Simulation(seed, pages, page_size, **{**chosen, **settings})
    for prompt, new, deterministic in shapes:
        simulation.add(prompt, new, deterministic, rng.choice((1, 1, 3)))
    return simulation


# Traces that found a fault once: all rows of a pass fell to a plain prompt that found no pages.
FOUND = ((53, True), (89, False), (109, True), (359, True))


@pytest.mark.parametrize("seed, tight", [*((n, n % 2 > 0) for n in range(32)), *FOUND])
def test_random_traces(seed, tight):
    """Everything finishes, also with no page more than the longest request needs."""
    random_simulation(seed, tight).run()
    if seed % 8 == 1:
        random_simulation(seed, tight=True, max_sequences=1).run()


@pytest.mark.parametrize("seed", range(12))
def test_urgent_requests_come_late(seed):
    """Whoever would start first gets rows and pages first, and loses none to one that came before
    it, whose rows of the same pass would have no pages."""
    simulation = random_simulation(seed, tight=True, max_sequences=30, max_rows=640)
    for request in simulation.requests:
        request.priority = -request.arrival
    waiting = sorted(simulation.admission.waiting, key=rank)
    for sequence in waiting:
        simulation.admission.remove(sequence)
    while waiting:
        simulation.admission.add(waiting.pop())
        simulation.step()
    simulation.run()


def test_preemption_order():
    """Plain before deterministic, newest first; tight pools of random traces do preempt forks."""
    forks = []
    for seed in range(10):
        tight = random_simulation(seed, tight=True, max_sequences=30)
        while tight.unfinished:
            tight.step()
            forks += [s for s in tight.admission.preempted if s.index > 0]
    assert {s.deterministic for s in forks} == {True, False}
    settings = {"reference_rows": 4, "max_rows": 16, "prefix_cache": False}
    simulation = Simulation(0, num_pages=24, page_size=1, **settings)
    simulation.acceptance, simulation.proposing = 1.0, False
    for deterministic in (True, False, True, False, True):
        simulation.add(prompt=2, new=20, deterministic=deterministic)
    order = []
    while len(order) < 4:
        simulation.step()
        order += [s.request.arrival for s in simulation.admission.preempted]
    assert order[:4] == [3, 1, 4, 2]
    assert not simulation.requests[0].finished


def test_no_more_prompts_start_than_the_pool_holds():
    """What those that have started lack counts as taken: nobody is preempted before it grows."""
    settings = {"reference_rows": 4, "max_rows": 64, "prefix_cache": False}
    simulation = Simulation(0, num_pages=14, page_size=8, **settings)
    for _ in range(4):
        simulation.add(prompt=40, new=8, deterministic=False)
    simulation.step()
    assert len(simulation.admission.running) == 2
    simulation.run()
    assert simulation.admission.stats.preemptions == 0


def test_left_out_happens():
    """Control: more decoders than a canonical pass holds, beside a deterministic prompt."""
    simulation = Simulation(1, 2000, reference_rows=4, max_rows=64)
    for _ in range(20):
        simulation.add(prompt=3, new=30, deterministic=False)
    simulation.step()
    simulation.add(prompt=40, new=5, deterministic=True)
    passes = [simulation.step() for _ in range(8)]
    decoding = [int((drawn.kinds == DECODE).sum()) for drawn in passes]
    assert [drawn.canonical for drawn in passes] == [True, False] * 4
    assert decoding[::2] == [2] * 4, "half of the pass is for those who decode"
    assert all(count >= 17 for count in decoding[1::2])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num", [1, 6])
def test_more_sequences_than_the_largest_bucket(deterministic, num):
    """max_sequences beyond max_rows: no pass holds more than it can, and none starves."""
    simulation = Simulation(2, 4000, reference_rows=4, max_rows=4, max_sequences=64)
    for _ in range(12):
        simulation.add(prompt=1, new=12, deterministic=deterministic, num=num)
    simulation.run()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("prompt", [1, 8, 9])
def test_completions_start_from_the_prompt_of_another(prompt, deterministic):
    """Once it is computed: with the last token of it, in one pass with the other's next one."""
    simulation = Simulation(3, 400, reference_rows=16, max_rows=64)
    simulation.proposing = False
    simulation.add(prompt, new=5, deterministic=deterministic, num=6)
    if prompt > 1:
        assert simulation.step().num_rows == prompt and simulation.forked == 5
    simulation.step()
    assert [(work.start, work.count) for work in simulation.works[1:]] == [(prompt - 1, 1)] * 5
    simulation.run()


@pytest.mark.parametrize("verify", ["auto", "always", "padded"])
@pytest.mark.parametrize("canonical", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_while_some_verify_everyone_gets_a_token(seed, canonical, verify):
    """A decoding sequence, plain or deterministic, has a row in every pass of its kind, also
    while others verify or have their prompts computed. A verify may have to wait for one pass where
    a canonical pass had no room for the prompts of plain requests."""
    rng = random.Random(seed)
    simulation = Simulation(
        seed, 4000, canonical=canonical, reference_rows=16, max_rows=64, verify=verify
    )
    simulation.proposing = False
    for n in range(8):
        simulation.add(rng.randint(1, 40), rng.randint(5, 40), n % 2 == 0)
    verifies = 0
    while simulation.unfinished:
        decoding = [s for s in simulation.admission.running if s.computed == s.length - 1]
        before = {id(s): len(s.tokens) for s in decoding}
        goes_on = {id(s) for s in decoding if simulation._decodes(s)}
        drawn = simulation.step()
        verifies += any(work.kind == VERIFY for work in simulation.works)
        served = {id(work.sequence) for work in simulation.works}
        everyone = drawn.way in ("direct", "padded") or simulation.buckets.canonical[-1] == 64
        assert served >= ({id(s) for s in decoding} if everyone else goes_on)
        for s in decoding:
            if not s.deterministic:
                assert len(s.tokens) == before[id(s)] + 1
    if verify == "always" or (verify, canonical) == ("auto", 0.0):
        assert verifies > 0
    elif verify == "padded" or (canonical == 1.0 and not simulation.apart):
        assert verifies == 0


def test_no_number_of_accepted_drafts_makes_the_next_one_certain():
    """What was rejected is forgotten, in time wholly; windows are weighed all the same."""
    simulation = Simulation(0, num_pages=64)
    scheduler, buckets = simulation.scheduler, simulation.buckets
    for _ in range(100_000):
        scheduler.acceptance.observe(16, 0)
    assert scheduler.acceptance.bad < 1e-300, "the control"
    accepted = scheduler.accepted()
    assert 0.999 < accepted < 1
    buckets.learn([buckets.reference], {buckets.reference: 1.0})
    assert 0 <= buckets.window(1, 1, 16, accepted) <= 16
