"""What passes are taken to cost: by the last ones, whatever a busy machine made of some of them."""

import random
from itertools import pairwise

import pytest

from tinyspec.scheduler.buckets import LADDER, MOST_DRAFTS, Buckets
from tinyspec.scheduler.costs import KEPT, RECENT, PassCosts


def ran(costs, times, rows, seconds, apart=False):
    for _ in range(times):
        costs.add(rows, apart, seconds)


def test_costs_are_those_of_the_last_passes():
    costs = PassCosts()
    assert costs.seconds(16, False) == 16, "nothing is known: in proportion"
    costs.add(8, False, 5.0)
    costs.add(8, False, 0.5)
    assert costs.seconds(8, False) == 0.5, "the first one took in memory"
    ran(costs, 2 * KEPT, 8, 0.5)
    costs.add(8, False, 40.0)
    assert costs.seconds(8, False) == 0.5, "a busy moment"
    ran(costs, KEPT, 8, 4.0)
    assert costs.seconds(8, False) == 4.0, "longer contexts"
    ran(costs, KEPT, 8, 0.5)
    assert costs.seconds(8, False) == 0.5, "which have ended"


@pytest.mark.parametrize("seed", range(20))
def test_more_rows_cost_no_less_and_no_more_a_row(seed):
    """Whatever was measured; medians of what keeps to that stay as they are."""
    rng, costs = random.Random(seed), PassCosts()
    for _ in range(RECENT - 1):
        costs.add(rng.choice((1, 2, 4, 8, 16, 32, 64)), rng.random() < 0.3, rng.uniform(1, 40))
    for apart in (False, True):
        found = [(rows, costs.seconds(rows, apart)) for rows in range(1, 80)]
        assert all(a[1] <= b[1] * 1.000001 for a, b in pairwise(found))
        known = [(rows, costs.seconds(rows, apart) / rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
        assert all(a[1] * 1.000001 >= b[1] for a, b in pairwise(known))
    kept = PassCosts()
    for rows, seconds in ((1, 2.0), (8, 3.0), (32, 5.0)):
        ran(kept, 3, rows, seconds)
    assert [kept.seconds(rows, False) for rows in (1, 8, 20, 32)] == [2.0, 3.0, 4.0, 5.0]
    assert kept.seconds(64, False) == 7.5, "half of it grows"


def test_what_ran_long_ago_costs_no_more_than_it_did():
    """One row's cost alone tells little of sixteen's."""
    costs = PassCosts()
    ran(costs, KEPT, 16, 2.0)
    ran(costs, RECENT, 1, 1.0)
    assert costs.seconds(16, False) == 2.0 < costs.seconds(20, False)
    ran(costs, RECENT, 1, 0.1)
    assert costs.seconds(16, False) < 1.0, "all take less by now"


def test_two_kinds_and_what_is_known_of_one():
    costs = PassCosts()
    ran(costs, 3, 4, 1.0)
    ran(costs, 3, 64, 5.0)
    assert costs.seconds(64, True) == 5.0, "the other kind's, as none ran"
    ran(costs, 3, 4, 2.0, apart=True)
    assert (costs.seconds(4, False), costs.seconds(4, True)) == (1.0, 2.0)
    assert costs.seconds(64, True) == 5.0


def test_a_slow_while_decides_for_no_longer_than_it_is_remembered():
    """Measured: passes of 32 rows, plain and canonical ones, and of 64. While the machine is busy
    only one kind runs, at twice its cost; then it is quiet, and that kind is not chosen: it comes
    to be, once its slow passes are RECENT no more. Control: till then it is not."""
    quiet = {(32, False): 13.3, (32, True): 15.4, (64, True): 21.0}
    buckets = Buckets(64, 64)
    buckets.learn([32, 64], apart=[32, 64])
    for (rows, apart), seconds in quiet.items():
        ran(buckets.costs, 3, rows, seconds, apart)
    assert buckets.window(32, 32, MOST_DRAFTS, 0.97) == 0
    ran(buckets.costs, KEPT, 32, 2 * quiet[32, True], apart=True)
    chosen = []
    for _ in range(2 * RECENT):
        window = buckets.window(32, 32, MOST_DRAFTS, 0.97)
        chosen.append(window)
        for rows, apart in [(32, False)] * window + [(64 if window else 32, True)]:
            buckets.costs.add(rows, apart, quiet[rows, apart])
    assert chosen[0] > 0 and not any(chosen[RECENT:])


def test_a_slow_proof_keeps_no_bucket_from_use():
    """As one measured them while three others ran beside it, in ms. Every pass of 32 rows cut into
    two of 16 would show what 32 cost never: they cost no more than twice 16."""
    buckets = Buckets(64, 16, [2, 16, 24, 32])
    buckets.learn(buckets.sizes, {2: 5.0, 16: 30.0, 24: 205.0, 32: 72.0})
    assert buckets.cheapest(2, 32) == 32 and buckets.seconds(24, True) <= buckets.seconds(32, True)
    ran(buckets.costs, 1, 32, 80.0)
    ran(buckets.costs, 3, 16, 20.0)
    assert buckets.cheapest(2, 32) == 32
    ran(buckets.costs, 1, 32, 24.0)
    assert buckets.seconds(32, True) == 24.0


def test_what_precedes_a_capture_counts_until_replays_do(passes_count):
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
    buckets.ran(64, False, 0.03, False)
    assert buckets.seconds(64) == 0.0084, "another shape's first"
