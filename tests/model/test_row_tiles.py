"""Linears in tiles of rows: buckets whose plain linears have other bits are canonical all the same.

``breaks_above`` makes torch's own linear split its sum elsewhere in passes of more than 16 rows, as
some matrix libraries do; fp64 partial sums, so that nothing else decides the bits.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tinyspec.determinism.probes.steps import finished
from torch import nn

from tests.support.budget import first
from tests.support.mixes import bits, crowd, needles, solo
from tests.support.tiny import tiny
from tests.support.tolerances import SHORT_SUM, close
from tinyspec import Engine, EngineConfig, SamplingParams, doctor
from tinyspec.determinism.probes import buckets
from tinyspec.model.cpu import linears
from tinyspec.model.row_tiles import RowTiles, split_rows

CONFIG = EngineConfig(reference_rows=16, max_rows=64)


@pytest.mark.parametrize(
    ("rows", "counts", "tiles"),
    [
        (40, (8, 32), [32, 8]),
        (64, (8, 32), [32, 32]),
        (32, (8, 32), [32]),
        (56, (1, 2, 24), [24, 24, 2, 2, 2, 2]),
        (1, (2, 4), []),
        (7, (2, 4), []),
        (5, (), []),
    ],
)
def test_split_rows(rows, counts, tiles):
    assert split_rows(rows, counts) == tiles


@pytest.mark.parametrize("gradient", [True, False])
def test_tiles_have_the_bits_of_passes_of_their_size(gradient):
    """Of frozen weights, too, by which torch multiplies a part of [1, R, in] as a batch."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 1408, bias=False, dtype=torch.bfloat16).requires_grad_(gradient)
    x = torch.randn(1, 64, 512).to(torch.bfloat16)
    whole = [part[0].clone()[None] for part in x.split(32, dim=1)]
    with torch.no_grad():
        expected = torch.cat([linear(part) for part in whole], dim=1)
        tiles = RowTiles()
        tiles.bind([linear], (32,))
        tiles.on = True
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("shape", [(40, 16), (1, 40, 16), (1, 1, 40, 16), (2, 40, 16)], ids=str)
def test_tiles_keep_the_shape(shape):
    linear = nn.Linear(16, 8)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = linear(x)
        tiles = RowTiles()
        tiles.bind([linear], (8, 32))
        tiles.on = True
        found = linear(x)
    assert found.shape == expected.shape and close(found, expected, SHORT_SUM)


@pytest.fixture
def breaks_above(monkeypatch, no_results_on_disk):
    """torch's linear with other partial sums above 16 rows; counts its row counts."""
    calls = []

    def linear(x, weight, bias=None):
        rows = x.shape[:-1].numel()
        calls.append(rows)
        cut = weight.shape[1] // (2 if rows <= 16 else 3)
        wide, exact = x.double(), weight.double()
        out = (wide[..., :cut] @ exact[:, :cut].T).to(x.dtype)
        out = out + (wide[..., cut:] @ exact[:, cut:].T).to(x.dtype)
        return out if bias is None else out + bias

    monkeypatch.setattr(nn.functional, "linear", linear)
    # Canonical passes go by it, whatever the CPU, and there is no other way for few rows.
    monkeypatch.setattr(linears, "cpu_has", lambda name: False)
    return calls


def test_bind_and_unbind(breaks_above):
    linear = nn.Linear(8, 4)
    names = list(linear.state_dict())
    tiles = RowTiles()
    tiles.bind([linear], (4, 8))
    assert list(linear.state_dict()) == names
    x = torch.randn(1, 20, 8)
    for on, calls in ((False, [20]), (True, [8, 8, 4])):
        del breaks_above[:]
        tiles.on = on
        found = linear(x)
        assert breaks_above == calls
        few = linear(x[:, :8])  # the right bits for its first rows
        assert torch.equal(found[:, :8], few) == on
    tiles.unbind()
    assert "forward" not in vars(linear)


def run(engine, requests):
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
    return [bits(output) for output in outputs]


def test_buckets_are_canonical_in_tiles(breaks_above, monkeypatch):
    report = doctor(tiny(dtype=torch.bfloat16), CONFIG)
    assert report
    assert report.facts.sizes[-1] == 64
    for fact in report.facts.buckets:
        assert fact.canonical
        assert (fact.rows > 16) == bool(fact.tiled)
    assert "own way" in str(report)


@pytest.mark.parametrize("verify", first(2, ["auto", "direct", "padded", "always"], 2))
def test_bits_are_those_of_the_reference_bucket(breaks_above, verify):
    """``verify="always"`` commits from the reference bucket alone: the oracle of the others."""
    requests = [*needles(), *crowd(random.Random(0), 20)]
    model = tiny(dtype=torch.bfloat16)
    config = EngineConfig(reference_rows=16, max_rows=64, max_sequences=40, verify=verify)
    with Engine(model, config=replace(config, verify="always")) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
    with Engine(model, config=config) as engine:
        del breaks_above[:]
        assert run(engine, requests)[: len(alone)] == alone
        canonical = [record for record in engine.records if record.way in ("direct", "padded")]
        if verify != "always":
            assert any(record.bucket > 16 for record in canonical)
    assert not any("forward" in vars(module) for module in model.modules())


def test_control_without_tiles_the_bits_differ(breaks_above, monkeypatch):
    """The same passes with linears run whole: other bits, so the comparison above can fail."""
    requests = [*needles(), *crowd(random.Random(0), 20)]
    config = EngineConfig(reference_rows=16, max_rows=64, max_sequences=40, verify="padded")
    with Engine(tiny(dtype=torch.bfloat16), config=config) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
        engine.release()
        engine.runner.tiles.unbind()
        monkeypatch.setattr(engine.contract, "refresh", lambda digest: [])
        assert run(engine, requests)[: len(alone)] != alone


def test_plain_prompts_alone_in_a_canonical_pass(breaks_above):
    """A deterministic request waits behind older plain prompts, which fill canonical passes by
    themselves: their pages count as canonical, so these passes run in tiles as well."""
    model = tiny(dtype=torch.bfloat16)
    shared = [n % 97 + 1 for n in range(400)]
    mine = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)
    config = EngineConfig(reference_rows=16, max_rows=64, page_size=16)
    with Engine(model, config=config) as engine:
        alone = bits(engine.generate([[*shared, 5]], mine)[0])
        engine.release()
        for n in range(2):
            engine.add_request([*shared, n], SamplingParams(max_new_tokens=2))
        request_id = engine.add_request([*shared, 5], mine)
        first = len(engine.records)
        done = {}
        while engine.has_unfinished():
            done |= {output.request_id: output for output in engine.step()}
        passes = engine.records[first:]
        assert bits(done[request_id]) == alone
    assert sum(record.left_out == 2 for record in passes) > 3
    assert all(record.way for record in passes if record.canonical and record.bucket > 16)


@pytest.fixture
def breaks_in_parts(breaks_above, monkeypatch):
    """The same, and yet other partial sums of rows that are a part of a tensor from within."""
    whole = nn.functional.linear

    def linear(x, weight, bias=None):
        if x.storage_offset() == 0:
            return whole(x, weight, bias)
        few = x.new_zeros(32, x.shape[-1])  # as more rows than 16 are computed
        rows = x.reshape(-1, x.shape[-1])
        few[: len(rows)] = rows
        return whole(few, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)

    monkeypatch.setattr(nn.functional, "linear", linear)


def bucket_of_32():
    """What is found of the bucket, and the linears that would run in tiles."""
    with Engine(tiny(dtype=torch.bfloat16), config=CONFIG) as engine:
        engine.contract.ensure()
        engine.contract._find([32])
        results = engine.contract.results
        (found,) = (bucket for bucket in results.buckets if bucket.rows == 32)
        assert results.tiles and not any(32 in counts for counts in results.tiles.values())
        return found, set(results.tiles)


@pytest.mark.parametrize(
    "aligned", [pytest.param(64, marks=pytest.mark.slow("crosses", 1)), 1 << 16]
)
def test_tiles_that_begin_elsewhere(aligned, breaks_in_parts, monkeypatch):
    """Linears are probed in their tiles, by themselves, where these begin elsewhere than tensors
    do; otherwise it is left to passes of the model."""
    monkeypatch.setitem(buckets.ALIGNED, "cpu", aligned)
    found, tiled = bucket_of_32()
    assert set(found.broken_by) == ({"model"} if aligned == 64 else tiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_of_a_linear_with_a_dtype_of_its_own(dtype):
    """Of a model in fp32: the second of two rows begins 32 or 64 bytes behind the first, and new
    tensors at multiples of 64."""
    model = nn.Module()
    model.linear, model.dtype = nn.Linear(16, 8, dtype=dtype), torch.float32
    runner = SimpleNamespace(model=model, device=torch.device("cpu"), tiles=RowTiles())
    probed = []

    def steps(name, sizes):
        probed.append((name, sizes, runner.tiles.on))
        yield
        return SimpleNamespace(canonical=lambda rows: False), ()

    work = SimpleNamespace(runner=runner, function_steps=steps)
    results = SimpleNamespace(differing=lambda rows: ["linear"], tiles={"linear": [1]})
    broken = finished(buckets._broken_in_tiles(work, results, 2))
    expected = dtype == torch.bfloat16
    assert broken == ("linear",) * expected
    assert probed == [("linear", [2], True)] * expected


@pytest.mark.slow("crosses", 1)
def test_tiles_that_begin_elsewhere_and_agree(breaks_above, monkeypatch):
    monkeypatch.setitem(buckets.ALIGNED, "cpu", 1 << 16)
    found, tiled = bucket_of_32()
    assert found.canonical and set(found.tiled) == tiled
