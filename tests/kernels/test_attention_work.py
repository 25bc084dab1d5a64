"""The work list of attention: against a plain model of it, balanced, and without influence on bits.

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
from tests.kernels.test_paged_attention import Pass, Sequence, launched, lay_out
from tinyspec.kernels import paged_attention
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.paged_attention import UNBOUNDED, WorkList, work_list

ENTRIES = 1 << 30
SETTINGS = {
    "tile_rows": 16,
    "heads": 8,
    "group_shift": 2,
    "window": UNBOUNDED,
    "chunk": UNBOUNDED,
    "split": 512,
    "programs": 264,
    "entries": ENTRIES,
}
# (rows, length) of segments.
PASSES = {
    "one-row": [(1, 1)],
    "one-long": [(1, 131072)],
    "long-beside-short": [(1, 131072), *[(1, 700 + n) for n in range(64)]],
    "equal": [(1, 4096)] * 64,
    "many": [(1, 10 * n + 1) for n in range(260)],
    "prompts": [(900, 900), (1, 30), (0, 0), (1100, 9000), (5, 5000)],
}


def metadata_of(spans: list[tuple[int, int]]) -> AttentionMetadata:
    """Of segments of (rows, length); the work list needs no pages."""
    rows = torch.tensor([0, *(rows for rows, _ in spans)]).cumsum(0)
    return AttentionMetadata(ints([]), ints(rows), ints([end for _, end in spans]), 16)


def made(spans: list[tuple[int, int]], **settings: int) -> WorkList:
    return work_list(metadata_of(spans), sum(rows for rows, _ in spans), **SETTINGS | settings)


def tiles_of(spans: list[tuple[int, int]], **settings: int) -> list[list[int]]:
    """[segment, first row, rows, first split, splits] of every tile, by the definition."""
    given = SETTINGS | settings
    tiles = []
    for segment, (rows, length) in enumerate(spans):
        for first in range(0, rows, given["tile_rows"]):
            size = min(rows - first, given["tile_rows"])
            position = length - rows + first
            bounds = (position - given["window"] + 1, position // given["chunk"] * given["chunk"])
            first_split, last = max(bounds) // given["split"], (position + size - 1)
            tiles.append([segment, first, size, first_split, last // given["split"] + 1])
            tiles[-1][4] -= first_split
    return tiles


def shares(work: WorkList, heads: int) -> list[dict[int, range]]:
    """Of every program: its splits of each item."""
    found = []
    for (item, first, _), (last, stop, _) in pairwise(work.starts.tolist()):
        mine = {}
        for i in range(item, last + (stop > 0)):
            begin = first if i == item else 0
            end = stop if i == last else int(work.tiles[i // heads, 4])
            mine[i] = range(begin, end)
        found.append(mine)
    return found


@pytest.mark.parametrize("bound", [{}, {"window": 600}, {"chunk": 2048}], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_matches_model(name: str, bound: dict[str, int]) -> None:
    """Every tile is there, every split of every item has one program, units are counted; no program
    has more than one and a half times its share and a split."""
    work, heads = made(PASSES[name], **bound), SETTINGS["heads"]
    tiles = tiles_of(PASSES[name], **bound)
    assert work.tiles[: len(tiles), :5].tolist() == tiles
    owned: dict[int, list[int]] = {}
    for mine, (begin, end) in zip(
        shares(work, heads), pairwise(work.starts[:, 2].tolist()), strict=True
    ):
        assert sum(map(len, mine.values())) == end - begin
        for item, splits in mine.items():
            owned.setdefault(item, []).extend(splits)
    assert owned == {i: [*range(tiles[i // heads][4])] for i in range(len(tiles) * heads)}
    units = [end - begin for begin, end in pairwise(work.starts[:, 2].tolist())]
    assert max(units) <= 1.5 * sum(units) / len(units) + 1


def test_workspace() -> None:
    """Entries of tiles that may be cut do not overlap; what has none is not cut."""
    for entries in (ENTRIES, 20000, 0):
        work = made(PASSES["prompts"], entries=entries)
        used = 0
        for *_, size, _, splits, entry, shift in work.tiles[: len(tiles_of(PASSES["prompts"]))]:
            if entry >= 0:
                assert entry == used
                used += int(splits * SETTINGS["heads"] * (size << shift))
        assert used <= entries and (used > 0) == (entries > 0)
        for item, first, _ in work.starts.tolist():
            assert first == 0 or work.tiles[item // SETTINGS["heads"], 5] >= 0


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
def test_any_order(options: dict, any_order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("poisoned")
def test_any_order_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a split that is left out shows."""
    work = mixed_pass()
    with launched("walk"):
        expected = work()
        lists_of_any_order(monkeypatch, 0, lose=1)
        work.metadata.derived.clear()
        assert not torch.equal(work(), expected)
