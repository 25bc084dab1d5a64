"""What must hold of an engine's pages after every step, however it is used."""

from collections import Counter
from hashlib import blake2b

import torch

from tinyspec import Engine
from tinyspec.runner.kv_cache import KVCache
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.prefix_cache import PrefixCache


def unowned(pool: PagePool) -> list[int]:
    """Every page that nobody owns, as often as the pool has it: free, put aside or idle."""
    aside = [page for run in pool.reserved.values() for page in run]
    return [*pool.free_pages, *aside, *pool.idle]


def check_residents(engine: Engine) -> None:
    """Owners, free list, idle pages and index agree; nobody may write where somebody reads."""
    scheduler, pool = engine.admission, engine.pool
    owners: Counter[int] = Counter()
    for sequence in scheduler.running:
        assert len(set(sequence.pages)) == len(sequence.pages)
        owners.update(sequence.pages)
    assert all(not sequence.pages for sequence in scheduler.waiting)
    assert [pool.owners(page) for page in range(pool.num_pages)] == [
        owners[page] for page in range(pool.num_pages)
    ]
    places = [*unowned(pool), *owners]
    assert sorted(places) == list(range(pool.num_pages)), "a page is in two places or in none"
    if scheduler.prefix is not None:
        check_index(scheduler.prefix)
    for sequence in scheduler.running:
        first = max(sequence.computed, sequence.frozen) // pool.page_size
        for page in sequence.pages[first:]:
            assert pool.owners(page) == 1, "a page with two owners may be written to"
            assert page not in pool.cached, "an indexed page may be written to"
        assert len(sequence.pages) <= pool.pages_for(len(sequence.tokens) + len(sequence.drafts))


def check_index(prefix: PrefixCache) -> None:
    """Every indexed page has one key, and the pool keeps those pages and no other."""
    assert {page: key for key, page in prefix.pages.items()} == prefix.keys
    assert len(prefix.pages) == len(prefix.keys)
    assert set(prefix.keys) == prefix.pool.cached
    assert set(prefix.pool.idle) <= prefix.pool.cached


def read_pages(
    cache: KVCache, layer: int, pages: list[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``tokens`` keys and values of a sequence, [tokens, num_kv_heads, head_dim]."""
    k, v = cache.k[layer][pages], cache.v[layer][pages]
    return k.flatten(0, 1)[:tokens], v.flatten(0, 1)[:tokens]


def page_kv(engine: Engine, page: int) -> bytes:
    """Digest of all bits of one page, k and v of every layer."""
    digest = blake2b(digest_size=16)
    cache = engine.runner.cache
    for pool in (*cache.k, *cache.v):
        digest.update(pool[page].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def indexed_kv(engine: Engine) -> dict[tuple, bytes]:
    """Digest of every page that the prefix cache knows, by key and page."""
    prefix = engine.admission.prefix
    if prefix is None or engine.runner._cache is None:
        return {}
    return {(key, page): page_kv(engine, page) for key, page in prefix.pages.items()}
