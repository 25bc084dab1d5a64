"""Attention of rows that need not be canonical: right, and nothing but the right rows take it."""

import pytest
import torch

from tests.kernels.test_twin_attention import (
    DTYPES,
    LENGTHS,
    SHAPES,
    dense,
    run,
    sdpa_error,
    sequences,
)
from tests.support.tiny import prompts, tiny
from tests.support.tolerances import norm_as_good_as_torch, within_units
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins import attention as twin
from tinyspec.kernels.twins import attention_plain

SCORES = (
    {},
    {"window": 50},
    {"window": 140},
    {"chunk": 50},
    {"chunk": 140},
    {"softcap": 20.0},
    {"sinks": True},
)
# Rows of each length that the pass holds: prompts, parts of prompts, decode rows, two by two.
ROWS = (
    [(n, length) for n, length in enumerate(LENGTHS)],
    [(n, 1) for n in range(len(LENGTHS))],
    [(5, 300), (1, 1), (4, 3), (2, 1), (5, 40), (3, 128), (0, 1)],
    [(4, 129)],
)


@pytest.mark.crossed(0.2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_matches_reference(dtype, shape, scores):
    """Error against fp64 (2-norm) at most twice torch's own in the dtype, written out or SDPA."""
    for chosen in ROWS:
        for page_size, scattered in ((16, True), (128, True), (128, False), (256, True)):
            outs = run(dtype, shape, chosen, scores, page_size, len(chosen), scattered, exact=False)
            for out, (n, rows) in zip(outs, chosen, strict=True):
                q, k, v = sequences(dtype, shape)[n]
                exact = dense(q, k, v, torch.float64, **scores)[len(q) - rows :]
                same = (dense(q, k, v, dtype, **scores)[len(q) - rows :].double() - exact).norm()
                if rows == len(q):
                    same = max(same, sdpa_error(q, k, v, scores))
                assert norm_as_good_as_torch(out, same, exact)


def test_other_bits():
    """Control: were the two the same, nothing would tell who takes which."""
    for dtype in DTYPES:
        exact, plain = (
            run(dtype, SHAPES[0], [(5, 300)], {}, exact=exact)[0] for exact in (True, False)
        )
        assert not torch.equal(exact, plain)


@pytest.mark.parametrize("verify", ["padded", "always"])
def test_who_takes_it(monkeypatch, verify):
    """Plain rows, and drafts of deterministic ones; canonical passes never."""
    taken = []
    plan = twin.plain_calls
    monkeypatch.setattr(twin, "plain_calls", lambda *args: taken.append(1) or plan(*args))
    with Engine(tiny(), config=EngineConfig(reference_rows=16, verify=verify)) as engine:
        for deterministic, found in ((False, True), (True, verify == "always")):
            engine.generate(prompts(2), SamplingParams(max_new_tokens=1, deterministic=True))
            del taken[:]  # whatever is probed, is probed by now
            params = SamplingParams(max_new_tokens=12, deterministic=deterministic)
            engine.generate(prompts(2), params)
            assert bool(taken) == found


def results_of(monkeypatch, name):
    """What a function of plain attention returns from now on, call by call."""
    found = []
    function = getattr(attention_plain, name)

    def note(*args):
        found.append(function(*args))
        return found[-1]

    monkeypatch.setattr(attention_plain, name, note)
    return found


def decode(dtype, lengths, pages, size, window=0, rows=()):
    """Each of the sequences' last rows, on these pages of a cache that is NaN everywhere else.

    rows: how many of each; one where nothing is said.
    """
    heads, group, dim = 2, 3, 32
    generator = torch.Generator().manual_seed(0)
    caches = torch.full((2, 12, size, heads, dim), torch.nan, dtype=dtype)
    expected = []
    rows = rows or [1] * len(lengths)
    starts = [sum(rows[:n]) for n in range(len(rows) + 1)]
    q = torch.randn(starts[-1], heads * group, dim, generator=generator).to(dtype)
    for n, (length, own) in enumerate(zip(lengths, pages, strict=True)):
        caches[:, own] = 0
        kv = torch.randn(2, length, heads, dim, generator=generator).to(dtype)
        slots = [own[p // size] * size + p % size for p in range(length)]
        for cache, values in zip(caches, kv, strict=True):
            cache.flatten(0, 1)[slots] = values
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


CONTEXTS = (  # lengths, pages, rows of each, whether the rows that are alone run in one call
    ([70], [[3]], (1,), True),
    ([200], [[3, 4]], (1,), True),
    ([70, 70, 70], [[2], [3], [4]], (1, 1, 1), True),
    ([70, 5, 128], [[2], [4], [6]], (1, 1, 1), True),
    ([130, 256], [[1, 2], [5, 6]], (1, 1), True),
    ([200], [[3, 1]], (1,), False),
    ([70, 70, 70], [[2], [3], [5]], (1, 1, 1), False),
    ([70, 70], [[3], [2]], (1, 1), False),
    ([70, 200], [[1], [4, 5]], (1, 1), False),
    ([70, 70, 90, 131], [[2], [3], [5], [7, 8]], (1, 1, 90, 31), True),
    ([40, 70, 70, 70], [[1], [3], [5], [7]], (40, 1, 1, 1), True),
    ([70, 70, 90, 131], [[2], [4], [5], [7, 8]], (1, 1, 1, 31), False),
    ([70, 90, 70], [[2], [3], [4]], (1, 90, 1), False),
    ([90, 131], [[5], [7, 9]], (90, 31), False),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_anywhere(monkeypatch, dtype):
    """Decode rows of even contexts run in one call, beside prompts too; nothing between contexts
    is read, which NaN would show."""
    calls = results_of(monkeypatch, "_decode_call")
    for lengths, pages, rows, even in CONTEXTS:
        del calls[:]
        decode(dtype, lengths, pages, 128, rows=rows)
        assert [call is not None for call in calls] == ([even] if 1 in rows else [])
    del calls[:]
    decode(dtype, [70, 70], [[2], [3]], 128, window=30)
    assert calls == [None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_rows", [512, 32])
def test_rows_of_prompts(monkeypatch, dtype, mask_rows):
    """Behind keys that they all attend to, in a call apart, and cut where they need masks; pages
    that end within the context, and lie anywhere."""
    monkeypatch.setattr(attention_plain, "APART", 16)
    monkeypatch.setattr(attention_plain, "MASK_ROWS", mask_rows)
    for length, rows, size, pages in (
        (300, 44, 128, [3, 4, 5]),
        (300, 40, 128, [3, 4, 5]),
        (131, 20, 24, [2, 7, 4, 5, 11, 8]),
        (112, 80, 16, [2, 9, 4, 5, 11, 8, 1]),
        (112, 112, 128, [2]),
        (101, 101, 24, [1, 2, 3, 4, 5]),
        (112, 12, 128, [2]),
    ):
        calls = results_of(monkeypatch, "_prompt_call")
        decode(dtype, [length], [pages], size, rows=[rows])
        assert (calls[0].apart > 0) == (16 <= rows < length)
        decode(dtype, [length], [pages], size, window=50, rows=[rows])
        assert not calls[-1].apart


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("place", [10, 70], ids=["apart", "behind"])
def test_what_is_not_finite_shows_apart_too(monkeypatch, place, which, value):
    """In the rows that attend to it alone, as in one call."""
    q, *kv = sequences(torch.float32, SHAPES[0])[2]
    q = q[64:112]
    caches = [x[:112].clone()[None].contiguous() for x in kv]
    caches[which][0, place, 0, 0] = value
    metadata = AttentionMetadata.of([(64, 112)], [[0]], 112, exact=False)
    found = []
    for least in (1 << 20, 16):
        monkeypatch.setattr(attention_plain, "APART", least)
        metadata.derived.clear()
        found.append(twin.paged_attention(q, *caches, metadata, scale=1 / 8).isfinite())
    assert torch.equal(*found) and not found[0].all()
    assert found[0][: max(0, place - 64)].all()


def test_a_masked_key_must_be_finite(monkeypatch):
    """Control: contexts of unlike pages would reach into what lies between them."""
    lengths, pages = [70, 200], [[1], [4, 5]]
    decode(torch.float32, lengths, pages, 128)
    whole = attention_plain.DecodeCall(slice(0, 2), 128, 3 * 128, 200, torch.zeros(2, 1, 1, 200))
    whole.mask[0, ..., 70:] = -1e30
    monkeypatch.setattr(attention_plain, "_decode_call", lambda *args: whole)
    monkeypatch.setattr(attention_plain, "all_finite", lambda *_: True)
    with pytest.raises(AssertionError, match="NaN"):
        decode(torch.float32, lengths, pages, 128)


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
