"""What is not finite in keys and values reaches the rows that attend to it, and no others: whatever
rows, sequences and pages share the pass.

The twin's canonical and plain ways, and the Triton kernel, over sequences with NaN and infinities
outside of windows and chunks, behind rows, in the unwritten rest of pages and in other sequences.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.kernels.cases import sees
from tests.kernels.layout import Sequence, lay_out, with_sinks
from tests.kernels.test_paged_attention import launched
from tinyspec.kernels.twins import attention as twin
from tinyspec.model.checksum import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Query heads, KV heads, head size.
SHAPES = ((4, 2, 64), (3, 1, 80), (2, 2, 128))
BOUNDS = ({}, {"window": 40}, {"chunk": 50}, {"window": 140})
SCORES = (*BOUNDS, {"window": 40, "softcap": 5.0}, {"window": 40, "sinks": True})
NAN, INF = float("nan"), float("inf")
WRONG = (NAN, INF, -INF)
LENGTH = 300
# In the first tile and behind a window of the second.
HOLES = (70, 200)
ROWS = (0, 69, 70, 71, 109, 110, 119, 120, 127, 128, 150, 199, 200, 239, 240, 255, 256, 299)


@cache
def sequence(dtype, shape, seed):
    return Sequence.make(LENGTH, *shape, dtype, seed=seed, device="cpu")


def run(dtype, shape, spans, holes=(), page_size=128, rest=0.0, exact=True, **scores):
    """Rows first..end - 1 of sequence ``n``, for every (n, first, end), each with pages of its own;
    holes: (n, 0 for keys or 1 for values, position, number); rest: what else pages hold."""
    made = {n: sequence(dtype, shape, n).clone() for n, _, _ in spans}
    for owner, which, position, number in holes:
        if owner in made:
            (made[owner].k, made[owner].v)[which][position, :, 3] = number
    chunks = [(made[n], first, end) for n, first, end in spans]
    more = {"fill": rest, "values": rest, "exact": exact, "written": False}
    work = lay_out(chunks, page_size, seed=len(spans), **more)
    out = work(attend=twin.paged_attention, **with_sinks(scores, shape[0], dtype, "cpu"))
    return out.split([end - first for _, first, end in spans])


def attends(bound):
    """[LENGTH]: whether a row attends to one of the holes."""
    bound = {name: n for name, n in bound.items() if name in ("window", "chunk")}
    return sees(LENGTH, **bound)[:, list(HOLES)].any(1)


def check_prompt(dtype, shape, scores, which, number):
    """The whole sequence at once: rows that attend to no hole as without holes."""
    holes = [(0, which, place, number) for place in HOLES]
    whole = [(0, 0, LENGTH)]
    clean = run(dtype, shape, whole, **scores)[0]
    found = run(dtype, shape, whole, holes, **scores)[0]
    seen = attends(scores)
    assert seen.any() and not seen.all()
    assert clean.isfinite().all()
    assert same_bits(found[~seen], clean[~seen])
    if which == 1 or number != number:
        assert found[seen].isnan().all()
    return holes, found


@pytest.mark.crossed(0.15)
@pytest.mark.parametrize("number", WRONG, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_attend_to_it_and_no_others(dtype, shape, scores, which, number):
    """In a prompt, alone, and among rows of others with holes of their own."""
    holes, whole = check_prompt(dtype, shape, scores, which, number)
    for row in ROWS:
        alone = run(dtype, shape, [(0, row, row + 1)], holes, **scores)[0]
        assert same_bits(alone[0], whole[row]), row
    others = [(1, which, place, NAN) for place in (5, 130, 131, 290)]
    spans = [(1, 100, 140), (0, 64, 72), (0, 120, 260), (1, 299, 300), (0, 299, 300), (0, 3, 4)]
    for page_size in (16, 128, 256):
        crowd = run(dtype, shape, spans, [*holes, *others], page_size, rest=NAN, **scores)
        for (n, first, end), rows in zip(spans, crowd, strict=True):
            assert n == 1 or same_bits(rows, whole[first:end]), (page_size, first)


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_control_without_a_second_look(which, monkeypatch):
    """As it was: rows of the same tile become NaN."""
    monkeypatch.setattr(twin, "all_finite", lambda *_: True)
    with pytest.raises(AssertionError):
        check_prompt(torch.float32, SHAPES[0], {"window": 40}, which, NAN)


def test_infinite_keys_may_be_legal():
    """A score of -inf weighs 0, and the bits are the same whether or not another row is NaN."""
    q = sequence(torch.float32, SHAPES[0], 0).q
    holes = [(0, 0, 70, INF)]
    whole = run(torch.float32, SHAPES[0], [(0, 0, LENGTH)], holes)[0]
    finite = whole[70:].isfinite().all(-1)
    assert torch.equal(finite, q[70:, :, 3] < 0) and finite.any() and not finite.all()
    for row in torch.arange(70, LENGTH)[finite.all(1)].tolist():
        alone = run(torch.float32, SHAPES[0], [(0, row, row + 1)], holes)[0]
        assert torch.equal(alone[0], whole[row])


def test_softcap_makes_a_finite_score_of_an_infinite_key():
    """Its value counts, whether or not another row is NaN."""
    inf, nan = (0, 0, 70, INF), (0, 0, 290, NAN)
    scores = {"softcap": 5.0}
    whole = run(torch.float32, SHAPES[0], [(0, 0, LENGTH)], [inf, nan], **scores)[0]
    assert whole[70:290].isfinite().all() and whole[290:].isnan().all()
    without = run(torch.float32, SHAPES[0], [(0, 0, LENGTH)], [nan], **scores)[0]
    for row in range(70, 290):
        alone = run(torch.float32, SHAPES[0], [(0, row, row + 1)], [inf], **scores)[0]
        assert torch.equal(alone[0], whole[row])
        assert not torch.equal(alone[0], without[row])


@pytest.mark.crossed(0.05)
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("bound", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_rows(dtype, shape, bound, which):
    """The same for rows without a promise: prompts, parts of prompts and decode rows."""
    holes = [(0, which, place, NAN) for place in HOLES]
    spans = [(0, 0, LENGTH), (0, 60, 75), (0, 299, 300), (0, 69, 70), (0, 130, 131), (1, 255, 256)]
    for some in (spans, spans[2:], spans[3:4]):
        found = run(dtype, shape, some, holes, rest=NAN, exact=False, **bound)
        for (n, first, end), rows in zip(some, found, strict=True):
            wanted = ~attends(bound)[first:end] if n == 0 else torch.ones(1, dtype=torch.bool)
            assert torch.equal(rows.isfinite().all(-1).all(-1), wanted)


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("number", [NAN, -INF], ids=str)
@pytest.mark.parametrize("bound", [{}, {"window": 23}, {"chunk": 30}], ids=str)
@pytest.mark.parametrize("mode", ["walk", "spread"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_triton_kernel(dtype, mode, bound, number, which):
    length, hole = 72, 36
    clean = Sequence.make(length, 2, 1, 32, dtype)
    poisoned = clean.clone()
    (poisoned.k, poisoned.v)[which][hole, :, 3] = number
    seen = sees(length, **bound)[:, hole]
    with launched(mode):
        expected = lay_out([(clean, 0, length)])(**bound)
        whole = lay_out([(poisoned, 0, length)], fill=NAN)(**bound)
        assert torch.equal(whole[~seen], expected[~seen])
        if which == 1 or number != number:
            assert whole[seen].isnan().all()
        rows = [0, 35, 36, 58, 59, 71]
        alone = lay_out([(poisoned, row, row + 1) for row in rows], fill=NAN)(**bound)
        assert same_bits(alone, whole[rows])
