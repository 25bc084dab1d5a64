"""Rows that advance together, more than fit at once: random traces of the scheduler by itself."""

import random
from collections import Counter

import numpy as np
import pytest

from tinyspec.config import EngineConfig
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.lock_step import LockStep
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Request
from tinyspec.scheduler.scheduler import Scheduler

FIRST_TABLE_ROWS = 16


class Rows:
    """A call of rows at random: in as few pages and places as luck gives it."""

    def __init__(self, seed, **limits):
        self.rng = rng = random.Random(seed)
        size, new = rng.choice((1, 4, 16)), rng.randint(1, 12)
        most, num = rng.choice((1, 2, 5, 40)), rng.choice((1, 3))
        shared, deterministic = [3] * rng.choice((0, 20)), rng.random() < 0.5
        prompts = [
            shared + [rng.randrange(9) for _ in range(rng.randint(1, 40))]
            for _ in range(rng.randint(2, 20))
        ]
        longest = max(-(-(len(prompt) + new) // size) for prompt in prompts)
        chosen = {
            "num_pages": longest + rng.choice((0, 1, 7, 3000)),
            "max_sequences": most,
            "prefix_cache": rng.random() < 0.7,
            "reference_rows": rng.choice((4, 8)),
            "max_rows": rng.choice((8, 16, 64)),
        }
        config = EngineConfig(page_size=size, **chosen | limits)
        self.config = config = config.resolve(device_type="cpu", model_positions=4096)
        buckets = Buckets(config.max_rows, config.reference_rows)
        buckets.learn({config.reference_rows}, {}, {})
        self.pool = PagePool(config.num_pages, size)
        self.admission = Admission(config, self.pool)
        self.table = self.admission.table
        self.scheduler = Scheduler(config, self.admission, buckets)
        params = SamplingParams(
            max_new_tokens=new, deterministic=deterministic, num_return_sequences=num
        )
        requests = [Request("", prompt, params, n) for n, prompt in enumerate(prompts)]
        self.lock = LockStep([s.tokens for r in requests for s in r.sequences], 0, [])
        self.lock.own(requests)
        self.sequences = self.lock.sequences
        for sequence in self.sequences:
            self.admission.add(sequence)

    def next_token(self):
        """Run passes until every row has one more; how many it took."""
        lengths = [sequence.length for sequence in self.sequences]
        for passes in range(1, sum(lengths) + 1):
            drawn = self.scheduler.schedule()
            assert drawn is not None, "nothing can run, yet some have no logits"
            self.check(drawn)
            works = drawn.works
            self.table.advance(works.rows, works.ends, drawn.canonical)
            for row in works.rows[works.yields > 0].tolist():
                number = self.lock.numbers[self.table.sequences[row]]
                assert number not in self.lock.logits, "it was computed twice for one token"
                self.lock.logits[number] = lengths[number]
            if self.lock.ready:
                self.commit()
                assert [s.length for s in self.sequences] == [n + 1 for n in lengths]
                return passes
        raise AssertionError("no end in sight")

    def commit(self):
        self.lock.logits.clear()
        waiting = list(self.admission.waiting)
        with self.admission.at_once(self.sequences):
            rows = np.array([sequence.row for sequence in self.sequences])
            tokens = np.array([[self.rng.randrange(9)] for _ in rows])
            self.table.commit(rows, np.ones(len(rows), np.int64), tokens)
            rows = rows[self.table.num_pages[rows] > 0]
            self.table.settle(rows)
            for row in rows[self.table.fills_page(rows, self.pool.page_size)].tolist():
                self.admission.index_pages(self.table.sequences[row])
        assert self.admission.waiting == waiting and len(rows) == len(self.table)

    def check(self, drawn):
        running = self.admission.running
        assert len(running) <= self.config.max_sequences
        assert len(running) + len(self.admission.waiting) == len(self.sequences)
        assert max(drawn.works.rows) < max(FIRST_TABLE_ROWS, self.config.max_sequences)
        assert all(not s.pages for s in self.admission.waiting)
        owned = Counter(page for s in running for page in s.pages)
        assert all(self.pool.owners(page) == count for page, count in owned.items())
        assert self.pool.num_held == len(owned)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_gets_its_tokens(seed):
    """In no more passes a token than there are tokens before it; then no page is held."""
    rows = Rows(seed)
    for _ in range(rows.sequences[0].params.max_new_tokens):
        rows.next_token()
    for sequence in rows.sequences:
        rows.admission.remove(sequence)
    assert rows.pool.num_held == 0 and not rows.admission.waiting and not len(rows.table)


def test_rows_that_all_fit_are_never_preempted_and_few_pages_preempt():
    """The control of the traces: both happen in them."""
    found = {True: [], False: []}
    for seed in range(30):
        roomy = seed % 2 == 0
        rows = Rows(
            seed, **({"num_pages": 4000, "max_sequences": 64, "max_rows": 64} if roomy else {})
        )
        for _ in range(rows.sequences[0].params.max_new_tokens):
            rows.next_token()
        found[roomy].append(rows.admission.preemptions)
    assert set(found[True]) == {0}
    assert sum(preempted > 0 for preempted in found[False]) > 8


def test_logits_of_before_the_model_changed_are_not_used():
    rows = Rows(1, max_sequences=1, num_pages=400)
    for _ in range(2):
        rows.scheduler.schedule()
        rows.lock.logits[len(rows.lock.logits)] = 0
    assert len(rows.lock.logits) == 2
    rows.admission.forget_pages()
    assert not rows.lock.logits and rows.pool.num_held == 0
    assert len(rows.admission.waiting) == len(rows.sequences)
