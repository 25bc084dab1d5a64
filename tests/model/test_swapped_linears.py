"""Canonical passes swap the operands of a linear only where a probe finds the same bits.

``alike`` gives the swapped product the same bits at multiples of 32 rows and at no other count, and
has it faster from 17 rows on; fp64 sums, so that nothing else decides the bits.
"""

import random
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from tinyspec.determinism.probes.linears import set_swapped
from torch import nn

from tests.support.mixes import bits, crowd, needles, solo
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, doctor
from tinyspec.determinism import probe_cache
from tinyspec.determinism.probes import reference
from tinyspec.determinism.probes.bits import PositionResult
from tinyspec.model.cpu import linears
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.cpu.linears import CpuLinear, OneDnnLinear, TransposedLinear

CONFIG = EngineConfig(reference_rows=16, max_rows=64, max_sequences=40)
KINDS = {torch.bfloat16: TransposedLinear, torch.float32: OneDnnLinear}


def product(linear, x, cuts=1):
    """[..., in] -> [..., out]; in ``cuts`` parts, each rounded."""
    parts = zip(x.double().chunk(cuts, -1), linear.weight.double().chunk(cuts, 1), strict=True)
    out = sum((part @ weight.T).to(x.dtype) for part, weight in parts)
    return out if linear.bias is None else out + linear.bias


@pytest.fixture(params=KINDS, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def alike(monkeypatch, no_results_on_disk, dtype):
    """The row counts at which operands were swapped, but for fast mode."""
    calls = []

    def by_rows(linear, x):
        rows = x.numel() // x.shape[-1]
        if not linear._fast_mode.on:
            calls.append(rows)
        return product(linear, x, 1 if rows % 32 == 0 else 2)

    monkeypatch.setattr(KINDS[dtype], "product", product)
    monkeypatch.setattr(KINDS[dtype], "product_swapped", by_rows)
    monkeypatch.setattr(KINDS[dtype], "faster_swapped", lambda linear, rows: rows > 16)
    monkeypatch.setattr(linears, "_works", lambda: True)
    monkeypatch.setattr(linears, "cpu_has", lambda name: name == "amx_bf16")
    return calls


def swapped_of(model):
    return {tuple(m.swapped) for m in model.modules() if isinstance(m, CpuLinear)}


def assert_canonical(facts, dtype):
    """Every bucket; in fp32 other operators of this CPU may break some of few rows, or of odd
    numbers of them."""
    assert facts.sizes[-1] == 64 and {32, 64} <= set(facts.canonical)
    assert facts.canonical == facts.sizes or dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
def test_only_at_the_row_counts_that_are_alike(alike, dtype, bias):
    own, kind = nn.Linear(96, 40, bias, dtype=dtype), KINDS[dtype]
    linear = kind(own, FastMode())
    linear.swapped = (32, 64)
    x = torch.randn(1, 64, 96, dtype=dtype)
    with torch.no_grad():
        one_way = kind(own)(x)
        for rows in (1, 16, 31, 32, 48, 64):
            del alike[:]
            found = linear(x[:, :rows])
            assert alike == [rows] * (rows in (32, 64))
            assert torch.equal(found, one_way[:, :rows])
    # In fast mode 48 rows take another way, and 32 rows in bf16 torch's default: the same product,
    # but for the rounding of the bias.
    rounds = bias and dtype == torch.bfloat16
    assert [linear.differs_in_fast_mode(rows) for rows in (8, 32, 48)] == [False, rounds, True]


def test_the_probe_finds_them(alike, dtype):
    with Engine(tiny("llama", dtype), config=CONFIG) as engine:
        assert swapped_of(engine.model) == {()}
        facts = engine.contract.probe()
        assert_canonical(facts, dtype)
        assert set(facts.swapped.values()) == {(32, 64)}
        assert swapped_of(engine.model) == {(32, 64)}
        for fact in facts.buckets:
            if fact.canonical and fact.rows >= 16:
                assert bool(fact.tiled) == (fact.rows > 16 and fact.rows not in (32, 64))


def test_bits_are_those_of_one_way(alike, dtype, monkeypatch):
    """Control: with swapped operands where that is not alike, requests have other bits."""
    model = tiny("llama", dtype)
    requests = [*needles(), *crowd(random.Random(0), 20)]

    def found(engine):
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        return [bits(output) for output in outputs][: len(needles())]

    with Engine(model, config=CONFIG) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
        engine.release()
        del alike[:]
        assert found(engine) == alone
        assert {32, 64} & set(alike), "canonical passes swapped operands"
        set_swapped(engine.runner, dict.fromkeys(engine.contract.results.swapped, range(17, 65)))
        engine.release()
        assert found(engine) != alone
        set_swapped(engine.runner, {})
        engine.release()
        del alike[:]
        assert found(engine) == alone
        assert not alike


def test_facts_on_disk_say_where(alike, dtype, monkeypatch):
    kept = {}
    monkeypatch.setattr(probe_cache, "store", kept.__setitem__)
    monkeypatch.setattr(probe_cache, "load", kept.get)
    for _ in range(2):
        with Engine(tiny("llama", dtype), config=CONFIG) as engine:
            engine.contract.ensure()
            assert swapped_of(engine.model) == {(32, 64)}
    assert len(kept) == 1


def test_without_a_proof_none(alike, dtype, monkeypatch):
    """Where attention turns out unsound, what linears were found to do is taken back, and left
    alone when read from disk."""
    kept = {}
    monkeypatch.setattr(probe_cache, "store", kept.__setitem__)
    model = tiny("llama", dtype)
    with Engine(model, config=CONFIG) as engine:
        engine.contract.ensure()
        assert swapped_of(model) == {(32, 64)}
        broken = PositionResult("attention", 16, 1, 1, 0, 0)
        monkeypatch.setattr(reference, "probe_attention", lambda runner: [broken])
        assert engine.contract.probe(fresh=True).unsound
        assert swapped_of(model) == {()}
    monkeypatch.setattr(probe_cache, "load", kept.get)
    with Engine(model, config=CONFIG) as engine:
        assert engine.contract.probe().unsound
        assert swapped_of(model) == {()}


def test_found_anew(alike, dtype, monkeypatch):
    """What was swapped before does not decide what a bucket is compared with."""
    with Engine(tiny("llama", dtype), config=CONFIG) as engine:
        engine.contract.ensure()
        in_two = partialmethod(product, cuts=2)
        monkeypatch.setattr(KINDS[dtype], "product_swapped", in_two)
        facts = engine.contract.probe(fresh=True)
        assert facts.swapped == {} and swapped_of(engine.model) == {()}
        assert_canonical(facts, dtype)


def test_the_reference_bucket_is_not_swapped(alike, dtype):
    """Canonical results are those of one product, also where the reference bucket has so many rows
    that the other way would be faster, or both are alike."""
    for rows in (24, 32):
        config = replace(CONFIG, reference_rows=rows)
        with Engine(tiny("llama", dtype), config=config) as engine:
            facts = engine.contract.probe()
            assert set(facts.swapped.values()) == {tuple({32, 64} - {rows})}
            assert_canonical(facts, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (1, 7, 96), (2, 3, 96)], ids=str)
def test_onednn_swapped(shape, bias):
    """By oneDNN, as near as fp32 can tell, and laid out as unswapped."""
    own = nn.Linear(96, 40, bias)
    x = torch.randn(shape)
    with torch.no_grad():
        found, exact = OneDnnLinear(own).product_swapped(x), own.double()(x.double())
    assert found.shape == exact.shape and found.is_contiguous() and found.dtype == torch.float32
    assert (found.double() - exact).norm() <= 2**-20 * exact.norm()


def test_where_swapping_is_faster():
    """Deep linears from 4 rows to 64 in whole vectors, others up to 16; of one row none."""
    deep, shallow = OneDnnLinear(nn.Linear(1024, 8)), OneDnnLinear(nn.Linear(512, 8))
    rows = [1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96]
    assert [n for n in rows if deep.faster_swapped(n)] == [4, 8, 12, 16, 32, 48, 64]
    assert [n for n in rows if shallow.faster_swapped(n)] == [12, 16]


def test_by_this_machine(dtype):
    """Whatever its probe finds, the buckets are canonical end to end."""
    facts = doctor(tiny("llama", dtype), CONFIG, fresh=True).facts
    assert not facts.unsound and 64 in facts.canonical
