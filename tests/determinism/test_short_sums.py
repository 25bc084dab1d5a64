"""Sums of few terms: the probes tell orders of additions apart where most sums are exact in any.

Products of bf16 numbers have 16 bits, so that fp32 holds a sum of few of them whatever the order,
unless terms of widely different size meet.
"""

import random
from itertools import combinations

import pytest
import torch
from torch.nn.functional import linear

from tinyspec.determinism.rows import (
    SHORT,
    agree,
    cancelling_inputs,
    in_passes,
    keeps_places,
    needles_of_bucket,
    probe_pool,
    unequal_bits,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REFERENCE, OUTPUTS = 16, 64


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


def weight_of(terms: int, dtype: torch.dtype, outputs: int = OUTPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(terms)
    return (torch.randn(outputs, terms, generator=generator) / terms**0.5).to(dtype)


def chain(order):
    """One term after the other. An order of additions is a number, or a set of two orders, as
    a + b is b + a."""
    *before, last = order
    return frozenset((chain(before), last)) if before else last


def halves(order):
    middle = len(order) // 2
    return frozenset((halves(order[:middle]), halves(order[middle:]))) if middle else order[0]


def lanes(terms: int, count: int):
    """As vectors of ``count`` numbers are summed."""
    return chain(chain(range(lane, terms, count)) for lane in range(min(count, terms)))


def every_order(terms: tuple[int, ...]):
    if len(terms) == 1:
        return [terms[0]]
    first, rest = terms[0], terms[1:]
    found = []
    for count in range(len(rest)):
        for beside in combinations(rest, count):
            others = tuple(term for term in rest if term not in beside)
            ways = every_order((first, *beside))
            found += [frozenset((a, b)) for a in ways for b in every_order(others)]
    return found


def orders(terms: int):
    """All of up to five terms; of more those that libraries have, and random ones."""
    if terms <= 5:
        return every_order(tuple(range(terms)))
    numbers, generator = list(range(terms)), random.Random(0)
    swapped = [n ^ 1 for n in numbers if n ^ 1 < terms]
    swapped += [n for n in numbers if n not in swapped]
    found = [chain(numbers), chain(numbers[::-1]), halves(numbers), chain(swapped)]
    found += [lanes(terms, count) for count in (2, 4, 8) if count < terms]
    found += [chain(generator.sample(numbers, terms)) for _ in range(30)]
    return list(dict.fromkeys(found))


def total(products: torch.Tensor, order) -> torch.Tensor:
    if isinstance(order, int):
        return products[..., order]
    one, other = order
    return total(products, one) + total(products, other)


def product(weight: torch.Tensor, order):
    """``linear`` that adds in fp32 in this order."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return total(x.float()[:, None] * weight.float(), order).to(x.dtype)

    return run


def alike(pool: torch.Tensor, weight: torch.Tensor) -> int:
    """How many pairs of orders have the same bits in all needles of ``pool``."""
    every = [
        needles_of_bucket(product(weight, order), pool, 1, len(pool))
        for order in orders(pool.shape[1])
    ]
    return sum(not unequal_bits(a, b).any() for a, b in combinations(every, 2))


@pytest.mark.parametrize("terms", [3, 4, 5, 7, 12, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_needles_show_every_pair_of_orders(dtype, terms):
    weight = weight_of(terms, dtype)
    assert alike(probe_pool(terms, dtype, "cpu", weight), weight) == 0


@pytest.mark.parametrize("terms", [3, 4, 5, 6])
def test_rows_in_which_the_same_terms_cancel_do_not(terms):
    weight = weight_of(terms, torch.bfloat16)
    rows = cancelling_inputs(128, terms, torch.bfloat16, 0, weight)
    assert alike(rows, weight) > 0


@pytest.mark.parametrize("terms", [3, 4, 6, 13])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_that_adds_otherwise_from_32_rows_on(dtype, terms):
    weight = weight_of(terms, dtype)
    one, other = (product(weight, chain(n)) for n in (range(terms), range(terms)[::-1]))
    pools = [probe_pool(terms, dtype, "cpu", weight)]

    def by_rows(x):
        return (one if len(x) < 32 else other)(x)

    def by_place(x):
        return torch.cat([one(x[:9]), other(x[9:])])

    agreeing = [rows for rows in (1, 8, 24, 32, 64, 256) if agree(by_rows, pools, rows, REFERENCE)]
    assert agreeing == [1, 8, 24]
    assert not keeps_places(by_place, pools, REFERENCE)
    assert keeps_places(one, pools, REFERENCE) and agree(one, pools, 64, REFERENCE), "control"


def cancelling_rows(weight: torch.Tensor, count: int) -> torch.Tensor:
    """[count, terms] of widely different sizes; of each row one output cancels by one term, and
    what is left over by another."""
    generator = torch.Generator().manual_seed(0)
    size = count, weight.shape[1]
    x = torch.randn(size, generator=generator) * 2.0 ** torch.randint(
        -8, 9, size, generator=generator
    )
    x = x.to(weight.dtype)
    own = weight[torch.randint(len(weight), (count,), generator=generator)].double()
    rows = torch.arange(count)
    for _ in range(2):
        term = torch.randint(weight.shape[1], (count,), generator=generator)
        products = x.double() * own
        rest = products.sum(dim=1) - products[rows, term]
        x[rows, term] = (-rest / own[rows, term]).to(x.dtype)
    return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("terms", [4, 5, 8, 16, SHORT - 1])
@pytest.mark.parametrize("outputs", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_this_device(dtype, outputs, terms, device):
    """Wherever 16,384 rows, of which few tell, have other bits than in the reference bucket: as in
    bf16 with four terms from 24 rows on, with AVX-512 and AMX."""
    weight = weight_of(terms, dtype, outputs)
    rows, weight = cancelling_rows(weight, 1 << 14).to(device), weight.to(device)
    pools = [probe_pool(terms, dtype, device, weight)]

    def fn(x):
        return linear(x, weight)

    expected = in_passes(fn, rows, REFERENCE)
    for size in (8, 24, 32, 64):
        differ = unequal_bits(in_passes(fn, rows, size), expected).any()
        assert not (differ and agree(fn, pools, size, REFERENCE)), size
