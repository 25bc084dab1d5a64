"""Few rows of a pass that need not be canonical run by torch's default linear: no bit shows it.

``quick`` makes that linear split its sum elsewhere than oneDNN, whatever the CPU, and counts rows.
"""

import random

import pytest
import torch
from torch import nn

from tests.support.mixes import bits, crowd, needles, solo
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, doctor, fact_cache, linears
from tinyspec.linears import MKL_ROWS, Haste, by_cpu

CONFIG = EngineConfig(reference_rows=16, max_rows=64)


@pytest.fixture
def quick(monkeypatch):
    calls = []

    def linear(x, weight, bias=None):
        calls.append(x.shape[:-1].numel())
        cut = weight.shape[1] // 2
        wide, exact = x.double(), weight.double()
        out = (wide[..., :cut] @ exact[:, :cut].T).to(x.dtype)
        out = out + (wide[..., cut:] @ exact[:, cut:].T).to(x.dtype)
        return out if bias is None else out + bias

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr(linears, "_works", lambda: True)
    monkeypatch.setattr(linears, "cpu_has", lambda name: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(linears, "MKL_ELEMENTS", (1, 1 << 20))
    monkeypatch.setattr(fact_cache, "load", lambda key: None)
    monkeypatch.setattr(fact_cache, "store", lambda key, facts: None)
    return calls


def test_only_few_rows_and_only_in_haste(quick):
    haste = Haste()
    ((_, _, linear),) = by_cpu(nn.Sequential(nn.Linear(96, 40)), haste)
    with torch.no_grad():
        for rows, on, calls in ((4, False, 0), (4, True, 1), (12, True, 1), (13, True, 0)):
            haste.on = on
            del quick[:]
            linear(torch.randn(1, rows, 96))
            assert len(quick) == calls


def test_a_linear_without_haste_has_one_way(quick):
    ((_, _, linear),) = by_cpu(nn.Sequential(nn.Linear(96, 40)))
    linear(torch.randn(1, 4, 96))
    assert not quick


def test_small_buckets_are_canonical_on_demand(quick):
    report = doctor(tiny(), CONFIG)
    assert report
    for fact in report.facts.buckets:
        assert fact.canonical == (fact.rows > 1)
        assert bool(fact.tiled) == (1 < fact.rows <= MKL_ROWS)


@pytest.mark.parametrize("reference", [4, 16])
@pytest.mark.parametrize("verify", ["auto", "padded", "always"])
def test_bits_are_those_of_the_reference_bucket(quick, verify, reference):
    model = tiny()
    with Engine(model, config=EngineConfig(reference_rows=reference, verify="always")) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
    config = EngineConfig(reference_rows=reference, max_rows=64, max_sequences=40, verify=verify)
    with Engine(model, config=config) as engine:
        assert [bits(solo(engine, needle)) for needle in needles()] == alone
        requests = [*needles(), *crowd(random.Random(0), 20)]
        del quick[:]
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        assert [bits(output) for output in outputs][: len(alone)] == alone
        engine.generate(prompts(2))
        assert quick and max(quick) <= MKL_ROWS


def test_pages_of_quick_passes_serve_plain_requests_alone(quick):
    """Control: taken for canonical, they change the bits of a deterministic request."""
    plain, mine = (
        SamplingParams(max_new_tokens=60),
        SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True),
    )
    config = EngineConfig(reference_rows=16, max_rows=64, page_size=16)
    with Engine(tiny(), config=config) as engine:
        engine.contract.prove()
        first = engine.generate([[5, 6, 7]], plain)[0]
        tokens = [5, 6, 7, *first.completions[0].token_ids]
        warm = engine.generate([tokens], mine)[0]
        engine.release()
        assert bits(engine.generate([tokens], mine)[0]) == bits(warm)
        engine.release()
        engine.generate([[5, 6, 7]], plain)
        for key in [k for k in engine._scheduler.prefix._pages if not k[1]]:
            page = engine._scheduler.prefix._pages.pop(key)
            taken = (key[0], True, key[2])
            engine._scheduler.prefix._pages[taken] = page
            engine._scheduler.prefix._keys[page] = taken
        assert bits(engine.generate([tokens], mine)[0]) != bits(warm)
