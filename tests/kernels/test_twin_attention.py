"""The twin of paged attention: right, and a row's bits depend on its own sequence alone.

The test that matters: a row decoded alone equals, bit for bit, the same row inside its prompt, at
every tile and window boundary, whatever the page size, the pages and the other sequences. Plain
decode rows are right too, and canonical ones never go their way.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import cases
from tests.support.tolerances import OPERATOR, close, norm_as_good_as_torch, within_units
from tinyspec.determinism.rows import same_bits
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins import attention as twin
from tinyspec.kernels.twins import attention_plan
from tinyspec.kernels.twins.attention import cut_keeps_bits

LENGTHS = (1, 5, 127, 128, 129, 300)
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
    """q, k, v of one whole sequence per length."""
    dim, kv_heads, group = shape
    g = torch.Generator().manual_seed(1)

    def rand(n, heads):
        return torch.randn(n, heads, dim, generator=g).to(dtype)

    return [(rand(n, kv_heads * group), rand(n, kv_heads), rand(n, kv_heads)) for n in LENGTHS]


def run(dtype, shape, chosen, scores, page_size=128, seed=0, scattered=True, exact=True, step=1):
    """Attention of the last ``rows`` rows of each chosen sequence: [(index, rows), ...].

    Not scattered: on every ``step``th page of the cache.
    """
    dim, kv_heads, group = shape
    g = torch.Generator().manual_seed(seed)
    held = [sequences(dtype, shape)[n] for n, _ in chosen]
    needs = [-(-len(q) // page_size) for q, _, _ in held]
    pool = sum(needs) * (3 if scattered else step)
    free = torch.randperm(pool, generator=g).tolist() if scattered else list(range(0, pool, step))
    # What the pages hold beside the sequences is large: it must not show.
    caches = [
        100 * torch.randn(pool, page_size, kv_heads, dim, generator=g).to(dtype) for _ in range(2)
    ]
    tables, starts, rows = [], [0], []
    for (q, k, v), need, (_, count) in zip(held, needs, chosen, strict=True):
        tables.append([free.pop() for _ in range(need)])
        pages = torch.tensor(tables[-1])
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[: len(k)]
        for cache_, values in zip(caches, (k, v), strict=True):
            cache_.flatten(0, 1)[slots] = values
        rows.append(q[len(q) - count :])
        starts.append(starts[-1] + count)
    padding = torch.randn(3, kv_heads * group, dim).to(dtype)
    spans = [(len(q) - count, len(q)) for (q, _, _), (_, count) in zip(held, chosen, strict=True)]
    metadata = AttentionMetadata.of(spans, tables, page_size, exact=exact)
    scores = dict(scores)
    if scores.pop("sinks", None):
        scores["sinks"] = torch.linspace(-1, 2, kv_heads * group)
    q = torch.cat([*rows, padding])
    out = twin.paged_attention(q, *caches, metadata, scale=SCALE * dim**-0.5, **scores)
    assert torch.equal(out[starts[-1] :], torch.zeros_like(padding))
    return [out[a:b] for a, b in pairwise(starts)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_with_holes_between_them(dtype, shape):
    """Dense in the cache but for what is another's, and of one tile each: where there is but one KV
    head, too."""
    chosen = [(1, 5), (2, 5), (3, 5), (0, 1)]
    scattered = run(dtype, shape, chosen, {})
    for step in (1, 2):
        found = run(dtype, shape, chosen, {}, scattered=False, step=step)
        assert all(map(torch.equal, found, scattered))


def dense(q, k, v, dtype, sinks=False, **scores):
    """The definition, in ``dtype``."""
    found = torch.linspace(-1, 2, q.shape[1]) if sinks else None
    scale = SCALE * q.shape[-1] ** -0.5
    return cases.dense(q, k, v, dtype, scale=scale, sinks=found, **scores)


def sdpa_error(q, k, v, scores):
    """Error (2-norm) of torch's scaled_dot_product_attention on the same rows."""
    bounds = {name: scores[name] for name in ("window", "chunk") if name in scores}
    group = q.shape[1] // k.shape[1]
    heads = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
    heads = [x.transpose(0, 1)[None] for x in heads]
    out = F.scaled_dot_product_attention(
        *heads, attn_mask=cases.sees(len(q), **bounds), scale=SCALE * q.shape[-1] ** -0.5
    )
    out = out[0].transpose(0, 1)
    return (out.double() - dense(q, k, v, torch.float64, **bounds)).norm()


@pytest.mark.crossed(0.05)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_matches_reference(dtype, shape, scores):
    """Error against fp64 (2-norm) at most twice torch's own in the dtype, written out or SDPA."""
    outs = run(dtype, shape, [(n, length) for n, length in enumerate(LENGTHS)], scores)
    for out, (q, k, v) in zip(outs, sequences(dtype, shape), strict=True):
        exact = dense(q, k, v, torch.float64, **scores)
        same = (dense(q, k, v, dtype, **scores).double() - exact).norm()
        same = max(same, sdpa_error(q, k, v, scores))
        assert norm_as_good_as_torch(out, same, exact)


@pytest.mark.crossed(0.1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_row_invariant(dtype, shape, scores):
    everyone = [(n, length) for n, length in enumerate(LENGTHS)]
    whole = run(dtype, shape, everyone, scores)
    mixes = [
        [(n, 1) for n in range(len(LENGTHS))],
        [(5, 1)],
        [(4, 3), (5, 40)],
        [(5, 2), (1, 5), (3, 128)],
    ]
    for page_size, scattered in ((16, True), (128, True), (128, False), (256, True)):
        for chosen in mixes:
            outs = run(dtype, shape, chosen, scores, page_size, page_size, scattered)
            for (n, rows), out in zip(chosen, outs, strict=True):
                assert torch.equal(out, whole[n][len(whole[n]) - rows :])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_pages_of_others_are_not_read(page_size, exact):
    """Not even masked, for their values may be NaN: neither behind a short sequence's last page,
    where the table is filled up with zeros, nor between two sequences."""
    lengths = (5, 300, 129)
    needs = [-(-length // page_size) for length in lengths]
    first = [1 + sum(needs[:n]) + n for n in range(len(needs))]
    tables = [list(range(page, page + need)) for page, need in zip(first, needs, strict=True)]
    caches = torch.full((2, 2 + sum(needs) + len(needs), page_size, 2, 64), torch.nan)
    for pages in tables:
        caches[:, pages] = torch.randn(2, len(pages), page_size, 2, 64)
    q = torch.randn(3, 4, 64)
    spans = [(length - 1, length) for length in lengths]
    metadata = AttentionMetadata.of(spans, tables, page_size, exact=exact)
    assert twin.paged_attention(q, *caches, metadata, scale=1 / 8).isfinite().all()
    caches[:, first[1]] = torch.nan  # control: a page of its own
    assert not twin.paged_attention(q, *caches, metadata, scale=1 / 8).isfinite().all()


@pytest.mark.parametrize(
    "bound", [{}, *({kind: n} for kind in ("window", "chunk") for n in (7, 128, 150))], ids=str
)
def test_every_row_alone_equals_itself_in_the_prompt(bound):
    """Row by row through a sequence of 300, across every tile, window and chunk boundary."""
    dtype, shape = torch.float32, SHAPES[0]
    whole = run(dtype, shape, [(5, 300)], bound)[0]
    q, k, v = sequences(dtype, shape)[5]
    caches = [torch.zeros(3, 128, 2, 64) for _ in range(2)]
    for cache_, values in zip(caches, (k, v), strict=True):
        cache_.flatten(0, 1)[:300] = values
    for position in range(300):
        metadata = AttentionMetadata.of([(position, position + 1)], [[0, 1, 2]], 128)
        row = q[position : position + 1]
        out = twin.paged_attention(row, *caches, metadata, scale=SCALE / 8, **bound)
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


@pytest.mark.parametrize("limit, number", [("ALONE_TILES", 2), ("MAX_TILE_ROWS", 256)])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_calls_are_cut_without_a_trace(monkeypatch, scores, limit, number):
    """More calls, the same bits."""
    calls = []
    attend = twin.attend_tiles
    monkeypatch.setattr(twin, "attend_tiles", lambda *a, **k: calls.append(1) or attend(*a, **k))
    chosen = [(n, length) for n, length in enumerate(LENGTHS)]
    before = run(torch.float32, SHAPES[0], chosen, scores, scattered=False)
    together = len(calls)
    monkeypatch.setattr(attention_plan, limit, number)
    after = run(torch.float32, SHAPES[0], chosen, scores, scattered=False)
    assert len(calls) - together > together
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# share: of values that are not 0. The sinks outweigh all keys.
@pytest.mark.parametrize(
    ("scores", "share"), [({}, 0.2), ({"softcap": 5.0}, 0.2), ({"sinks": 9.0}, 1.0)], ids=str
)
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (4, 2)], ids=str)
def test_the_sign_of_zero(heads, scores, share):
    """Results that underflow to -0.0, within a tile or where the sum over tiles is rounded to fp16:
    the same bits in a call of one tile and in one of several."""
    q_heads, kv_heads = heads
    least = -(2.0**-24)  # of fp16
    caches = torch.randn(2, 3, 128, kv_heads, 64).half()
    caches[1] = torch.where(torch.rand(caches[1].shape) < share, least, 0.0).half()
    q = torch.randn(2, q_heads, 64).half()
    scores = {"scale": 1 / 8, **scores}
    if "sinks" in scores:
        scores["sinks"] = torch.full((q_heads,), scores["sinks"])
    spans, tables = [(99, 100), (199, 200)], [[0], [1, 2]]
    both = AttentionMetadata.of(spans, tables, 128)
    one = AttentionMetadata.of(spans[:1], tables[:1], 128)
    together = twin.paged_attention(q, *caches, both, **scores)[:1]
    alone = twin.paged_attention(q[:1], *caches, one, **scores)
    assert (alone == 0).any()
    assert same_bits(alone, together)


# Rows of each length that the pass holds: prompts, parts of prompts, decode rows, two by two.
ROWS = (
    [(n, length) for n, length in enumerate(LENGTHS)],
    [(n, 1) for n in range(len(LENGTHS))],
    [(5, 300), (1, 1), (4, 3), (2, 1), (5, 40), (3, 128), (0, 1)],
)


@pytest.mark.crossed(0.2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_plain_rows_match_reference(dtype, shape, scores):
    """Those that need not be canonical; prompts have the bits of canonical ones."""
    for chosen in ROWS:
        for page_size, scattered in ((16, True), (128, False)):
            given = dtype, shape, chosen, scores, page_size, len(chosen), scattered
            outs = run(*given, exact=False)
            for out, own, (n, rows) in zip(outs, run(*given), chosen, strict=True):
                q, k, v = sequences(dtype, shape)[n]
                exact = dense(q, k, v, torch.float64, **scores)[len(q) - rows :]
                same = (dense(q, k, v, dtype, **scores)[len(q) - rows :].double() - exact).norm()
                assert rows == 1 or torch.equal(out, own)
                assert norm_as_good_as_torch(out, max(same, sdpa_error(q, k, v, scores)), exact)


def decode(dtype, lengths, pages, size, window=0, rows=()):
    """Each of the sequences' last rows, on these pages of a cache that is NaN everywhere else.

    rows: how many of each; one where nothing is said.
    """
    heads, group, dim = 2, 3, 32
    generator = torch.Generator().manual_seed(0)
    caches = torch.full((2, 18, size, heads, dim), torch.nan, dtype=dtype)
    expected = []
    rows = rows or [1] * len(lengths)
    starts = [sum(rows[:n]) for n in range(len(rows) + 1)]
    q = torch.randn(starts[-1], heads * group, dim, generator=generator).to(dtype)
    for n, (length, own) in enumerate(zip(lengths, pages, strict=True)):
        caches[:, own] = 0
        kv = torch.randn(2, length, heads, dim, generator=generator).to(dtype)
        slots = [own[p // size] * size + p % size for p in range(length)]
        for held, values in zip(caches, kv, strict=True):
            held.flatten(0, 1)[slots] = values
        for row in range(starts[n], starts[n + 1]):
            end = length - (starts[n + 1] - row) + 1
            seen = kv[:, max(0, end - window) if window else 0 : end].double()
            k, v = seen.repeat_interleave(group, dim=2)
            weights = (torch.einsum("hd,lhd->hl", q[row].double(), k) * dim**-0.5).softmax(-1)
            expected.append(torch.einsum("hl,lhd->hd", weights, v))
    spans = [(length - count, length) for length, count in zip(lengths, rows, strict=True)]
    metadata = AttentionMetadata.of(spans, pages, size, exact=False)
    found = twin.paged_attention(q, *caches, metadata, scale=dim**-0.5, window=window)
    assert within_units(found, torch.stack(expected), 16), "NaN included"


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
        decode(dtype, lengths, pages, 128, rows=rows)
        assert [len(found) for found in calls] == [count]
    del calls[:]
    decode(dtype, [70, 70], [[2], [3]], 128, window=30)
    assert calls == [[]]


def test_a_masked_key_must_be_finite(monkeypatch):
    """Control: contexts of unlike pages would reach into what lies between them."""
    lengths, pages = [70, 200], [[1], [4, 5]]
    decode(torch.float32, lengths, pages, 128)
    whole = twin.PageRun(slice(0, 2), 128, 3 * 128, 200, torch.zeros(2, 1, 1, 200))
    whole.mask[0, ..., 70:] = -1e30
    monkeypatch.setattr(twin, "page_runs", lambda *args: [whole])
    monkeypatch.setattr(twin, "all_finite", lambda *_: True)
    with pytest.raises(AssertionError, match="NaN"):
        decode(torch.float32, lengths, pages, 128)


@pytest.mark.crossed(0.01)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", [(70, 200), (7, 60), (60,)], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 32), (torch.bfloat16, 16)], ids=str)
def test_queries_may_lie_anyhow(exact, kv_heads, rows, lengths, dtype, dim):
    """Part of a fused projection, or transposed by the attention interface: the same bits."""
    heads, size = 4, 128
    caches = torch.randn(2, 6, size, kv_heads, dim).to(dtype)
    wide = torch.randn(len(lengths) * rows, heads + 2, dim).to(dtype)[:, :heads]
    transposed = wide.transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for q in (wide, transposed, wide.contiguous()):
        spans = [(length - rows, length) for length in lengths]
        tables = [[1], [3, 4]][: len(spans)]
        metadata = AttentionMetadata.of(spans, tables, size, exact=exact)
        found.append(twin.paged_attention(q, *caches, metadata, scale=dim**-0.5))
    assert all(torch.equal(out, found[0]) and out.is_contiguous() for out in found)
