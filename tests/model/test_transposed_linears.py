"""Canonical passes use the direct product of a transposed linear only where a probe finds its bits.

``alike`` gives the direct product the same bits at multiples of 32 rows and at no other count; fp64
sums, so that nothing else decides the bits.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.mixes import bits, crowd, needles, solo
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, doctor
from tinyspec.determinism import probe_cache
from tinyspec.determinism.probes import reference
from tinyspec.determinism.probes.bits import PositionResult
from tinyspec.determinism.probes.linears import set_direct
from tinyspec.model.cpu import linears
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.cpu.linears import TransposedLinear

CONFIG = EngineConfig(reference_rows=16, max_rows=64, max_sequences=40)
DTYPE = torch.bfloat16


def product(linear, rows, cuts=1):
    """[R, in] -> [R, out]; in ``cuts`` parts, each rounded."""
    parts = zip(rows.double().chunk(cuts, 1), linear.weight.double().chunk(cuts, 1), strict=True)
    return sum((part @ weight.T).to(rows.dtype) for part, weight in parts)


@pytest.fixture
def alike(monkeypatch, no_results_on_disk):
    """The row counts at which the direct product was used."""
    calls = []

    def by_rows(linear, rows):
        calls.append(len(rows))
        return product(linear, rows, 1 if len(rows) % 32 == 0 else 2)

    monkeypatch.setattr(TransposedLinear, "transposed_product", product)
    monkeypatch.setattr(TransposedLinear, "direct_product", by_rows)
    monkeypatch.setattr(linears, "cpu_has", lambda name: True)
    return calls


def direct_of(model):
    return {tuple(m.direct) for m in model.modules() if isinstance(m, TransposedLinear)}


@pytest.mark.parametrize("bias", [False, True])
def test_only_at_the_row_counts_that_are_alike(alike, bias):
    own = nn.Linear(96, 40, bias, dtype=DTYPE)
    fast_mode = FastMode()
    linear = TransposedLinear(own, fast_mode)
    linear.direct = (32, 64)
    x = torch.randn(1, 64, 96, dtype=DTYPE)
    with torch.no_grad():
        transposed = TransposedLinear(own)(x)
        for rows in (1, 16, 31, 32, 48, 64):
            del alike[:]
            found = linear(x[:, :rows])
            assert alike == [rows] * (rows in (32, 64))
            assert torch.equal(found, transposed[:, :rows])
    # In fast mode 48 rows take torch's default, and 32 do: the direct product, but for the bias.
    assert [linear.differs_in_fast_mode(rows) for rows in (8, 32, 48)] == [False, bias, True]


def test_the_probe_finds_them(alike):
    with Engine(tiny("llama", DTYPE), config=CONFIG) as engine:
        assert direct_of(engine.model) == {()}
        facts = engine.contract.probe()
        assert facts.canonical == facts.sizes and facts.sizes[-1] == 64
        assert set(facts.direct.values()) == {(32, 64)}
        assert direct_of(engine.model) == {(32, 64)}
        for fact in facts.buckets:
            assert bool(fact.tiled) == (fact.rows > 16 and fact.rows not in (32, 64))


def test_bits_are_those_of_transposed_linears(alike, monkeypatch):
    """Control: with the direct product where it is not alike, requests have other bits."""
    model = tiny("llama", DTYPE)
    requests = [*needles(), *crowd(random.Random(0), 20)]

    def found(engine):
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        return [bits(output) for output in outputs][: len(needles())]

    with Engine(model, config=CONFIG) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
        engine.release()
        del alike[:]
        assert found(engine) == alone
        assert {32, 64} & set(alike), "canonical passes used the direct product"
        set_direct(engine.runner, dict.fromkeys(engine.contract.results.direct, range(17, 65)))
        engine.release()
        assert found(engine) != alone
        set_direct(engine.runner, {})
        engine.release()
        del alike[:]
        assert found(engine) == alone
        assert not alike


def test_facts_on_disk_say_where(alike, monkeypatch):
    kept = {}
    monkeypatch.setattr(probe_cache, "store", kept.__setitem__)
    monkeypatch.setattr(probe_cache, "load", kept.get)
    for _ in range(2):
        with Engine(tiny("llama", DTYPE), config=CONFIG) as engine:
            engine.contract.ensure()
            assert direct_of(engine.model) == {(32, 64)}
    assert len(kept) == 1


def test_without_a_proof_none(alike, monkeypatch):
    """Where attention turns out unsound, what linears were found to do is taken back, and left
    alone when read from disk."""
    kept = {}
    monkeypatch.setattr(probe_cache, "store", kept.__setitem__)
    model = tiny("llama", DTYPE)
    with Engine(model, config=CONFIG) as engine:
        engine.contract.ensure()
        assert direct_of(model) == {(32, 64)}
        broken = PositionResult("attention", 16, 1, 1, 0, 0)
        monkeypatch.setattr(reference, "probe_attention", lambda runner: [broken])
        assert engine.contract.probe(fresh=True).unsound
        assert direct_of(model) == {()}
    monkeypatch.setattr(probe_cache, "load", kept.get)
    with Engine(model, config=CONFIG) as engine:
        assert engine.contract.probe().unsound
        assert direct_of(model) == {()}


def test_found_anew(alike, monkeypatch):
    """What used the direct product before does not decide what a bucket is compared with."""
    with Engine(tiny("llama", DTYPE), config=CONFIG) as engine:
        engine.contract.ensure()
        monkeypatch.setattr(
            TransposedLinear, "direct_product", lambda linear, rows: product(linear, rows, 2)
        )
        facts = engine.contract.probe(fresh=True)
        assert facts.direct == {} and direct_of(engine.model) == {()}
        assert facts.canonical == facts.sizes


def test_the_reference_bucket_is_transposed(alike):
    """Canonical results are those of the transposed product, also where the reference bucket has so
    many rows that the other way would be quicker, or both are alike."""
    for rows in (24, 32):
        config = replace(CONFIG, reference_rows=rows)
        with Engine(tiny("llama", DTYPE), config=config) as engine:
            facts = engine.contract.probe()
            assert set(facts.direct.values()) == {tuple({32, 64} - {rows})}
            assert facts.canonical == facts.sizes


def test_by_this_machine():
    """Whatever its probe finds, the buckets are canonical end to end."""
    facts = doctor(tiny("llama", DTYPE), CONFIG, fresh=True).facts
    assert not facts.unsound and 64 in facts.canonical
