"""PagePool and PrefixCache on random traces, against a dictionary; and where pages lie."""

import random

import numpy as np
import pytest

from tests.support.pages import check_index, unowned
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.scheduler.checkpoints import Checkpoints
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.prefix_cache import PrefixCache
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.sequence_table import SequenceTable


class Trace:
    """PrefixCache and PagePool driven at random, beside what they should know.

    known: (canonical, tokens up to a page's end) -> page. alive: sequences that own pages.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.pool = PagePool(self.rng.randint(3, 30), self.rng.choice((1, 2, 4)))
        self.cache = PrefixCache(self.pool, Checkpoints(SequenceTable(), self.pool.page_size, 0))
        self.table = SequenceTable(64)
        forget, self.pool.on_evict = self.pool.on_evict, self.evicted
        self.forget = forget
        self.known = {}
        self.alive = []
        self.idle_since = {}
        self.clock = 0
        self.seen = dict.fromkeys(("hits", "mixed", "evictions", "refused", "rollbacks"), 0)

    def evicted(self, page):
        """The pool takes a page that nobody owns, once nothing is free; who waits longest goes."""
        assert self.pool.owners(page) == 0 and not self.pool.free_pages
        assert not self.pool.reserved
        assert self.idle_since[page] == min(self.idle_since.values())
        self.forget(page)
        self.lose(page)
        self.seen["evictions"] += 1

    def lose(self, page):
        self.known = {key: p for key, p in self.known.items() if p != page}
        self.idle_since.pop(page, None)

    def sequence(self, tokens, deterministic):
        params = SamplingParams(deterministic=deterministic)
        sequence = Request("r", tokens, params, 0).sequences[0]
        sequence.enter(self.table, 0)
        return sequence

    def expected(self, tokens, deterministic):
        """The longest run of known pages from the first token on, canonical ones preferred."""
        size, pages, kinds = self.pool.page_size, [], []
        for end in range(size, len(tokens) + 1, size):
            prefix, wanted = tuple(tokens[:end]), (True,) if deterministic else (True, False)
            known = [kind for kind in wanted if (kind, prefix) in self.known]
            if not known:
                break
            pages.append(self.known[known[0], prefix])
            kinds.append(known[0])
        return pages, [*kinds, False].index(False)

    def start(self):
        """A new sequence: match, adopt, take the rest of its pages, compute, index."""
        tokens = []
        if self.known and self.rng.random() < 0.5:
            tokens = list(self.rng.choice(sorted(self.known))[1])
        tokens += [self.rng.randrange(2) for _ in range(self.rng.randint(1, 12))]
        sequence = self.sequence(tokens, self.rng.random() < 0.5)
        pages, canonical = self.cache.match(sequence)
        assert (pages, canonical) == self.expected(tokens, sequence.deterministic)
        assert len(pages) <= len(tokens) // self.pool.page_size
        assert canonical == len(pages) or not sequence.deterministic
        self.seen["hits"] += bool(pages)
        self.seen["mixed"] += 0 < canonical < len(pages)
        self.pool.adopt(pages)
        for page in pages:
            self.idle_since.pop(page, None)
        sequence.pages, sequence.indexed = pages, len(pages)
        sequence.canonical = canonical * self.pool.page_size
        if not self.pool.can_grow(pages, len(tokens)):
            self.seen["refused"] += 1
            self.leave(sequence)
            return
        self.pool.grow(sequence.pages, len(tokens), self.rng.randint(0, 4 * len(tokens)))
        self.alive.append(sequence)
        self.compute(sequence)

    def compute(self, sequence):
        """All its tokens have KV now; what of it is canonical is chosen at random."""
        sequence.computed = len(sequence.tokens)
        if sequence.deterministic:
            sequence.canonical = sequence.computed
        elif self.rng.random() < 0.5 and sequence.canonical >= sequence.indexed:
            sequence.canonical = self.rng.randint(sequence.canonical, sequence.computed)
        size, first = self.pool.page_size, sequence.indexed
        self.cache.insert(sequence)
        for number in range(first, sequence.computed // size):
            end = (number + 1) * size
            key = (sequence.canonical >= end, tuple(sequence.tokens[:end]))
            page = sequence.pages[number]
            if page not in self.known.values():
                self.known.setdefault(key, page)

    def extend(self):
        sequence = self.rng.choice(self.alive)
        more = self.rng.randint(1, 2 * self.pool.page_size)
        if self.pool.can_grow(sequence.pages, len(sequence.tokens) + more):
            new = [self.rng.randrange(2) for _ in range(more)]
            self.table.commit(np.array([sequence.row]), np.array([more]), np.array([new]))
            self.pool.grow(sequence.pages, len(sequence.tokens))
            self.compute(sequence)

    def roll_back(self):
        """Pages for drafts, which are all rejected: the sequence has its own, and the pool too."""
        sequence = self.rng.choice(self.alive)
        pages, free = list(sequence.pages), self.pool.num_free
        tokens = len(sequence.tokens) + self.rng.randint(1, 3 * self.pool.page_size)
        need = self.pool.pages_for(tokens) - len(pages)
        assert self.pool.can_grow(pages, tokens) == (need <= free)
        if need <= free:
            self.pool.grow(sequence.pages, tokens)
            assert self.pool.num_free == free - need
            for _ in range(2):
                self.pool.truncate(sequence.pages, len(sequence.tokens))
            assert sequence.pages == pages and self.pool.num_free == free
            self.seen["rollbacks"] += need > 0

    def finish(self):
        self.leave(self.alive.pop(self.rng.randrange(len(self.alive))))

    def leave(self, sequence):
        """Pages go idle from the last to the first, so that the first are evicted last."""
        for page in reversed(sequence.pages):
            if self.pool.owners(page) == 1 and page in self.known.values():
                self.idle_since[page] = self.clock = self.clock + 1
        self.pool.free(sequence.pages)
        sequence.leave()

    def distrust(self):
        """A sequence failed: the index forgets its pages, others may still own them."""
        sequence = self.alive.pop(self.rng.randrange(len(self.alive)))
        self.cache.drop(sequence.pages)
        for page in sequence.pages:
            self.lose(page)
        self.leave(sequence)

    def clear(self):
        if self.rng.random() < 0.1:
            self.cache.clear()
            self.known = {}
            self.idle_since = {}

    def check(self):
        check_index(self.cache)
        owned = [page for sequence in self.alive for page in set(sequence.pages)]
        counts = [owned.count(page) for page in range(self.pool.num_pages)]
        assert [self.pool.owners(page) for page in range(self.pool.num_pages)] == counts
        assert sorted([*unowned(self.pool), *set(owned)]) == list(range(self.pool.num_pages))
        assert len(self.cache) == len(self.known)
        assert set(self.cache.keys) == set(self.known.values())
        assert set(self.pool.idle) == set(self.idle_since)

    def go(self, turns):
        for _ in range(turns):
            moves = [self.start, self.clear]
            if self.alive:
                moves += [self.start, self.extend, self.extend, self.finish, self.finish]
                moves += [self.distrust, self.roll_back]
            self.rng.choice(moves)()
            self.check()
        for sequence in self.alive:
            self.leave(sequence)
        assert self.pool.num_free == self.pool.num_pages
        return self.seen


@pytest.mark.parametrize("block", range(3))
def test_random_traces(block):
    seen = [Trace(seed).go(200) for seed in range(block * 8, block * 8 + 8)]
    # Control: the traces met everything that could have gone wrong.
    for event in seen[0]:
        assert sum(one[event] for one in seen) >= 5, event


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_says_how_long_a_sequence_may_become(known, monkeypatch):
    """Control: where it does not, pages of sequences that decode side by side lie in turns."""
    if not known:
        monkeypatch.setattr(Sequence, "most_tokens", 0)
    config = EngineConfig(page_size=16, num_pages=64, max_sequences=8, prefix_cache=False)
    runs = set()
    with Engine(tiny(), config=config) as engine:
        for prompt in ([5] * 10, [6] * 20, [7] * 30):
            engine.add_request(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
            pages = [sequence.pages for sequence in engine.admission.running]
            runs |= {own == list(range(own[0], own[0] + len(own))) for own in pages}
    assert runs == ({True} if known else {True, False})
