"""The twin of paged attention: right, and a row's bits depend on its own sequence alone.

The test that matters: a row decoded alone equals, bit for bit, the same row inside its prompt, at
every tile and window boundary, whatever the page size, the pages and the other sequences. Plain
decode rows are right too, and canonical ones never go their way.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cases import sees
from tests.kernels.layout import LARGE, Sequence, lay_out, rows_of, with_sinks
from tests.support.tolerances import OPERATOR, close, within_units
from tinyspec.kernels.twins import attention as twin
from tinyspec.kernels.twins import attention_plan
from tinyspec.kernels.twins.attention import cut_keeps_bits
from tinyspec.model.checksum import same_bits

LENGTHS = (1, 5, 127, 128, 129, 300)
EVERYONE = [*enumerate(LENGTHS)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# head_dim, kv heads, group
SHAPES = ((64, 2, 2), (32, 1, 4), (80, 2, 1), (96, 1, 3), (128, 1, 7), (256, 1, 1))
SCORES = (
    {},
    {"window": 50},
    {"chunk": 50},
    {"softcap": 20.0},
    {"sinks": True},
    {"window": 140, "softcap": 5.0},
    {"chunk": 140, "softcap": 5.0},
)
# Not the usual one over the root of the head size.
SCALE = 1.3


@cache
def sequences(dtype, shape):
    """One of each length."""
    dim, kv_heads, group = shape
    heads = kv_heads * group, kv_heads
    return [Sequence.make(n, *heads, dim, dtype, seed=n, device="cpu") for n in LENGTHS]


def run(dtype, shape, chosen, scores, page_size=128, seed=0, step=0, exact=True):
    """Attention of the last ``rows`` rows of each chosen sequence: [(index, rows), ...]. What the
    pages hold beside the sequences is large: it must not show."""
    dim, kv_heads, group = shape
    held = [(sequences(dtype, shape)[n], LENGTHS[n] - rows, LENGTHS[n]) for n, rows in chosen]
    work = lay_out(held, page_size, padding=3, fill=LARGE, seed=seed, step=step, exact=exact)
    scores = with_sinks(scores, kv_heads * group, dtype, "cpu")
    out = work(SCALE * dim**-0.5, twin.paged_attention, **scores)
    *found, rest = out.split([*(rows for _, rows in chosen), 3])
    assert torch.equal(rest, torch.zeros_like(rest))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_with_holes_between_them(dtype, shape):
    """Dense in the cache or at even steps, but for what is another's, and of one tile each: where
    there is but one KV head, too."""
    chosen = [(1, 5), (2, 5), (3, 5), (0, 1)]
    scattered = run(dtype, shape, chosen, {})
    for step in (1, 2, 3):
        found = run(dtype, shape, chosen, {}, step=step)
        assert all(map(torch.equal, found, scattered))


def error(out, sequence, first, scores):
    """Of a sequence's last rows against fp64 (2-norm), in units of torch's own in the dtype,
    written out or SDPA."""
    length, heads, dim = sequence.q.shape
    scores = {"scale": SCALE * dim**-0.5, **with_sinks(scores, heads, out.dtype, "cpu")}
    exact = rows_of(sequence, first, length, torch.float64, **scores)
    same = (rows_of(sequence, first, length, out.dtype, **scores).double() - exact).norm()
    # Without a softcap and sinks, which SDPA has not.
    bounds = {name: scores[name] for name in ("window", "chunk", "scale") if name in scores}
    q, k, v = (
        x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)[None]
        for x in (sequence.q, sequence.k, sequence.v)
    )
    seen = sees(length, **{n: bounds[n] for n in bounds if n != "scale"})
    by_sdpa = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=bounds["scale"])
    off = by_sdpa[0].transpose(0, 1).double() - rows_of(
        sequence, 0, length, torch.float64, **bounds
    )
    floor = torch.finfo(out.dtype).eps * exact.norm()
    return float((out.double() - exact).norm() / max(same, off.norm(), floor))


def assert_right(outs, held, scores):
    """At most twice torch's error: in each sequence of many rows, and over all (root mean square).
    That of few rows is a random number: 7 of 24 draws of 5 rows with sinks were above."""
    errors = [error(out, *of, scores) for out, of in zip(outs, held, strict=True)]
    assert all(each <= 2 for each, out in zip(errors, outs, strict=True) if len(out) > 8), errors
    assert sum(each**2 for each in errors) <= 4 * len(errors), errors


@pytest.mark.crossed(0.1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_row_invariant(dtype, shape, scores):
    whole = run(dtype, shape, EVERYONE, scores)
    mixes = [
        [(n, 1) for n in range(len(LENGTHS))],
        [(5, 1)],
        [(4, 3), (5, 40)],
        [(5, 2), (1, 5), (3, 128)],
    ]
    for page_size, step in ((16, 0), (128, 0), (128, 1), (256, 0)):
        for chosen in mixes:
            outs = run(dtype, shape, chosen, scores, page_size, page_size, step)
            for (n, rows), out in zip(chosen, outs, strict=True):
                assert torch.equal(out, whole[n][len(whole[n]) - rows :])


@pytest.mark.parametrize(
    "bound", [{}, *({kind: n} for kind in ("window", "chunk") for n in (7, 128, 150))], ids=str
)
def test_every_row_alone_equals_itself_in_the_prompt(bound):
    """Row by row through a sequence of 300, across every tile, window and chunk boundary."""
    dtype, shape = torch.float32, SHAPES[0]
    whole = run(dtype, shape, [(5, 300)], bound)[0]
    sequence = sequences(dtype, shape)[5]
    for position in range(300):
        work = lay_out([(sequence, position, position + 1)], 128, tables=[[0, 1, 2]])
        out = work(SCALE / 8, twin.paged_attention, **bound)
        assert torch.equal(out[0], whole[position]), position


def test_control_another_tile_differs(monkeypatch):
    """Another tile is another order of additions: the comparison above can fail."""
    shape = SHAPES[0]
    before = run(torch.float32, shape, [(5, 300)], {})[0]
    monkeypatch.setattr(attention_plan, "TILE", 64)
    monkeypatch.setattr(twin, "TILE", 64)
    after = run(torch.float32, shape, [(5, 300)], {}, page_size=64)[0]
    assert not torch.equal(before, after)
    assert close(before, after, OPERATOR)


@pytest.mark.parametrize("at", [4, 32, 192, 768])
def test_no_key_is_left_out_where_that_changes_a_bit(monkeypatch, at):
    """Be it in calls of some number of query rows alone, and in the log-sum-exp."""
    flash = twin.flash_attention

    def other(q, k, *args, **more):
        out, lse = flash(q, k, *args, **more)
        return out, lse.nextafter(lse + 1) if q.shape[2] == at and k.shape[2] == 96 else lse

    check = cut_keeps_bits.__wrapped__
    assert check(torch.float32, 64, 4) == cut_keeps_bits(torch.float32, 64, 4)
    monkeypatch.setattr(twin, "flash_attention", other)
    assert not check(torch.float32, 64, 4)


@pytest.fixture
def calls(monkeypatch):
    """One element for each call of tiles."""
    made, attend = [], twin.attend_tiles
    monkeypatch.setattr(twin, "attend_tiles", lambda *a, **k: made.append(1) or attend(*a, **k))
    return made


@pytest.mark.parametrize("limit, number", [("ALONE_TILES", 2), ("MAX_TILE_ROWS", 256)])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_calls_are_cut_without_a_trace(monkeypatch, calls, scores, limit, number):
    """More calls, the same bits."""
    before = run(torch.float32, SHAPES[0], EVERYONE, scores, step=1)
    together = len(calls)
    monkeypatch.setattr(attention_plan, limit, number)
    after = run(torch.float32, SHAPES[0], EVERYONE, scores, step=1)
    assert len(calls) - together > together
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_short_prompts_share_a_call(calls):
    """Prompts of 2 to 5 rows, in one call each and in one of them all: the same bits."""
    for dtype, heads in product(DTYPES, ((2, 1, 64), (3, 1, 64), (4, 2, 96))):
        prompts = [
            (Sequence.make(rows, *heads, dtype, seed=rows, device="cpu"), 0, rows)
            for rows in range(2, 6)
        ]
        alone = [lay_out([one], 128)(attend=twin.paged_attention) for one in prompts]
        calls.clear()
        together = lay_out(prompts, 128)(attend=twin.paged_attention)
        assert len(calls) == 1
        assert torch.equal(together, torch.cat(alone))


# share: of values that are not 0. The sinks outweigh all keys.
@pytest.mark.parametrize(
    ("scores", "share"), [({}, 0.2), ({"softcap": 5.0}, 0.2), ({"sinks": 9.0}, 1.0)], ids=str
)
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (4, 2)], ids=str)
def test_the_sign_of_zero(heads, scores, share):
    """Results that underflow to -0.0, within a tile or where the sum over tiles is rounded to fp16:
    the same bits in a call of one tile and in one of several."""
    least = -(2.0**-24)  # of fp16
    chunks = []
    for length in (100, 200):
        made = Sequence.make(length, *heads, 64, torch.float16, seed=length, device="cpu")
        made.v = torch.where(torch.rand(made.v.shape) < share, least, 0.0).half()
        chunks.append((made, length - 1, length))
    if "sinks" in scores:
        scores = {"sinks": torch.full(heads[:1], scores["sinks"])}
    together, alone = (
        lay_out(given, 128, step=1)(attend=twin.paged_attention, **scores)[:1]
        for given in (chunks, chunks[:1])
    )
    assert (alone == 0).any()
    assert same_bits(alone, together)


# Rows of each length that the pass holds: prompts, parts of prompts, decode rows, two by two.
ROWS = (
    EVERYONE,
    [(n, 1) for n in range(len(LENGTHS))],
    [(5, 300), (1, 1), (4, 3), (2, 1), (5, 40), (3, 128), (0, 1)],
)


@pytest.mark.crossed(0.2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_matches_reference(dtype, shape, scores):
    """Rows that need not be canonical; of prompts these have the bits of canonical ones."""
    for chosen in ROWS:
        for page_size, step in ((16, 0), (128, 1)):
            given = dtype, shape, chosen, scores, page_size, len(chosen), step
            outs = run(*given, exact=False)
            for out, own, (_, rows) in zip(outs, run(*given), chosen, strict=True):
                assert rows == 1 or torch.equal(out, own)
            held = [(sequences(dtype, shape)[n], LENGTHS[n] - rows) for n, rows in chosen]
            assert_right(outs, held, scores)


def decode(dtype, lengths, pages, window=0, rows=()):
    """The last rows of each of the sequences, one where nothing is said, on these pages of 128
    tokens of a cache that is NaN everywhere else."""
    rows = rows or [1] * len(lengths)
    chunks = [
        (Sequence.make(length, 6, 2, 32, dtype, seed=seed, device="cpu"), length - count, length)
        for seed, (length, count) in enumerate(zip(lengths, rows, strict=True))
    ]
    work = lay_out(chunks, 128, fill=torch.nan, values=torch.nan, tables=pages, exact=False)
    for own, length in zip(pages, lengths, strict=True):
        for held in (work.k_cache, work.v_cache):
            held[own[-1], (length - 1) % 128 + 1 :] = 0
    expected = [rows_of(*chunk, torch.float64, window=window) for chunk in chunks]
    found = work(attend=twin.paged_attention, window=window)
    assert within_units(found, torch.cat(expected), 16), "NaN included"


CONTEXTS = (  # lengths, pages, rows of each, in how many calls the rows that are alone run
    ([70], [[3]], (1,), 1),
    ([200], [[3, 4]], (1,), 1),
    ([70, 70, 70], [[2], [3], [4]], (1, 1, 1), 1),
    ([70, 5, 128], [[2], [4], [6]], (1, 1, 1), 1),
    ([130, 256], [[1, 2], [5, 6]], (1, 1), 1),
    ([200], [[3, 1]], (1,), 0),
    ([70, 70, 70], [[2], [3], [5]], (1, 1, 1), 0),
    ([70, 70], [[3], [2]], (1, 1), 0),
    ([70, 200], [[1], [4, 5]], (1, 1), 0),
    ([70, 70, 90, 131], [[2], [3], [5], [7, 8]], (1, 1, 90, 31), 1),
    ([40, 70, 70, 70], [[1], [3], [5], [7]], (40, 1, 1, 1), 1),
    ([70, 70, 90, 131], [[2], [4], [5], [7, 8]], (1, 1, 1, 31), 0),
    ([70, 90, 70], [[2], [3], [4]], (1, 90, 1), 0),
    ([90, 131], [[5], [7, 9]], (90, 31), 0),
    ([70] * 8, [[n] for n in (2, 3, 4, 5, 10, 12, 14, 16)], (1,) * 8, 2),
    ([70] * 7, [[n] for n in (2, 3, 4, 5, 10, 12, 14)], (1,) * 7, 0),
    ([70] * 8, [[n] for n in (2, 3, 4, 5, 10, 12, 14, 16)], (1,) * 4 + (3,) + (1,) * 3, 0),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_anywhere(monkeypatch, dtype):
    """Decode rows of even contexts share a call, beside prompts too; nothing between contexts
    is read, which NaN would show."""
    calls = []
    plan = twin.page_runs
    monkeypatch.setattr(twin, "page_runs", lambda *args: calls.append(plan(*args)) or calls[-1])
    for lengths, pages, rows, count in CONTEXTS:
        del calls[:]
        decode(dtype, lengths, pages, rows=rows)
        assert [len(found) for found in calls] == [count]
    del calls[:]
    decode(dtype, [70, 70], [[2], [3]], window=30)
    assert calls == [[]]


def test_a_masked_key_must_be_finite(monkeypatch):
    """Control: contexts of unlike pages would reach into what lies between them."""
    lengths, pages = [70, 200], [[1], [4, 5]]
    decode(torch.float32, lengths, pages)
    whole = twin.PageRun(slice(0, 2), 128, 3 * 128, 200, torch.zeros(2, 1, 1, 200))
    whole.mask[0, ..., 70:] = -1e30
    monkeypatch.setattr(twin, "page_runs", lambda *args: [whole])
    monkeypatch.setattr(twin, "all_finite", lambda *_: True)
    with pytest.raises(AssertionError, match="NaN"):
        decode(torch.float32, lengths, pages)


@pytest.mark.crossed(0.01)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", [(70, 200), (7, 60), (60,)], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 32), (torch.bfloat16, 16)], ids=str)
def test_queries_may_lie_anyhow(exact, kv_heads, rows, lengths, dtype, dim):
    """Part of a fused projection, or transposed by the attention interface: the same bits."""
    made = [Sequence.make(n, 6, kv_heads, dim, dtype, device="cpu") for n in lengths]
    chunks = [(sequence, len(sequence.q) - rows, len(sequence.q)) for sequence in made]
    work = lay_out(chunks, 128, exact=exact)
    wide = work.q[:, :4]
    found = []
    for q in (wide, wide.transpose(0, 1).contiguous().transpose(0, 1), wide.contiguous()):
        work.q = q
        found.append(work(attend=twin.paged_attention))
    assert all(torch.equal(out, found[0]) and out.is_contiguous() for out in found)
