"""Paged attention against dense attention over the gathered keys, in fp64 and in the kernel's
dtype.

Splits are shortened to a few tiles, so that short sequences cross them; everything runs with one
program, which merges all splits as it goes, and with many, whose splits are merged afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, DTYPES, ints
from tests.kernels.layout import LARGE, NAN, Pass, Sequence, lay_out, rows_of, with_sinks
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import launch
from tinyspec.kernels.backend import AttentionMetadata

SPLIT = 64
# One that walks through everything; so many that they cut nearly everywhere.
PROGRAMS = {"walk": 1, "spread": 24}


@contextmanager
def launched(mode: str | None = None, split: int | None = SPLIT, **entry: int) -> Iterator[None]:
    """The launch table with another split, and a number of programs."""
    with pytest.MonkeyPatch.context() as patch:
        table = launch.attention
        if split is not None:
            entry["split"] = split
        patch.setattr(launch, "attention", lambda *key: table(*key)._replace(**entry))
        if mode is not None:
            patch.setattr(launch, "programs", lambda _: PROGRAMS[mode])
            patch.setattr(launch, "MERGE_PROGRAMS", 1)
        yield


def numpy_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


TOGETHER = {"softcap": 9.0, "sinks": True, "scale": 0.2}
CASES = {
    # name: (q heads, kv heads, head size, page size, [(start, stop)], options)
    "smallest": (1, 1, 32, 16, [(0, 1)], {}),
    "gqa-64": (8, 2, 64, 16, [(99, 100), (60, 67), (128, 129)], {}),
    "padded-group-96": (6, 2, 96, 16, [(126, 131)], {}),
    "wide-256": (2, 1, 256, 16, [(64, 67), (9, 10)], {}),
    "widest-512": (2, 1, 512, 16, [(64, 67), (9, 10)], {}),
    "many-pages": (2, 1, 32, 16, [(395, 400), (0, 20)], {}),
    "group-over-tile": (70, 1, 32, 16, [(70, 71)], {}),
    "tiny-head-8": (4, 2, 8, 16, [(0, 9)], {}),
    "window": (4, 2, 64, 16, [(150, 155), (2, 4)], {"window": 21}),
    "window-of-one": (2, 1, 32, 16, [(62, 66)], {"window": 1}),
    "chunk": (4, 2, 64, 16, [(145, 150), (2, 4)], {"chunk": 21}),
    "chunk-of-a-split": (2, 1, 32, 128, [(190, 195)], {"chunk": 64}),
    "chunk-of-more": (2, 1, 32, 16, [(62, 66)], {"chunk": 8192}),
    "softcap": (4, 2, 64, 16, [(90, 95)], {"softcap": 5.0}),
    "softcap-small-scores": (2, 1, 64, 16, [(90, 91)], {"softcap": 50.0, "scale": 0.01}),
    "sinks": (4, 2, 64, 16, [(90, 95), (0, 1)], {"sinks": True}),
    "all": (4, 2, 96, 128, [(140, 143)], {"window": 90, **TOGETHER}),
    "all-in-chunks": (4, 2, 96, 128, [(140, 143)], {"chunk": 71, **TOGETHER}),
}


@pytest.mark.crossed(0.2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread"])
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, mode, dtype):
    q_heads, kv_heads, dim, page_size, spans, options = CASES[name]
    options = with_sinks(options, q_heads, dtype)
    chunks = [
        (Sequence.make(stop, q_heads, kv_heads, dim, dtype, seed=s), start, stop)
        for s, (start, stop) in enumerate(spans)
    ]
    with launched(mode):
        out = lay_out(chunks, page_size, fill=NAN)(**options)
    exact = torch.cat([rows_of(*chunk, torch.float64, **options) for chunk in chunks])
    # The interpreter multiplies by NumPy, whose product of so many fp32 numbers, on the processor
    # that conftest.py has it run for, is less accurate than torch's.
    by_numpy = name == "widest-512" and dtype == torch.float32 and DEVICE == "cpu"
    product = numpy_product if by_numpy else torch.matmul
    same = torch.cat([rows_of(*chunk, dtype, **options, product=product) for chunk in chunks])
    assert out.dtype == dtype
    assert_as_good_as_torch(out, same, exact)


def test_matches_reference_when_empty():
    work = lay_out([(Sequence.make(5, 2, 1, 32, torch.float32), 0, 5)], padding=3)
    whole = work()
    empty = AttentionMetadata(ints([]).view(0, 1), ints([0]), ints([]), 16)
    assert (Pass(work.q, work.k_cache, work.v_cache, empty)() == 0).all()
    assert Pass(work.q[:0], work.k_cache, work.v_cache, empty)().shape == (0, 2, 32)
    # A segment without rows between others.
    table = work.metadata.page_table.expand(3, -1).contiguous()
    gap = AttentionMetadata(table, ints([0, 0, 5, 5]), ints([7, 5, 1]), 16)
    assert torch.equal(Pass(work.q, work.k_cache, work.v_cache, gap)(), whole)


@pytest.mark.crossed(1.8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread"])
def test_exact(mode, dtype):
    sequence = Sequence.make(131, 4, 2, 64, dtype)
    work = lay_out([(sequence, 60, 70), (sequence, 126, 131)])
    with launched(mode):
        # One key in sight: its value, moved.
        mine = torch.cat([sequence.v[60:70], sequence.v[126:131]]).repeat_interleave(2, dim=1)
        assert torch.equal(work(window=1), mine)
        assert torch.equal(work(chunk=1), mine)
        # Equal scores, a few keys in sight: the mean of small integers, across splits.
        sequence.v = torch.randint(-8, 9, sequence.v.shape).to(dtype).to(DEVICE)
        work = lay_out([(sequence, 60, 70), (sequence, 126, 131)])
        work.q.zero_()
        for bound, lowest in (("window", lambda p: p - 3), ("chunk", lambda p: p - p % 2)):
            keys = [slice(lowest(p), p + 1) for p in [*range(60, 70), *range(126, 131)]]
            means = torch.stack([sequence.v[seen].mean(0) for seen in keys])
            out = work(**{bound: 4 if bound == "window" else 2})
            assert torch.equal(out, means.repeat_interleave(2, dim=1))


OPTIONS = {
    "plain": {},
    "window": {"window": 23},
    "chunk": {"chunk": 29},
    "all": {"window": 70, "softcap": 4.0, "sinks": True},
}
HEADS = {"gqa-32": (4, 2, 32), "mqa-80": (3, 1, 80), "mha-128": (2, 2, 128)}
# Positions beside tile, split, window and chunk boundaries.
EDGES = [0, 1, 22, 23, 31, 32, 63, 64, 86, 87, 127, 128, 133]
LENGTH = 134


@pytest.mark.crossed(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_row_invariant(heads, name, mode, dtype):
    """A row inside a prompt, alone, in a verify, in a chunk: the same bits."""
    sequence = Sequence.make(LENGTH, *heads, dtype)
    options = with_sinks(OPTIONS[name], heads[0], dtype)
    with launched("walk"):
        prompt = lay_out([(sequence, 0, LENGTH)])(**options)
    with launched(mode):
        alone = lay_out([(sequence, p, p + 1) for p in EDGES], seed=1)(**options)
        assert torch.equal(alone, prompt[EDGES])
        # Verifies of several lengths and chunks that begin anywhere, on pages of another size.
        spans = [(62, 65), (126, 131), (86, 88)]
        if mode == "walk":
            spans += [(5, 41), (100, LENGTH)]
        mixed = lay_out([(sequence, *span) for span in spans], page_size=128)(**options)
        assert torch.equal(mixed, torch.cat([prompt[a:b] for a, b in spans]))


@pytest.mark.crossed(2.8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread"])
def test_row_invariant_to_neighbours(mode, dtype):
    """Every row index, neighbours 1e3 larger, drafts behind the row, number of segments, page
    size."""
    sequence = Sequence.make(70, 4, 2, 32, dtype)
    other = Sequence.make(90, 4, 2, 32, dtype, seed=5)
    other.q, other.k, other.v = 30 * other.q, 30 * other.k, 1000 * other.v
    with launched("walk"):
        alone = lay_out([(sequence, 66, 67)])()[0]
    with launched(mode):
        for before in (1, 2, 5):
            rows = lay_out(
                [(other, 90 - before, 90), (sequence, 66, 67), (other, 1, 2)], padding=2
            )()
            assert torch.equal(rows[before], alone)
        # The draft rows behind it hold other, huge keys and values: masked for it.
        drafted = sequence.clone()
        drafted.k[67:] *= 100
        drafted.v[67:] *= -1000
        assert torch.equal(lay_out([(drafted, 64, 70)])()[2], alone)
        for page_size in (1, 128):
            assert torch.equal(lay_out([(sequence, 60, 70)], page_size)()[6], alone)
        # Masked products are 0 times the largest values there are, beside tiny ones that count.
        sequence.v /= 1024
        alone = lay_out([(sequence, 66, 67)])()[0]
        drafted.v[:67], drafted.v[67:] = sequence.v[:67], 60000.0
        assert torch.equal(lay_out([(drafted, 64, 70)])()[2], alone)


def test_row_invariant_at_table_split():
    """The table's own split: rows beside 512 and 1024, in both modes."""
    sequence = Sequence.make(1030, 1, 1, 32, torch.float32)
    rows = [511, 512, 513, 1023, 1024, 1029]
    with launched("walk", split=None):
        verify = torch.cat([lay_out([(sequence, 510, 514)])(), lay_out([(sequence, 1022, 1030)])()])
    with launched("spread", split=None):
        alone = lay_out([(sequence, p, p + 1) for p in rows])()
    assert torch.equal(alone, verify[[1, 2, 3, 5, 6, 11]])


@pytest.mark.parametrize("entry", [{"split": 128}, {"block_n": 16}], ids=["split", "tile"])
def test_row_invariant_can_fail(entry):
    """Control: another split or tile is another order of reduction, and shows."""
    sequence = Sequence.make(LENGTH, 4, 2, 64, torch.float32)
    with launched("walk"):
        prompt = lay_out([(sequence, 120, LENGTH)])()
        again = lay_out([(sequence, 120, LENGTH)], page_size=128)()
    with launched("walk", **{"split": SPLIT} | entry):
        other = lay_out([(sequence, 120, LENGTH)])()
    assert torch.equal(prompt, again)
    assert not torch.equal(prompt, other)


@pytest.mark.crossed(1.2)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread"])
@pytest.mark.parametrize("bound", [{}, {"window": 40}, {"chunk": 64}], ids=str)
def test_padding_untouched(bound, mode, dtype):
    """Keys that are nobody's or behind the window or chunk may be NaN, such values the largest, and
    padding rows NaN."""
    chunks = [
        (Sequence.make(stop, 6, 2, 80, dtype, seed=stop), start, stop)
        for start, stop in [(64, 65), (10, 14), (126, 132)]
    ]
    with launched(mode):
        clean = lay_out(chunks)(**bound)
        if bound:
            # No row of these segments sees the first keys any more.
            chunks[0][0].k[:16], chunks[0][0].v[:16] = NAN, LARGE
            chunks[2][0].k[:64], chunks[2][0].v[:64] = NAN, LARGE
        work = lay_out(chunks, padding=5, fill=NAN)
        before = [work.q.clone(), work.k_cache.clone(), work.v_cache.clone()]
        out = work(**bound)
    assert torch.equal(out[:11], clean)
    assert torch.equal(out[11:], torch.zeros_like(out[11:]))
    after = [work.q, work.k_cache, work.v_cache]
    assert all(
        torch.equal(a.nan_to_num(3), b.nan_to_num(3)) for a, b in zip(after, before, strict=True)
    )
