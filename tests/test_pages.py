"""The page pool against a simple model: owners, order and forks on random traces; nothing lost."""

import random

import pytest

from tinyspec.pages import PagePool


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
        pool.grow(pages, wanted)
        assert pages == before + free[:need]
        tables[next(n for n, t in enumerate(tables) if t[0] is pages)] = (pages, wanted)


def truncate(pool, rng, tables):
    place = rng.randrange(len(tables))
    pages, tokens = tables[place]
    fewer = rng.randint(0, tokens)
    surplus = pages[pool.pages_for(fewer) :]
    assert pool.truncate(pages, fewer) == len(surplus)
    assert pool.truncate(pages, fewer) == 0
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
    assert forked[full:] == (free[:1] if rest else [])
    assert copy == ((pages[full], free[0]) if rest else None)
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


def test_lowest_free_page_first():
    pool = PagePool(6, 1)
    tables: list[list[int]] = [[] for _ in range(3)]
    for table in tables:
        pool.grow(table, 2)
    pool.free(tables[2])
    pool.free(tables[0])
    again: list[int] = []
    pool.grow(again, 3)
    assert again == [0, 1, 4]
    assert pool.take_fresh() == [0, 1, 2, 3, 4, 5, 0, 1, 4]
    assert pool.take_fresh() == []


def test_pages_for():
    pool = PagePool(1, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
