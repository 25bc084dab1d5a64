"""The probes tell apart what keeps the facts and what breaks them; a careless probe does not."""

import random
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.support.sensitive import PositionSensitiveLinear, RowByRowLinear, ShapeSensitiveLinear
from tinyspec.determinism.rows import (
    SHORT,
    agree,
    cancelling_inputs,
    in_passes,
    keeps_places,
    needles_of_bucket,
    probe_pool,
    sensitive_pool,
    unequal_bits,
)
from tinyspec.scheduler.buckets import Buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_linear(dtype: torch.dtype, features: int = 192, out: int = 96) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(features, out, bias=False).to(dtype)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


def test_unequal_bits_sees_signs_of_zero_and_equal_nans():
    one, other = torch.tensor([[[0.0, torch.nan, 2.0]], [[-0.0, torch.nan, 2.0]]])
    assert unequal_bits(one, other).tolist() == [[True, False, False]]
    assert not keeps_places(torch.rand_like, [torch.randn(2, 64)], 1), "nor does one repeat itself"


SIZES = [1, 2, 4, 8, 12, 16, 32, 64, 96, 144]


def facts_of(
    fn, weight=None, dtype=torch.float32, features=192, reference=16, sizes=SIZES, search=False
):
    """Fact 1 in the reference bucket, and the sizes that agree with it."""
    pools = [probe_pool(features, dtype, "cpu", weight)]
    pools += sensitive_pool(fn, pools[0]) if search else []
    position = keeps_places(fn, pools, reference)
    return position, [rows for rows in sizes if agree(fn, pools, rows, reference)]


KINDS = {RowByRowLinear: (True, SIZES), ShapeSensitiveLinear: (True, [16])}
KINDS[PositionSensitiveLinear] = (False, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_linears(kind, dtype):
    own = kind(make_linear(dtype))
    assert facts_of(own, own.weight, dtype) == KINDS[kind]


def nudged(x, row, column=5):
    """``x`` with one element of one row, if it has it, one bit up."""
    out = x.clone()
    if len(x) > row:
        out[row, column] = torch.nextafter(out[row, column], torch.tensor(torch.inf))
    return out


@pytest.mark.parametrize("rows", [4, 16, 96])
def test_a_row_index_that_matters(rows):
    """In one bucket; of the reference it breaks fact 1."""
    for row in range(rows):
        fn = lambda x, row=row: nudged(x, row) if len(x) == rows else x  # noqa: E731
        assert facts_of(fn, sizes=[8, rows]) == ((False, []) if rows == 16 else (True, [8])), row


@pytest.mark.parametrize("rows", [1, 12, 16, 144])
def test_neighbours_that_matter(rows):
    """A scale of the whole pass: as fp8 linears with dynamic scales have."""

    def scaled_by_the_largest(x):
        scale = x.abs().max() / 127 if len(x) == rows else torch.tensor(0.125)
        return (x / scale).round() * scale

    _, agreeing = facts_of(scaled_by_the_largest)
    assert agreeing == ([] if rows == 16 else [size for size in SIZES if size != rows])


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
    """Element-wise operators round what is left over from vectors by another function, and few
    numbers tell: however narrow the rows. Control: a pool of any rows misses some."""
    sizes = [*Buckets(64, 16).sizes, 33, 34]
    whole = [rows for rows in sizes if rows * width % VECTOR == 0]
    more = {"features": width, "sizes": sizes, "search": True}
    reference = 32 if width % 2 else 16  # without leftovers
    for salt in range(0, 25, 4):
        assert facts_of(leaves_some_over(salt), reference=reference, **more)[1] == whole, salt
        assert facts_of(torch.square, reference=reference, **more)[1] == sizes
        if width == 2:
            assert not facts_of(leaves_some_over(salt), reference=56, **more)[0]
    more |= {"sizes": [56], "search": False}
    if width == 2:
        assert any(facts_of(leaves_some_over(salt), **more)[1] for salt in range(25))


# Sums of few terms: products of bf16 numbers have 16 bits, so that fp32 holds a sum of few of them
# whatever the order, unless terms of widely different size meet.

REFERENCE, OUTPUTS = 16, 64


def weight_of(terms: int, dtype: torch.dtype, outputs: int = OUTPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(terms)
    return (torch.randn(outputs, terms, generator=generator) / terms**0.5).to(dtype)


def any_order(terms: list[int], rng: random.Random):
    """A number, or a set of two orders, as a + b is b + a: in a chain, by halves, or otherwise."""
    if len(terms) == 1:
        return terms[0]
    cut = rng.choice((1, len(terms) // 2, rng.randrange(1, len(terms))))
    return frozenset((any_order(terms[:cut], rng), any_order(terms[cut:], rng)))


def orders(terms: int):
    """Many different ones."""
    rng = random.Random(0)
    return {any_order(rng.sample(range(terms), terms), rng) for _ in range(60)}


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
