"""The page pool against a simple model: owners, runs and forks on random traces; nothing lost."""

import random

import pytest

from tests.support.pages import unowned
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.scheduler.page_pool import LONGEST_RUN, PagePool
from tinyspec.scheduler.request import Sequence


def check(pool, tables):
    """``tables``: [(pages, tokens)] of everyone alive. Every claim of the pool about them holds."""
    owners = [0] * pool.num_pages
    for pages, tokens in tables:
        assert len(pages) == pool.pages_for(tokens)
        assert len(set(pages)) == len(pages)
        for page in pages:
            owners[page] += 1
    assert [pool.owners(page) for page in range(pool.num_pages)] == owners
    held = sum(count > 0 for count in owners)
    assert (pool.num_held, pool.num_free) == (held, pool.num_pages - held)
    assert sorted(unowned(pool)) == free_pages(pool)
    for page, count in enumerate(owners):
        places = {pages.index(page) for pages, _ in tables if page in pages}
        assert len(places) == (count > 0), "a shared page stands at one place of its sequences"


def free_pages(pool):
    return [page for page in range(pool.num_pages) if pool.owners(page) == 0]


def grow(pool, rng, tables):
    pages, tokens = rng.choice(tables)
    wanted = tokens + rng.randint(0, 3 * pool.page_size)
    need, free = pool.pages_for(wanted) - len(pages), free_pages(pool)
    assert pool.can_grow(pages, wanted) == (need <= len(free))
    if need <= len(free):
        before = list(pages)
        pool.grow(pages, wanted, rng.randint(0, 2 * wanted))
        assert pages[: len(before)] == before
        more = pages[len(before) :]
        assert len(set(more)) == need and set(more) <= set(free)
        tables[next(n for n, t in enumerate(tables) if t[0] is pages)] = (pages, wanted)


def truncate(pool, rng, tables):
    place = rng.randrange(len(tables))
    pages, tokens = tables[place]
    fewer = rng.randint(0, tokens)
    surplus = pages[pool.pages_for(fewer) :]
    whole = list(pages)
    for _ in range(2):
        pool.truncate(pages, fewer)
        assert [*pages, *surplus] == whole
    tables[place] = (pages, fewer)


def fork(pool, rng, tables):
    pages, tokens = rng.choice(tables)
    at = rng.randint(0, tokens)
    full, rest = divmod(at, pool.page_size)
    free = free_pages(pool)
    assert pool.can_fork(at) == (rest == 0 or len(free) > 0)
    if not pool.can_fork(at):
        return
    forked, copy = pool.fork(pages, at)
    assert forked is not pages
    assert forked[:full] == pages[:full]
    assert len(forked[full:]) == (rest > 0) and set(forked[full:]) <= set(free)
    assert copy == ((pages[full], forked[full]) if rest else None)
    tables.append((forked, at))


def drop(pool, rng, tables):
    pages, _ = tables.pop(rng.randrange(len(tables)))
    pool.free(pages)
    assert pages == []


@pytest.mark.parametrize("seed", range(40))
def test_random_traces(seed):
    rng = random.Random(seed)
    pool = PagePool(rng.randint(1, 24), rng.choice((1, 2, 3, 8)))
    tables, highest = [], 0
    for _ in range(150):
        if not tables or rng.random() < 0.15:
            tables.append(([], 0))
        rng.choice((grow, grow, grow, truncate, fork, drop))(pool, rng, tables)
        check(pool, tables)
        highest = max([highest, *(page + 1 for pages, _ in tables for page in pages)])
        assert set(pool.take_fresh()) <= set(range(highest))
    for pages, _ in tables:
        pool.free(pages)
    check(pool, [])
    assert pool.num_free == pool.num_pages


def test_traces_reach_every_case():
    """Control: what the traces must meet does happen in them."""
    pool = PagePool(3, 4)
    leader: list[int] = []
    pool.grow(leader, 9)
    assert not pool.can_grow([], 1) and not pool.can_fork(9) and pool.can_fork(8)
    follower, copy = pool.fork(leader, 8)
    assert copy is None and [pool.owners(page) for page in leader] == [2, 2, 1]
    pool.free(leader)
    assert pool.num_held == 2 and follower == [0, 1]
    with pytest.raises(AssertionError):
        pool.grow(follower, 13)


def test_pages_lie_in_runs():
    """As long as a sequence may become, the lowest first; what is given back serves again."""
    pool = PagePool(12, 1)
    tables: list[list[int]] = [[] for _ in range(3)]
    for tokens in (1, 2, 4):
        for table in tables:
            pool.grow(table, tokens, most=4)
    assert tables == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    pool.free(tables[2])
    pool.truncate(tables[0], 1)
    again: list[int] = []
    pool.grow(again, 1, most=4)
    pool.grow(tables[0], 2)
    pool.grow(tables[0], 4, most=4)
    pool.grow(again, 4)
    assert (tables[0], again) == ([0, 1, 2, 3], [8, 9, 10, 11])


def test_without_knowing_more_the_lowest_free_page():
    """Control: pages of sequences that grow in turns lie in turns."""
    pool = PagePool(6, 1)
    tables: list[list[int]] = [[] for _ in range(3)]
    for tokens in (1, 2):
        for table in tables:
            pool.grow(table, tokens)
    assert tables == [[0, 3], [1, 4], [2, 5]]
    pool.free(tables[2])
    pool.free(tables[0])
    again: list[int] = []
    pool.grow(again, 3)
    assert again == [0, 2, 3]
    assert pool.take_fresh() == [0, 1, 2, 3, 4, 5, 0, 2, 3]
    assert pool.take_fresh() == []


def test_a_page_put_aside_is_free():
    """Others get it before anything is evicted, and its sequence goes on elsewhere."""
    pool = PagePool(6, 1)
    kept, first, second = [], [], []
    pool.grow(kept, 1)
    pool.keep(0)
    pool.free(kept)
    pool.grow(first, 1, most=4)
    assert (pool.num_held, pool.num_free) == (1, 5)
    pool.grow(second, 4)
    assert (first, second) == ([1], [5, 3, 4, 2])
    evicted = []
    pool.on_evict = evicted.append
    pool.grow(first, 2)
    assert (first, evicted) == ([1, 0], [0])


def test_a_shared_last_page_has_one_run_behind_it():
    pool = PagePool(8, 1)
    leader: list[int] = []
    pool.grow(leader, 2, most=4)
    follower, _ = pool.fork(leader, 2)
    pool.grow(follower, 3, most=4)
    pool.grow(leader, 4, most=4)
    pool.grow(follower, 4, most=4)
    assert (leader, follower) == ([0, 1, 4, 5], [0, 1, 2, 3])


def test_runs_are_bounded():
    """However much a sequence may want, and however free pages lie."""
    pool = PagePool(3 * LONGEST_RUN, 1)
    pages: list[int] = []
    pool.grow(pages, 1, most=1 << 30)
    assert pool.reserved == {0: LONGEST_RUN - 1}
    scattered = PagePool(4 * LONGEST_RUN, 1)
    everything: list[int] = []
    scattered.grow(everything, scattered.num_pages)
    for page in everything[: 2 * LONGEST_RUN : 2]:
        scattered.free([page])
    # A run of three lies behind more than are looked at.
    scattered.free(everything[-3:])
    found: list[int] = []
    scattered.grow(found, 1, most=LONGEST_RUN)
    assert found == [0] and not scattered.reserved
    scattered.grow(found, 2, most=4)
    assert found == [0, 4 * LONGEST_RUN - 3]


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
            for sequence in engine.admission.running:
                first = sequence.pages[0]
                runs.add(sequence.pages == list(range(first, first + len(sequence.pages))))
    assert runs == ({True} if known else {True, False})


def test_pages_for():
    pool = PagePool(1, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
