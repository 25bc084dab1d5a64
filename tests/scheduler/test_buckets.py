"""Which row counts passes have, what they cost, and the way and window that cost least."""

import random

import pytest

from tinyspec import EngineConfig
from tinyspec.scheduler.buckets import LADDER, MOST_DRAFTS, STALE, Buckets, ladder, row_counts


def test_the_ladder(whole_ladder):
    def of(device, **settings):
        return ladder(
            EngineConfig(**settings).resolve(device_type=device, model_positions=99), device
        )

    assert of("cpu") == list(LADDER["cpu"]) and of("cuda") == list(LADDER["cuda"])
    assert of("xpu") == of("cuda")
    assert of("cpu", max_rows=40, reference_rows=12) == [2, 4, 8, 12, 16, 24, 32, 40]
    assert of("cpu", max_rows=4, reference_rows=4, max_sequences=4) == [2, 4]
    assert of("cpu", max_sequences=1500)[-3:] == [1024, 1500, 2048], "all decode at once"


def test_costs_are_those_of_passes(passes_count):
    buckets = Buckets(64, 8)
    buckets.learn([8, 16], {8: 1.0, 16: 9.0}, own_way=[16])
    assert buckets.seconds(16, True) == 9.0
    buckets.ran(16, True, 2.0)
    buckets.ran(16, False, 1.5)
    assert (buckets.seconds(16, True), buckets.seconds(16)) == (2.0, 1.5)
    for seconds in (5.0, 0.5, 0.6):  # the first one compiles
        buckets.ran(8, False, seconds)
    # In fast mode as in a canonical pass.
    assert buckets.seconds(8, True) == buckets.seconds(8) == 0.5
    buckets.ran(8, True, 40.0)
    assert 0.5 < buckets.seconds(8) < 0.6, "a busy moment"
    for _ in range(20):
        buckets.ran(8, True, 1.0)
    assert 0.7 < buckets.seconds(8) < 1, "a busy while"
    for _ in range(3):
        buckets.ran(8, True, 0.5)
    assert buckets.seconds(8) == pytest.approx(0.5, rel=0.1), "which has ended"
    for _ in range(250):
        buckets.ran(8, True, 4.0)
    assert buckets.seconds(8) == pytest.approx(4.0, rel=0.01), "longer contexts"


def test_a_slow_machine_changes_no_choice(passes_count):
    """Measured: passes of 32 rows, fast and canonical ones, and of 64, while 32 canonical ones run
    at half the speed, and when they no longer do."""
    buckets = Buckets(64, 64)
    buckets.learn([32, 64], own_way=[32, 64])
    costs = {(32, False): 13.3, (32, True): 15.4, (64, True): 21.0}
    for kind, seconds in costs.items():
        for _ in range(3):
            buckets.ran(*kind, seconds)

    def relative():
        return [buckets.seconds(*kind) / buckets.seconds(32, True) for kind in costs]

    before = relative()
    for times in (2.0, 1.0):
        for _ in range(60):
            buckets.ran(32, True, times * costs[32, True])
        assert buckets.seconds(32, True) == pytest.approx(times * costs[32, True], rel=0.2)
        assert relative() == pytest.approx(before, rel=0.1)
        assert buckets.window(32, 32, MOST_DRAFTS, 0.97) == 0
    for _ in range(60):  # control: this kind alone, the others as before
        buckets.ran(32, True, 2 * costs[32, True])
        buckets.ran(64, True, costs[64, True])
    assert buckets.window(32, 32, MOST_DRAFTS, 0.97) > 0


def test_what_precedes_a_capture_only_bounds_what_replays_cost(passes_count):
    """Numbers of Llama 3.1 8B on an H200. Taken for what a bucket costs, eager passes kept the one
    from being used in which they would soon be replays."""
    buckets = Buckets(2048, 128, LADDER["cuda"])
    buckets.learn([128, 256, 512, 2048])
    for size, seconds in ((64, 0.03), (128, 0.028), (2048, 0.063)):
        buckets.ran(size, size > 64, seconds, False)
    assert buckets.seconds(2048) == 0.063
    buckets.ran(64, False, 0.0084)
    assert buckets.seconds(64) == 0.0084 < buckets.seconds(128) < 0.02
    assert buckets.window(64, 64, MOST_DRAFTS, 0.97) == 1, "64 drafts and what precedes them"
    buckets.ran(128, True, 0.028)
    assert buckets.window(64, 64, MOST_DRAFTS, 0.97) == MOST_DRAFTS, "control"


def learnt(canonical, seconds, own_way=()):
    buckets = Buckets(64, 8)
    buckets.learn(canonical, {rows: seconds(rows) for rows in buckets.sizes}, own_way)
    for rows in own_way:
        buckets._costs[False][rows] = seconds(rows)
    return buckets


@pytest.mark.parametrize("seed", range(8))
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


def test_rows_that_are_left_over_cost_another_pass():
    """Two passes of 512 rows are taken for 1024 only where they save more than the pass by which
    half of the sequences end later."""
    chosen = {}
    for large in (1080, 1120):
        buckets = Buckets(2048, 32, [*row_counts(512), 1024])
        costs = {rows: 20.0 + rows for rows in buckets.sizes} | {1024: large}
        assert large > 2 * costs[512]
        buckets.learn(buckets.sizes, costs)
        chosen[large] = buckets.cheapest(8, 1024)
    assert chosen == {1080: 1024, 1120: 512}


def test_costs_of_a_slower_time_keep_no_bucket_from_use(monkeypatch, passes_count):
    """As a proof measured them while three others ran beside it, in ms: every pass of 32 rows was
    cut into two of 16, so that none showed what 32 cost. And as a pass in such a time measures."""

    def proven():
        buckets = Buckets(64, 16, [2, 16, 24, 32])
        buckets.learn(buckets.sizes, {2: 5.0, 16: 30.0, 24: 205.0, 32: 72.0})
        return buckets

    buckets = proven()
    assert buckets.cheapest(2, 32) == 32 and buckets.seconds(24, True) < buckets.seconds(32, True)
    buckets.ran(32, True, 80.0)
    for _ in range(STALE - 1):
        buckets.ran(16, True, 20.0)
        assert buckets.seconds(32, True) == 80.0, "so it was, of late"
    assert buckets.cheapest(2, 32) < 32
    buckets.ran(16, True, 20.0)
    assert buckets.cheapest(2, 32) == 32, "is tried again"
    buckets.ran(32, True, 24.0)
    assert buckets.seconds(32, True) == 24.0
    monkeypatch.setattr(Buckets, "_bound_others", lambda *_: None)
    assert proven().cheapest(2, 32) == 16, "control"
