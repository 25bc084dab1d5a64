"""The work list of attention: balanced, and without influence on bits.

The Triton kernels run on lists of every order, cut anywhere, and with programs in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.cases import ints, normal
from tests.kernels.layout import Pass, Sequence, lay_out
from tests.kernels.test_paged_attention import launched
from tinyspec.kernels import launch, paged_attention
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.paged_attention import UNBOUNDED, WorkList, work_list

SETTINGS = {"tile_rows": 16, "heads": 8, "group_shift": 2, "split": 512, "programs": 264}
SETTINGS |= {"window": UNBOUNDED, "chunk": UNBOUNDED, "entries": 1 << 30}
# (rows, length) of segments.
PASSES = {
    "long-beside-short": [(1, 131072), *[(1, 700 + n) for n in range(64)]],
    "many": [(1, 20 * n + 1) for n in range(130)],
    "prompts": [(900, 900), (1, 30), (0, 0), (1100, 9000), (5, 5000)],
}


@pytest.mark.parametrize("name", PASSES)
def test_shares_are_even(name):
    """No program has more than one and a half times its share and a split."""
    counts, lengths = zip(*PASSES[name], strict=True)
    first_rows = torch.tensor([0, *counts]).cumsum(0)
    # The work list needs no pages.
    metadata = AttentionMetadata(ints([]), ints(first_rows), ints(list(lengths)), 16)
    starts = work_list(metadata, sum(counts), **SETTINGS).starts[:, 2].tolist()
    units = [end - begin for begin, end in pairwise(starts)]
    assert 0 < max(units) <= 1.5 * sum(units) / len(units) + 1


def work_of_any_order(work: WorkList, heads: int, programs: int, seed: int) -> WorkList:
    """The same tiles in another order, all with entries, cut anywhere."""
    rng = random.Random(seed)
    tiles = [tile for tile in work.tiles.tolist() if tile[2] > 0]
    rng.shuffle(tiles)
    entry, units = 0, []
    for n, tile in enumerate(tiles):
        tile[5] = entry
        entry += tile[4] * heads * (tile[2] << tile[6])
        units += [(n * heads + head, i) for head in range(heads) for i in range(tile[4])]
    cuts = sorted(rng.choices(range(len(units) + 1), k=programs - 1))
    units.append((len(tiles) * heads, 0))
    starts = [[*units[cut], cut] for cut in (0, *cuts, len(units) - 1)]
    return WorkList(ints(tiles), ints(starts))


def mixed_pass() -> Pass:
    """A decode row, a prompt, a verify."""
    long = Sequence.make(131, 4, 2, 32, torch.float32)
    short = Sequence.make(9, 4, 2, 32, torch.float32, seed=7)
    return lay_out([(long, 130, 131), (short, 0, 9), (long, 62, 66)], padding=2)


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Programs run in the order of the list's random numbers; empty: in theirs."""
    place, seeds = interpreter.interpreter_builder.set_grid_idx, []

    def moved(x: int, y: int, z: int) -> None:
        size = interpreter.interpreter_builder.grid_dim[0]
        order = [*range(size)]
        if seeds:
            random.Random(seeds[-1]).shuffle(order)
        place(order[x], y, z)

    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", moved)
    return seeds


def lists_of_any_order(monkeypatch: pytest.MonkeyPatch, seed: int, lose: int = 0) -> None:
    """``paged_attention`` gets such lists; lose: splits that no program computes."""

    def changed(*args: object, **settings: int) -> WorkList:
        work = work_list(*args, **settings)
        work = work_of_any_order(work, settings["heads"], settings["programs"], seed)
        work.starts[0, 2] += lose
        return work

    monkeypatch.setattr(paged_attention, "work_list", changed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "options",
    [{"window": 70, "softcap": 4.0}, pytest.param({}, marks=pytest.mark.slow("crosses", 2))],
    ids=str,
)
def test_any_order(options, any_order, monkeypatch):
    options = options | {"sinks": normal(4, seed=9)}
    work = mixed_pass()
    with launched("walk"):
        expected = work(**options)
    for seed in range(2):
        work.metadata.derived.clear()
        any_order[:] = [seed]
        with launched("spread"), monkeypatch.context() as patch:
            lists_of_any_order(patch, seed)
            assert torch.equal(work(**options), expected)


def test_a_workspace_that_is_full(monkeypatch):
    """What has no entries is not cut; the bits are the same."""
    work = mixed_pass()
    with launched("walk"):
        expected = work()
    with launched("spread"):
        for entries in (1, 100):
            work.metadata.derived.clear()
            monkeypatch.setattr(launch, "workspace_entries", lambda *_, most=entries: most)
            assert torch.equal(work(), expected)


@pytest.mark.usefixtures("poisoned")
def test_any_order_can_fail(monkeypatch):
    """Control: a split that is left out shows."""
    work = mixed_pass()
    with launched("walk"):
        expected = work()
        lists_of_any_order(monkeypatch, 0, lose=1)
        work.metadata.derived.clear()
        assert not torch.equal(work(), expected)
