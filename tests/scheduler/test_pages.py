"""PagePool and PrefixCache on random traces, against a dictionary; where pages lie, and what a
prompt may start from."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cases import drain, engine_of, greedy, model_of, one_by_one, text, whole
from tests.support.mixes import bits
from tests.support.pages import check_index, indexed_kv, page_kv, unowned
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


# What an engine may start from: prompts in a warm cache, to the bits of a cold one


PROMPT = text(48, seed=1)


def tokens_cached(output):
    return [completion.stats.cached_prompt_tokens for completion in output.completions]


def half_each():
    """Two requests that share PROMPT, deterministic ones with bits to compare."""
    return [(PROMPT + text(5, seed=n), greedy(10, temperature=0.5, seed=n)) for n in range(2)]


def test_a_deterministic_request_starts_from_canonical_pages_only():
    """Plain ones serve plain ones; the deterministic computes its own, which serve everyone."""
    model = model_of("shape-sensitive")
    with engine_of(model, prefix_cache=False) as engine:
        alone = one_by_one(engine, half_each())
    with engine_of(model, page_size=16) as engine:
        wanted = SamplingParams(max_new_tokens=2)
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [0]
        theirs = indexed_kv(engine)
        assert [canonical for (_, canonical, _), _ in theirs] == [False] * 3
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [47]
        first, second = (bits_of_one(engine, request) for request in half_each())
        assert (first[0], second[0]) == ([0], [48])
        assert [first[1], second[1]] == alone
        mine = indexed_kv(engine)
        assert sum(canonical for (_, canonical, _), _ in mine) == 3
        # Control: the same tokens have other KV in the pages that it did not start from.
        for (_, _, digest), page in theirs:
            ours = next(p for (_, c, d), p in mine if c and d == digest)
            assert page_kv(engine, page) != page_kv(engine, ours)
        # Plain ones take the canonical pages now.
        output = engine.generate([[*PROMPT, 1]], wanted)[0]
        assert tokens_cached(output) == [48]


def bits_of_one(engine, request):
    output = engine.generate([request[0]], request[1])[0]
    return tokens_cached(output), bits(output)


def test_canonical_rows_behind_others_are_not_canonical():
    """A plain request, prefilled on the fast path, decodes in canonical passes of its neighbour:
    what it computes there rests on other KV, and is of no use to a deterministic request."""
    model = model_of("shape-sensitive")
    with engine_of(model, page_size=16, verify="padded") as engine:
        plain_id = engine.add_request(PROMPT, SamplingParams(max_new_tokens=20))
        engine.step()
        engine.add_request(text(9, seed=4), greedy(25))
        done = drain(engine)
        decoded = [r for r in engine.records if r.sequences.get("decode") == 2 and r.canonical]
        assert len(decoded) > 16
        prompt = PROMPT + done[plain_id].completions[0].token_ids
        assert tokens_cached(engine.generate([PROMPT], greedy(1))[0]) == [0]
        # Control: the page behind PROMPT is there, for plain requests.
        assert sum(canonical for _, canonical, _ in engine.admission.prefix.pages) == 5
        assert len(engine.admission.prefix) == 9
        found = bits_of_one(engine, (prompt, greedy(9)))
    with engine_of(model, prefix_cache=False) as engine:
        assert found == ([48], bits_of_one(engine, (prompt, greedy(9)))[1])


@pytest.mark.parametrize("length", [47, 48, 49])
def test_a_prompt_that_is_there_already(length):
    """Also where it ends with its last page: only its last row runs, and writes nothing."""
    request = (text(length, seed=1), greedy(12, num_return_sequences=2, temperature=1.0, seed=1))
    with engine_of(model_of("shape-sensitive"), page_size=16, prefix_cache=False) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model_of("shape-sensitive"), page_size=16) as engine:
        expected = min(length // 16 * 16, length - 1)
        for cached in ([0, length - 1], [expected, length - 1], [expected, length - 1]):
            assert bits_of_one(engine, request) == (cached, alone)
            before = indexed_kv(engine)
        assert len(before) >= 3 and indexed_kv(engine) == before


class Breaks:
    """A logits processor that raises at its tenth call."""

    stateless = False
    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 10:
            raise RuntimeError("tenth")
        return scores


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_what_a_failed_request_had_indexed_is_dropped(deterministic):
    """Also its earlier turns: nothing that it computed or started from is trusted."""
    wanted = replace(greedy(20), deterministic=deterministic)
    with engine_of(tiny(), page_size=4) as engine:
        engine.generate([PROMPT], greedy(1))
        (other,) = engine.generate([text(16, seed=3)], greedy(1))
        before = len(engine.admission.prefix)
        request_id = engine.add_request(PROMPT, replace(wanted, logits_processors=[Breaks()]))
        while len(engine.admission.prefix) < before + 2:
            engine.step()
        done = drain(engine)[request_id].completions[0]
        assert "tenth" in done.error and len(done.token_ids) == 9
        # Control: the pages of the other request are still there.
        assert len(engine.admission.prefix) == 4
        (output,) = engine.generate([text(16, seed=3)], greedy(1))
        assert tokens_cached(output) == [15] and bits(output) == bits(other)
        assert tokens_cached(engine.generate([PROMPT], greedy(1))[0]) == [0]
        assert whole(engine)


def test_what_plain_requests_left_is_forgotten_canonical_or_not():
    """Which of their rows ran in canonical passes is chance, that later bits must not hang on."""
    plain, exact = SamplingParams(max_new_tokens=2), greedy(2)
    prompts = [text(40, seed=1), text(40, seed=2)]
    with engine_of(model_of("as is"), page_size=8, verify="padded") as engine:
        engine.generate(prompts, [plain, exact])
        kept = [canonical for _, canonical, _ in engine.admission.prefix.pages]
        assert len(kept) == 10 and all(kept), "control: those of the plain one are canonical"
        engine.forget_plain()
        outputs = engine.generate(prompts, [plain, exact])
        cached = [output.completions[0].stats.cached_prompt_tokens for output in outputs]
        assert cached == [0, 39]
