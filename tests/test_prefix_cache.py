"""The prefix cache: the index against a simple model, and what an engine may start from.

Host tests run random traces of PrefixCache and PagePool beside a dictionary of token lists; engine
tests compare bits with the cache on and off.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    DTYPES,
    KINDS,
    bits_of,
    drain,
    engine_of,
    greedy,
    model_of,
    one_by_one,
    run,
    text,
    whole,
)
from tests.support.mixes import bits, crowd, plain
from tests.support.pages import check_index, check_residents, indexed_kv, page_kv
from tests.support.tiny import tiny
from tinyspec import SamplingParams
from tinyspec.pages import PagePool
from tinyspec.prefix_cache import PrefixCache
from tinyspec.request import Request

PROMPT = text(48, seed=1)


class Trace:
    """PrefixCache and PagePool driven at random, beside what they should know.

    known: (canonical, tokens up to a page's end) -> page. alive: sequences that own pages.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.pool = PagePool(self.rng.randint(3, 30), self.rng.choice((1, 2, 4)))
        self.cache = PrefixCache(self.pool)
        forget, self.pool.on_evict = self.pool.on_evict, self.evicted
        self.forget = forget
        self.known = {}
        self.alive = []
        self.idle_since = {}
        self.clock = 0
        self.seen = dict.fromkeys(("hits", "mixed", "evictions", "forks", "refused"), 0)

    def evicted(self, page):
        """The pool may take a page only if nobody owns it, nothing is free, and none waits longer."""
        assert self.pool.owners(page) == 0 and not self.pool._free
        assert self.idle_since[page] == min(self.idle_since.values())
        self.forget(page)
        self.lose(page)
        self.seen["evictions"] += 1

    def lose(self, page):
        self.known = {key: p for key, p in self.known.items() if p != page}
        self.idle_since.pop(page, None)

    def sequence(self, tokens, deterministic):
        params = SamplingParams(deterministic=deterministic)
        return Request("r", tokens, params, 0).sequences[0]

    def expected(self, tokens, deterministic):
        """The longest run of known pages from the first token on, canonical ones preferred."""
        size, pages, kinds = self.pool.page_size, [], []
        for end in range(size, len(tokens) + 1, size):
            kind = next(
                (
                    kind
                    for kind in ((True,) if deterministic else (True, False))
                    if (kind, tuple(tokens[:end])) in self.known
                ),
                None,
            )
            if kind is None:
                break
            pages.append(self.known[kind, tuple(tokens[:end])])
            kinds.append(kind)
        return pages, (kinds + [False]).index(False)

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
        self.pool.grow(sequence.pages, len(tokens))
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
            sequence.tokens += [self.rng.randrange(2) for _ in range(more)]
            self.pool.grow(sequence.pages, len(sequence.tokens))
            self.compute(sequence)

    def fork(self):
        leader = self.rng.choice(self.alive)
        if not self.pool.can_fork(leader.computed):
            return
        self.seen["forks"] += 1
        sibling = self.sequence(list(leader.tokens), leader.deterministic)
        sibling.pages, _ = self.pool.fork(leader.pages, leader.computed)
        sibling.canonical = leader.canonical
        self.alive.append(sibling)
        self.compute(sibling)

    def finish(self):
        self.leave(self.alive.pop(self.rng.randrange(len(self.alive))))

    def leave(self, sequence):
        """Pages go idle from the last to the first, so that the first are evicted last."""
        for page in reversed(sequence.pages):
            if self.pool.owners(page) == 1 and page in self.known.values():
                self.idle_since[page] = self.clock = self.clock + 1
        self.pool.free(sequence.pages)

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
        assert sorted([*self.pool._free, *self.pool._idle, *set(owned)]) == list(
            range(self.pool.num_pages)
        )
        assert len(self.cache) == len(self.known)
        assert set(self.cache._keys) == set(self.known.values())
        assert set(self.pool._idle) == set(self.idle_since)

    def go(self, turns):
        for _ in range(turns):
            moves = [self.start, self.clear]
            if self.alive:
                moves += [self.start, self.extend, self.extend, self.fork, self.finish]
                moves += [self.finish, self.distrust]
            self.rng.choice(moves)()
            self.check()
        for sequence in self.alive:
            self.leave(sequence)
        assert self.pool.num_free == self.pool.num_pages
        return self.seen


@pytest.mark.parametrize("block", range(6))
def test_random_traces(block):
    seen = [Trace(seed).go(200) for seed in range(block * 8, block * 8 + 8)]
    # Control: the traces met everything that could have gone wrong.
    for event in seen[0]:
        assert sum(one[event] for one in seen) >= 5, event


def test_nothing_matches_across_a_clear():
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    sequence = Request("r", [1, 2, 3, 4], SamplingParams(), 0).sequences[0]
    pool.grow(sequence.pages, 4)
    sequence.computed = 4
    cache.insert(sequence)
    assert cache.match(sequence) == (sequence.pages, 0)
    cache.clear()
    assert cache.match(sequence) == ([], 0)
    # Computed before, finished after: what a running sequence still adds is under the new version.
    assert len(cache) == 0


def tokens_cached(output):
    return [completion.stats.cached_prompt_tokens for completion in output.completions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chat_reuses_its_earlier_turns(dtype, kind):
    """Outputs included; page_size 8, so all but the last 0 to 7 known tokens are reused."""
    found = {}
    for cache in (True, False):
        with engine_of(model_of(kind, dtype), page_size=8, prefix_cache=cache) as engine:
            history, found[cache] = text(21, seed=9), []
            for turn in range(4):
                # The newest token is committed, its KV not computed before the next turn.
                known = max(0, len(history) - 1) if turn else 0
                history += text(6, seed=turn)
                output = engine.generate([history], greedy(13, temperature=0.8, seed=turn))[0]
                assert tokens_cached(output) == [known // 8 * 8 if cache else 0]
                history += output.completions[0].token_ids
                found[cache].append(bits(output))
            assert whole(engine)
    assert found[True] == found[False]


def half_each(count=6):
    """Requests that share PROMPT, deterministic ones with bits to compare."""
    return [(PROMPT + text(5, seed=n), greedy(10, temperature=0.5, seed=n)) for n in range(count)]


def test_a_deterministic_request_starts_from_canonical_pages_only():
    """Plain ones serve plain ones; the deterministic computes its own, which serve everyone."""
    model = model_of("shape-sensitive")
    with engine_of(model, prefix_cache=False) as engine:
        alone = one_by_one(engine, half_each(2))
    with engine_of(model, page_size=16) as engine:
        wanted = SamplingParams(max_new_tokens=2)
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [0]
        theirs = indexed_kv(engine)
        assert [canonical for (_, canonical, _), _ in theirs] == [False] * 3
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [47]
        first, second = (bits_of_one(engine, request) for request in half_each(2))
        assert (first[0], second[0]) == ([0], [48])
        assert [first[1], second[1]] == alone
        mine = indexed_kv(engine)
        assert sum(canonical for (_, canonical, _), _ in mine) == 3
        # Control: the same tokens have other KV in the pages that it did not start from.
        for (_, _, digest), page in theirs:
            ours = next(p for (_, c, d), p in mine if c and d == digest)
            assert page_kv(engine, page) != page_kv(engine, ours)
        # Plain ones take the canonical pages now.
        output = engine.generate([PROMPT + [1]], wanted)[0]
        assert tokens_cached(output) == [48]


def bits_of_one(engine, request):
    output = engine.generate([request[0]], request[1])[0]
    return tokens_cached(output), bits(output)


def test_control_pages_of_another_kind_would_change_bits():
    """With a plain request's pages indexed as canonical, a deterministic one has other bits."""
    model = model_of("shape-sensitive")
    request = (PROMPT + [7], greedy(10))
    with engine_of(model, page_size=16) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model, page_size=16) as engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=2))
        prefix = engine._scheduler.prefix
        forged = {(v, True, digest): page for (v, _, digest), page in prefix._pages.items()}
        prefix._pages, prefix._keys = forged, {page: key for key, page in forged.items()}
        cached, found = bits_of_one(engine, request)
    assert cached == [48]
    assert found != alone


@pytest.mark.parametrize("length", [47, 48, 49])
def test_a_prompt_that_is_there_already(length):
    """Also where it ends with its last page: only its last row runs, and writes nothing."""
    request = (text(length, seed=1), greedy(12, num_return_sequences=2, temperature=1.0, seed=1))
    with engine_of(model_of("shape-sensitive"), page_size=16, prefix_cache=False) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model_of("shape-sensitive"), page_size=16) as engine:
        expected = min(length // 16 * 16, length - 1)
        for cached in ([0, length], [expected, length], [expected, length]):
            assert bits_of_one(engine, request) == (cached, alone)
            before = indexed_kv(engine)
        assert len(before) >= 3 and indexed_kv(engine) == before


def test_indexed_pages_are_never_written():
    """After every step of mixed traffic every page still indexed holds the bits it had."""
    rng = random.Random(6)
    full = (PROMPT, greedy(9))  # three whole pages of 16
    compared = 0
    with engine_of(tiny(), page_size=16, num_pages=24, draft_window=4) as engine:
        before = {}
        for others in (crowd(rng, 12), crowd(rng, 12), crowd(rng, 12)):
            for prompt, params in (full, *others, (PROMPT + [1, 2], greedy(5)), full):
                engine.add_request(prompt, params)
            while engine.has_unfinished():
                engine.step()
                check_residents(engine)
                now = indexed_kv(engine)
                for key in now.keys() & before.keys():
                    assert now[key] == before[key]
                    compared += 1
                before = now
        assert engine.stats().preemptions > 0
        # Control: the digest sees one element.
        with torch.inference_mode():
            engine._runner.cache.v[1][next(iter(before))[1], 3, 0, 0] += 1
        assert indexed_kv(engine) != before
    assert compared > 1000


@pytest.mark.parametrize("num_pages", [8, 12, 30])
def test_a_small_pool_evicts(num_pages):
    """Idle pages give way to whoever runs, those that were used last go last."""
    requests = [(text(40, seed=n % 5), greedy(15)) for n in range(15)]
    with engine_of(tiny(), page_size=8, prefix_cache=False) as engine:
        alone = one_by_one(engine, requests[:5]) * 3
    with engine_of(tiny(), page_size=8, num_pages=num_pages) as engine:
        found, cached = [], []
        for prompt, params in requests:
            count, own = bits_of_one(engine, (prompt, params))
            found.append(own)
            cached += count
            check_residents(engine)
            assert len(engine._scheduler.prefix) <= num_pages
        assert found == alone
        assert sum(cached) == 0 if num_pages == 8 else engine._pool.num_free == num_pages
        # The newest prompt is still there, whatever had to go for it.
        assert bits_of_one(engine, requests[-1])[0] == [39]
    with engine_of(tiny(), page_size=8, num_pages=num_pages) as engine:
        assert bits_of(run(engine, requests)) == alone


def test_release_drops_it():
    with engine_of(tiny(), page_size=16) as engine:
        request = (PROMPT, greedy(5))
        first = bits_of_one(engine, request)
        assert bits_of_one(engine, request)[0] == [47]
        engine.release()
        assert len(engine._scheduler.prefix) == 0
        assert bits_of_one(engine, request) == first


def bump(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3] *= 1.5


def write_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data[3] *= 1.5


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
@pytest.mark.parametrize("write", [bump, write_data])
def test_a_weight_change_drops_it(write, deterministic):
    """Whether the engine sees it by itself or is told; nothing starts from the old weights' KV."""
    model, changed = tiny(), tiny()
    write(changed)
    wanted = greedy(8) if deterministic else plain(greedy(8))
    with engine_of(changed, page_size=16, max_rows=64) as engine:
        expected = bits_of_one(engine, (PROMPT, wanted))
    with engine_of(model, page_size=16, max_rows=64) as engine:
        before = bits_of_one(engine, (PROMPT, wanted))
        assert bits_of_one(engine, (PROMPT, wanted))[0] == [47]
        write(model)
        if write is write_data:
            engine.weights_changed()
        assert bits_of_one(engine, (PROMPT, wanted)) == expected
    assert before != expected


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_prompt_logprobs_with_a_warm_cache(deterministic):
    """The rows that are asked for run, and write nothing that others read."""
    wanted = greedy(6, prompt_logprobs=True, num_return_sequences=2, temperature=1.0, seed=2)
    wanted = wanted if deterministic else plain(wanted)
    model = model_of("shape-sensitive" if deterministic else "as is")
    with engine_of(model, page_size=8, prefix_cache=False) as engine:
        cold = engine.generate([PROMPT], wanted)[0]
    with engine_of(model, page_size=8) as engine:
        engine.generate([PROMPT], replace(wanted, prompt_logprobs=False))
        before = indexed_kv(engine)
        warm = engine.generate([PROMPT], wanted)[0]
        assert [indexed_kv(engine).get(key) for key in before] == list(before.values())
        among = run(engine, [*crowd(random.Random(2), 9), (PROMPT, wanted)])[-1]
    assert warm.prompt_logprobs[0] is None and None not in warm.prompt_logprobs[1:]
    assert tokens_cached(warm)[0] == 0
    if deterministic:
        assert warm.prompt_logprobs == cold.prompt_logprobs == among.prompt_logprobs
        assert bits(warm) == bits(cold) == bits(among)
    else:
        close = torch.tensor(warm.prompt_logprobs[1:]) - torch.tensor(cold.prompt_logprobs[1:])
        assert close.abs().max() < 1e-3


def test_failed_requests_leave_nothing_indexed():
    """Neither those whose logits were not finite nor those whose pass raised."""
    from tests.test_faults import Poison

    sound = text(44, seed=5)
    token = next(t for t in range(128) if t not in sound)
    model = tiny()
    model.model.embed_tokens = Poison(model.model.embed_tokens, token)
    bad = [*sound[:3], token, *sound[3:]]
    with engine_of(model, page_size=4, max_rows=16) as engine:
        for deterministic in (True, False):
            for copies in (1, 3):
                wanted = SamplingParams(max_new_tokens=5, deterministic=deterministic)
                outputs = engine.generate([bad] * copies, wanted)
                assert all("finite" in o.completions[0].error for o in outputs)
                assert len(engine._scheduler.prefix) == 0
                assert whole(engine)
        # Control: a sound prompt of that length is indexed.
        engine.generate([sound], SamplingParams(max_new_tokens=1))
        assert len(engine._scheduler.prefix) == 11


def test_aborted_requests_leave_sound_pages():
    """What an aborted request had computed may serve others, and has the right bits."""
    request = (PROMPT + [3], greedy(14))
    with engine_of(model_of("shape-sensitive"), page_size=8, prefix_cache=False) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model_of("shape-sensitive"), page_size=8) as engine:
        request_id = engine.add_request(PROMPT, greedy(60))
        for _ in range(9):
            engine.step()
        engine.abort(request_id)
        assert whole(engine)
        assert bits_of_one(engine, request) == ([48], alone)
        assert drain(engine) == {}
