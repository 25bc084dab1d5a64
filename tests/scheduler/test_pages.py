"""Where pages lie. What they hold: tests/scheduler/test_prefix_cache.py; that none is lost: the
random traces of tests/scheduler/test_scheduler.py and the state machine of the engine."""

import pytest

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.scheduler.page_pool import LONGEST_RUN, PagePool
from tinyspec.scheduler.prefix_cache import PrefixCache
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.sequence_table import SequenceTable


def test_nothing_matches_across_a_clear():
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    sequence = Request("r", [1, 2, 3, 4], SamplingParams(), 0).sequences[0]
    sequence.enter(SequenceTable(64), 0)
    pool.grow(sequence.pages, 4)
    sequence.computed = 4
    cache.insert(sequence)
    assert cache.match(sequence) == (sequence.pages, 0)
    cache.clear()
    assert cache.match(sequence) == ([], 0)
    # Computed before, finished after: what a running sequence still adds is under the new version.
    assert len(cache) == 0


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


def test_runs_lie_behind_many_gaps():
    """Where single pages are free among those that are held, a search would look at them all."""
    gaps = 2 * LONGEST_RUN
    pool = PagePool(2 * gaps + 5, 1)
    kept: list[int] = []
    pool.grow(kept, 2 * gaps)
    for page in kept[::2]:
        pool.free([page])
    tables: list[list[int]] = [[] for _ in range(4)]
    for table in tables:
        pool.grow(table, 2, most=2)
    end = 2 * gaps
    assert tables == [[end, end + 1], [end + 2, end + 3], [0, 2], [4, 6]]


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
