"""Linears in tiles of rows: buckets whose plain linears have other bits are canonical all the same.

``breaks_above`` makes torch's own linear split its sum elsewhere in passes of more than 16 rows, as
some matrix libraries do; fp64 partial sums, so that nothing else decides the bits.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.cases import drain
from tests.support.mixes import bits, crowd, needles, solo
from tests.support.sensitive import two_sums
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.model import cpu_linears as linears
from tinyspec.model.linears import RowTiles


@pytest.mark.parametrize("gradient", [True, False])
def test_tiles_have_the_bits_of_passes_of_their_size(gradient):
    """Of frozen weights, too, by which torch multiplies a part of [1, R, in] as a batch."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 1408, bias=False, dtype=torch.bfloat16).requires_grad_(gradient)
    x = torch.randn(1, 64, 512).to(torch.bfloat16)
    whole = [part[0].clone()[None] for part in x.split(32, dim=1)]
    with torch.no_grad():
        expected = torch.cat([linear(part) for part in whole], dim=1)
        RowTiles(SimpleNamespace(canonical=True)).bind([linear], 32)
        assert torch.equal(linear(x), expected)


@pytest.fixture
def breaks_above(monkeypatch, no_results_on_disk):
    """torch's linear with other partial sums above 16 rows; counts its row counts."""
    calls = []

    def linear(x, weight, bias=None):
        rows = x.shape[:-1].numel()
        calls.append(rows)
        return two_sums(x, weight, bias, weight.shape[1] // (2 if rows <= 16 else 3))

    monkeypatch.setattr(nn.functional, "linear", linear)
    # Canonical passes go by it, whatever the CPU, and there is no other way for few rows.
    monkeypatch.setattr(linears, "cpu_has", lambda name: False)
    return calls


def run(engine, requests):
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
    return [bits(output) for output in outputs]


@pytest.mark.parametrize("verify", first(2, ["auto", "direct", "padded"], 2))
def test_bits_are_those_of_the_reference_bucket(breaks_above, verify):
    """``verify="always"`` commits from the reference bucket alone: the oracle of the others."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    model = tiny(dtype=torch.bfloat16)
    # 24 rows are no whole number of tiles of 16, and every size must be canonical for "direct".
    reference = 8 if verify == "direct" else 16
    config = EngineConfig(reference_rows=reference, max_rows=32, max_sequences=24, verify=verify)
    with Engine(model, config=replace(config, verify="always")) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[::2]]
    with Engine(model, config=config) as engine:
        del breaks_above[:]
        assert run(engine, requests)[: len(alone)] == alone
        canonical = [record for record in engine.records if record.way in ("direct", "padded")]
        assert any(record.bucket > 16 for record in canonical)
    assert not any("forward" in vars(module) for module in model.modules())


def test_control_without_tiles_the_bits_differ(breaks_above, monkeypatch):
    """The same passes with linears run whole: other bits, so the comparison above can fail."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    config = EngineConfig(reference_rows=16, max_rows=32, max_sequences=24, verify="padded")
    with Engine(tiny(dtype=torch.bfloat16), config=config) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[::2]]
        engine.release()
        engine.served.tiles.unbind()
        monkeypatch.setattr(engine.contract, "refresh", lambda digest: [])
        assert run(engine, requests)[: len(alone)] != alone


def test_plain_prompts_alone_in_a_canonical_pass(breaks_above):
    """A deterministic request waits behind older plain prompts, which fill canonical passes by
    themselves: their pages count as canonical, so these passes run in tiles as well."""
    model = tiny(dtype=torch.bfloat16)
    shared = [n % 97 + 1 for n in range(300)]
    mine = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)
    config = EngineConfig(reference_rows=16, max_rows=32, page_size=16)
    with Engine(model, config=config) as engine:
        alone = bits(engine.generate([[*shared, 5]], mine)[0])
        engine.release()
        for n in range(2):
            engine.add_request([*shared, n], SamplingParams(max_new_tokens=2))
        request_id = engine.add_request([*shared, 5], mine)
        first = len(engine.records)
        done = drain(engine)
        passes = engine.records[first:]
        assert bits(done[request_id]) == alone
    assert sum(record.left_out == 2 for record in passes) > 3
    assert all(record.way for record in passes if record.canonical and record.bucket > 16)
