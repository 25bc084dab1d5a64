"""Which row counts passes have, and the way and window that cost least."""

import random

import pytest

from tinyspec import EngineConfig
from tinyspec.scheduler.buckets import LADDER, MOST_DRAFTS, Buckets, ladder, row_counts


def test_the_ladder(whole_ladder):
    def of(device, **settings):
        return ladder(
            EngineConfig(**settings).resolve(device_type=device, model_positions=99), device
        )

    assert of("cpu") == list(LADDER["cpu"]) and of("cuda") == list(LADDER["cuda"])
    assert of("xpu") == of("cuda")
    assert of("cpu", max_rows=40, reference_rows=13) == [2, 4, 8, 12, 13, 16, 20, 24, 28, 32, 40]
    assert of("cpu", max_rows=4, reference_rows=4, max_sequences=4) == [2, 4]
    assert of("cpu", max_sequences=1400)[-3:] == [1400, 1536, 2048], "all decode at once"


def test_plain_passes_have_the_ladder_s_row_counts_on_a_cpu(whole_ladder):
    """And one row; elsewhere all that are near."""
    sizes = {"cpu": LADDER["cpu"], "cuda": LADDER["cuda"]}
    for device, own in sizes.items():
        buckets = Buckets(2048, 32, own, one_list=device == "cpu")
        found = {buckets.fit(rows) for rows in range(1, 2049)}
        assert found == {1, 32, *own} | set(() if device == "cpu" else row_counts(2048))
    assert Buckets(4096, 32, LADDER["cpu"], one_list=True).largest == 4096


def test_long_prompts_fill_plain_passes(whole_ladder):
    """Beyond the row counts that are near each other a smaller bucket is filled rather than a large
    one left empty, unless it does not hold the sequences that decode."""
    buckets = Buckets(2048, 32, LADDER["cpu"], one_list=True)
    assert [buckets.room(1, rows) for rows in (5, 530, 1000, 3000)] == [5, 512, 1000, 2048]
    assert buckets.room(513, 530) == 530
    for rows in range(1, 2049):
        room = buckets.room(1, rows)
        assert room <= rows and 4 * room >= 2 * rows
        assert room <= 128 or 4 * (buckets.fit(room) - room) <= buckets.fit(room)


def learnt(canonical, seconds, apart=()):
    buckets = Buckets(64, 8)
    buckets.learn(canonical, {}, apart)
    for rows in buckets.sizes:
        for kind in (False, True):
            buckets.costs.add(rows, kind, seconds(rows))
    return buckets


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_against_a_count_of_passes(seed):
    """Seconds a token of every way, by running it a thousand times over with drafts that are
    accepted by chance."""
    rng = random.Random(seed)
    sizes = Buckets(64, 8).sizes
    fixed, each = rng.uniform(1, 30), rng.uniform(0.02, 0.3)
    cost = {rows: fixed + each * rows for rows in sizes}
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


def test_canonical_passes_of_another_way_are_weighed():
    """A bucket whose canonical passes are apart is no shortcut: its own cost counts."""
    for own in (1.1, 4.5):
        buckets = Buckets(64, 8)
        buckets.learn([4, 8, 64], apart=[4])
        for rows, seconds in ((4, 1.0), (8, 5.0), (64, 6.0)):
            buckets.costs.add(rows, False, seconds)
        buckets.costs.add(4, True, own)
        assert buckets.seconds(4) == 1.0 and buckets.seconds(4, True) == own
        assert (buckets.window(4, 4, MOST_DRAFTS, 0.99) == 0) == (own == 1.1)
        assert buckets.window(8, 8, MOST_DRAFTS, 0.99) == 0, "nothing to verify"


def test_rows_that_are_left_over_cost_another_pass():
    """Of buckets that cost as much a row the one is taken that leaves none over; a larger one that
    would be empty by a third is not, unless all rows must be held."""
    buckets = Buckets(2048, 32, [32, 512, 1024])
    buckets.learn(buckets.sizes, {32: 20.0, 512: 300.0, 1024: 600.0})
    assert buckets.cheapest(8, 1024) == 1024
    assert buckets.cheapest(8, 700) == 512 and buckets.cheapest(600, 700) == 1024


def test_the_bucket_that_a_pass_would_use():
    """Were it proven: that of its rows, of their verify where drafts are cheaper, or of prompts;
    and what that would save."""
    buckets = Buckets(1024, 32, (2, 4, 16, 32, 64, 1024))
    buckets.learn([32], {rows: 1 + rows / 32 for rows in buckets.sizes})
    assert buckets.would_use(0.9) is None, "no pass with deterministic requests"
    assert buckets.window(10, 0, 1, 0.9) == 0
    assert buckets.would_use(0.9) == (16, pytest.approx(0.5))
    assert buckets.would_use(0.9) is None, "asked once"
    assert buckets.window(32, 0, 1, 0.9) == 0 and buckets.would_use(0.9) == (32, 0)
    assert buckets.cheapest(1, 700) == 32
    size, saved = buckets.would_use(0.9)
    assert size == 1024 and saved == pytest.approx((22 * 2 / 700 - 33 / 700) * 32)
    for rows in (1, 2):
        buckets.costs.add(rows, False, 0.01)
    assert buckets.window(1, 1, 8, 0.99) > 0 and buckets.would_use(0.99)[0] in (2, 4, 16)
