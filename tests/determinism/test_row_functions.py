"""Element-wise operators round what is left over from vectors by another function, and few numbers
tell: the probe finds the buckets in which they do, however narrow the rows."""

import pytest
import torch

from tests.support.walk import CONFIG
from tests.support.zoo import MODEL_TYPES, tiny
from tinyspec import Engine
from tinyspec.determinism.probes.bits import in_passes, same_bits
from tinyspec.determinism.probes.row_functions import probe_function, probe_pool
from tinyspec.scheduler.buckets import Buckets

SIZES = [*Buckets(64, 16).sizes, 33, 34]
VECTOR = 32


def leaves_some_over(salt: int):
    """An operator of which 1 number in 25 tells whether it stood in a vector."""

    def run(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten()
        tells = flat.view(torch.int32) // 64 % 25 == salt
        tells[: len(flat) // VECTOR * VECTOR] = False
        return torch.where(tells, flat * (1 + 2**-23), flat).view_as(x)

    return run


@pytest.mark.parametrize("width", [1, 2, 3, 6, 40])
def test_every_bucket_with_leftovers_is_found(width):
    whole = {rows for rows in SIZES if rows * width % VECTOR == 0}
    pool = probe_pool(width, torch.float32, "cpu")
    reference = 32 if width % 2 else 16  # without leftovers
    for salt in range(0, 25, 4):
        found = probe_function(leaves_some_over(salt), pool, SIZES, reference, search=True)
        assert {rows for rows in SIZES if found.canonical(rows)} == whole, salt


def test_leftovers_in_the_reference_bucket_are_found():
    pool = probe_pool(2, torch.float32, "cpu")
    for salt in range(0, 25, 4):
        assert not probe_function(leaves_some_over(salt), pool, SIZES, 56, search=True).position


def test_control_a_pool_of_any_rows_misses_some():
    pool = probe_pool(2, torch.float32, "cpu")
    operators = map(leaves_some_over, range(25))
    assert any(probe_function(fn, pool, SIZES, 16).canonical(56) for fn in operators)


def test_what_is_alike_everywhere_stays_so():
    for fn in (torch.exp, torch.square, torch.neg):
        pool = probe_pool(2, torch.float32, "cpu")
        found = probe_function(fn, pool, SIZES, 16, search=True)
        assert all(map(found.canonical, SIZES))


@pytest.mark.skipif("kolibri1" not in MODEL_TYPES, reason="this transformers has no kolibri1")
def test_sigmoid_of_a_router():
    """kolibri1: [R, 2] sigmoids. Of 56 rows, 8 are left over from vectors of AVX-512."""
    rows = torch.randn(2000, 2) * 2
    expected = in_passes(torch.sigmoid, rows, CONFIG.reference_rows)
    with Engine(tiny("kolibri1"), config=CONFIG) as engine:
        facts = engine.contract.probe()
    broken = {fact.rows for fact in facts.buckets if any("sigmoid" in n for n in fact.broken_by)}
    unlike = {
        fact.rows
        for fact in facts.buckets
        if not same_bits(in_passes(torch.sigmoid, rows, fact.rows), expected)
    }
    assert unlike <= broken
