"""Which row counts passes have, what they cost, and the way and window that cost least."""

import random

import pytest

from tinyspec import EngineConfig
from tinyspec.scheduler.buckets import LADDER, MOST_DRAFTS, Buckets, estimate, ladder


def test_the_ladder():
    def of(device, **settings):
        return ladder(
            EngineConfig(**settings).resolve(device_type=device, model_positions=99), device
        )

    assert of("cpu") == list(LADDER["cpu"]) and of("cuda") == list(LADDER["cuda"])
    assert of("xpu") == of("cuda")
    assert of("cpu", max_rows=40, reference_rows=12) == [2, 4, 8, 12, 16, 24, 32, 40]
    assert of("cpu", max_rows=4, reference_rows=4, max_sequences=4) == [2, 4]
    assert of("cpu", max_sequences=1500)[-2:] == [1024, 1500], "all decode at once"


def test_costs_between_those_that_are_known():
    cost = {4: 1.0, 8: 3.0, 32: 6.0}
    assert [estimate(cost, rows) for rows in (4, 6, 8, 20, 32)] == [1.0, 2.0, 3.0, 4.5, 6.0]
    # Half of it grows with the rows, below the smallest and above the largest.
    assert [estimate(cost, rows) for rows in (2, 64)] == [0.75, 9.0]
    assert estimate({}, 7) == 7.0


def test_costs_are_those_of_passes(passes_count):
    buckets = Buckets(64, 8)
    buckets.learn([8, 16], {8: 1.0, 16: 9.0}, own_way=[16])
    assert buckets.canonical_seconds(16) == 9.0
    buckets.ran(16, True, 2.0)
    buckets.ran(16, False, 1.5)
    assert (buckets.canonical_seconds(16), buckets.seconds(16)) == (2.0, 1.5)
    for seconds in (5.0, 0.5, 0.6):  # the first one compiles
        buckets.ran(8, False, seconds)
    # In fast mode as in a canonical pass.
    assert buckets.canonical_seconds(8) == buckets.seconds(8) == 0.5
    buckets.ran(8, True, 40.0)
    assert 0.5 < buckets.seconds(8) < 0.6, "a busy moment"
    for _ in range(100):
        buckets.ran(8, True, 4.0)
    assert buckets.seconds(8) == pytest.approx(4.0, rel=0.01), "longer contexts"


def learnt(canonical, seconds, own_way=()):
    buckets = Buckets(64, 8)
    buckets.learn(canonical, {rows: seconds(rows) for rows in buckets.sizes}, own_way)
    for rows in own_way:
        buckets._costs[False][rows] = seconds(rows)
    return buckets


def test_padding_costs_the_next_canonical_bucket():
    """A pass of 1 row for 1, of 8 for 1.4: drafting w costs (w + what a verify costs) / (w + 1)."""
    cost = {1: 1.0, 8: 1.4}
    buckets = learnt([8], lambda rows: cost.get(rows, 9.0))
    assert buckets.window(1, 1, 7, 0.999) == 7, "(7 * 1 + 1.4) / 8 = 1.05 < 1.4"
    assert buckets.window(1, 1, 0, 0.999) == 0, "no draft at all: the verify is the padded pass"
    assert buckets.window(1, 1, 1, 0.999, free=False) == 1, "(1 + 1.4) / 2 = 1.2 < 1.4"
    assert buckets.window(1, 1, 16, 0.999) == 7, "17 rows take three passes: 20.2 / 17 = 1.19"
    assert buckets.window(1, 1, 16, 0.2) == 0, "where drafts are not accepted"
    assert buckets.window(1, 1, 16, 0.75) == 1, "some of them: (1 + 1.4) / 1.75 = 1.37"


def test_padding_wins_where_buckets_cost_alike():
    buckets = learnt([8], lambda rows: 1.0 + rows / 1000)
    assert not buckets.window(1, 1, 16, 0.99) and not buckets.window(4, 4, 16, 0.99)


def test_a_canonical_bucket_needs_no_draft():
    noisy = {4: 5.0, 8: 1.0}
    cost = noisy.get
    assert learnt([4, 8], lambda rows: cost(rows, 1.0)).window(3, 3, 16, 0.99) == 0
    # In which canonical passes run another way, it is like any other.
    assert learnt([4, 8], lambda rows: cost(rows, 1.0), [4]).window(3, 3, 16, 0.99) >= 0


def test_rows_that_fit_no_canonical_bucket_are_drafted():
    assert learnt([8], lambda rows: 1.0).window(9, 9, 16, 0.99) > 0


def test_plain_rows_ride_along():
    """Thirty plain rows in a fast pass of 32, or in a canonical one of 64 at twice the cost."""
    buckets = learnt([8, 64], lambda rows: float(rows))
    assert buckets.window(31, 1, 16, 0.999) > 0
    # 527 rows to verify: (16 * 32 + 9 * 64) / 17 = 64.
    assert buckets.window(31, 31, 16, 0.99, free=False) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_against_a_count_of_passes(seed):
    """Seconds a token of every way, by running it a thousand times over with drafts that are
    accepted by chance."""
    rng = random.Random(seed)
    cost = {rows: rng.uniform(1, 3) + rows / 8 for rows in Buckets(64, 8).sizes}
    canonical = sorted({8, *rng.sample(sorted(cost), rng.randint(0, 4))})
    buckets = learnt(canonical, cost.__getitem__)
    rows, most = rng.randint(1, canonical[-1]), rng.randint(1, MOST_DRAFTS)
    drafting, accepted = rng.randint(1, rows), rng.uniform(0.5, 0.99)

    def fit(count, sizes):
        return min(size for size in sizes if size >= count)

    def seconds(window):
        if not window:
            return cost[fit(rows, canonical)] / rows
        time = tokens = 0.0
        for _ in range(1000):
            time += window * cost[fit(rows, cost)]
            tokens += window * (rows - drafting)
            left = drafting * (window + 1) + rows - drafting
            while left > 0:
                time += cost[fit(min(left, canonical[-1]), canonical)]
                tokens += rows - drafting
                left -= canonical[-1]
            for _ in range(drafting):
                drafts = 0
                while drafts < window and rng.random() < accepted:
                    drafts += 1
                tokens += drafts + 1
        return time / tokens

    found = buckets.window(rows, drafting, most, accepted)
    if fit(rows, cost) in canonical:
        assert found == 0
    else:
        assert seconds(found) <= 1.06 * min(map(seconds, range(most + 1)))


def test_what_a_further_bucket_would_have_saved():
    buckets = learnt([8], lambda rows: 1.0 + rows / 8)
    buckets.window(3, 3, 16, 0.9)
    assert {*buckets.gains([1, 2, 4, 16], 16, 0.9)} >= {4}
    assert buckets.gains([4], 16, 0.9) == {}, "of one pass once"
    buckets.cheapest(1, 40, 0, 0.5)  # prompts of 40 tokens
    gains = buckets.gains([2, 4, 32, 64], 16, 0.9)
    assert {*gains} == {32, 64}
