"""Which tests run: by default every value of crossed parameters, of lasting ones what fits."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from tests.support import budget


class Item(SimpleNamespace):
    """What is asked of a collected test, by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def get_closest_marker(self, name):
        return self.mark if name == "slow" else None


def lasting(family, seconds, count):
    mark = pytest.mark.slow(family, seconds).mark
    return [Item(nodeid=f"{family} {n}", mark=mark) for n in range(count)]


def crossed(**values):
    """An item for every combination."""
    chosen = (dict(zip(values, one, strict=True)) for one in product(*values.values()))
    return [Item(nodeid=f"{n}", callspec=SimpleNamespace(params=p)) for n, p in enumerate(chosen)]


def config(minutes, seed="a"):
    return SimpleNamespace(getoption={"--minutes": minutes, "--seed": seed}.__getitem__)


@pytest.mark.parametrize(
    "sizes", [(1,), (3,), (2, 2), (3, 5), (7, 6, 3), (2, 3, 2, 4)], ids=lambda sizes: str(sizes)
)
def test_every_value_is_shown(sizes):
    values = {f"p{n}": [object() for _ in range(size)] for n, size in enumerate(sizes)}
    items = crossed(**values)
    chosen = budget.covering(items)
    for name, known in values.items():
        assert {id(item.callspec.params[name]) for item in chosen} == set(map(id, known))
    assert max(sizes) <= len(chosen) <= max(sizes) + 1
    assert chosen == budget.covering(items[::-1]), "in whatever order they are collected"


def test_a_family_has_its_share():
    items = [*lasting("crosses", 2.0, 500), *lasting("random use", 30.0, 100)]
    chosen = budget.sampled(config(36), items)
    spent = {}
    for item in chosen:
        family, seconds = item.mark.args
        spent[family] = spent.get(family, 0.0) + seconds
    for family in spent:
        allowed = budget.quota(config(36), family)
        assert 0.8 * allowed < spent[family] <= allowed
    assert sum(budget.quota(config(36), family) for family in budget.SHARES) == pytest.approx(2160)
