"""Passes of one shape launch the same, whatever they hold: recorded with the Triton kernels.

The engines compute with the twins, so that their sequences go on; what the Triton kernels would be
launched with is recorded before each pass.
"""

from dataclasses import replace
from inspect import getsource

import pytest
import torch

from tests.support.budget import first
from tests.support.cases import bits_of, cost, greedy, run, text
from tests.support.recorded import as_on_a_gpu, record_passes, recording
from tests.support.tiny import FAMILIES, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import Engine, EngineConfig, SamplingParams, doctor
from tinyspec.determinism.model_probe import graph_refusals
from tinyspec.runner.batch import PassMemory
from tinyspec.runner.graphs import GraphSafety
from tinyspec.runner.kv_cache import KVCache

CONFIG = EngineConfig(
    reference_rows=8, page_size=8, max_rows=16, max_sequences=8, max_model_len=128, backend="triton"
)
REQUESTS = [
    (text(length, seed=n), SamplingParams(max_new_tokens=new, deterministic=n % 2 == 0))
    for n, (length, new) in enumerate([(1, 5), (7, 6), (11, 4), (3, 7), (19, 4)])
]


ORDER = ["llama", "gemma2", *(name for name in FAMILIES if name not in ("llama", "gemma2"))]


@pytest.fixture
def kernels(monkeypatch):
    """Those that are recorded."""
    return as_on_a_gpu(monkeypatch)


def recorded(model, kernels, requests=REQUESTS, **settings):
    """All that was recorded while ``requests`` ran."""
    with Engine(model, config=replace(CONFIG, **settings)) as engine:
        cost(engine)
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))  # allocates what lasts
        found = record_passes(engine, kernels)
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        assert not [c.error for output in outputs for c in output.completions if c.error]
        return found


def check(found):
    """Passes of a shape have recorded the same; how many held something else than the first."""
    others = 0
    for key, passes in found.items():
        sent, first = passes[0]
        for now, calls in passes[1:]:
            assert calls.calls == first.calls, key
            assert calls.addresses == first.addresses, key
            others += now != sent
    return others


@pytest.mark.parametrize("family", first(1, ORDER, 2))
def test_same_launches(family, kernels):
    found = recorded(tiny(family), kernels)
    assert check(found) >= 6
    shapes = {key[0] for key in found} - {"sample"}
    assert {shape.canonical for shape in shapes} == {False, True}
    every = [call[0] for passes in found.values() for _, calls in passes for call in calls.calls]
    assert {"attention_kernel", "kv_write_kernel", "sample_kernel", "work_kernel"} <= {*every}


@pytest.mark.slow("crosses", 2)
def test_same_launches_over_codes(kernels):
    found = recorded(tiny(), kernels, kv_dtype="fp8_e4m3")
    assert check(found) >= 6
    calls = [call for passes in found.values() for _, calls in passes for call in calls.calls]
    mine = [call for call in calls if call[0] in ("attention_kernel", "kv_write_kernel")]
    assert mine and all("torch.uint8" in str(call) for call in mine)


def test_control_an_argument_that_depends_on_lengths(kernels, monkeypatch):
    batch = PassMemory.batch

    def planted(self, packed):
        found, keep = batch(self, packed)
        found.metadata.derived["longest"] = int(found.metadata.seq_lens.max())
        return found, keep

    def attend(q, k, v, metadata, **scores):
        return kernels.paged_attention(q * metadata.derived["longest"], k, v, metadata, **scores)

    monkeypatch.setattr(PassMemory, "batch", planted)
    found = recorded(tiny(), replace(kernels, paged_attention=attend))
    with pytest.raises(AssertionError):
        check(found)


def refusals(model):
    """What is found by passes whose kernels do not run."""
    with recording(), Engine(model, config=CONFIG) as engine:
        return graph_refusals(engine.runner)


def test_what_graphs_cannot_hold():
    """Neither a dense model nor its own kernels of experts and transformers' grouped product; but
    transformers' other way, which looks at whom the router chose."""
    model = of_zoo("qwen3_moe")
    assert refusals(tiny()) == refusals(model) == {}
    model.set_experts_implementation("eager")
    found = refusals(model)
    assert {*found} == {"other"} and "Qwen3MoeExperts" in found["other"]


@pytest.mark.slow("crosses", 4)
def test_doctor_names_it(monkeypatch):
    """The twins read what they have computed, so nothing of theirs is captured."""
    as_on_a_gpu(monkeypatch)
    report = doctor(tiny(), config=CONFIG)
    assert "reads what the device has computed in LlamaAttention" in report.eager["canonical"]
    assert f"canonical passes run without graphs: {report.eager['canonical']}" in str(report)
    assert doctor(tiny(), config=replace(CONFIG, backend="torch")).eager == {}


X = torch.arange(6.0)


ALLOWED = [
    lambda: X[torch.tensor([1, 2])],
    lambda: X.clone().masked_fill_(X > 2, 0),
    lambda: X.clone().__setitem__(torch.tensor([1]), 5.0),
]
HOST_READS = [
    lambda: X[X > 2],
    lambda: X.clone().masked_fill_(X > 2, 0)[:3].nonzero(),
    lambda: X.max().item(),
    lambda: bool(X.any()),
    lambda: X.clone().__setitem__(X > 2, torch.ones(3)),
    lambda: X.to("meta"),
    lambda: torch.repeat_interleave(X, torch.ones(6, dtype=torch.int64)),
]


def test_operators():
    for works, refused in ((ALLOWED, False), (HOST_READS, True)):
        for work in works:
            with GraphSafety() as found:
                work()
            assert (found.refusal is not None) == refused, getsource(work)


@pytest.mark.slow("crosses", 20)
def test_pages_need_not_be_zeroed(monkeypatch):
    """By the Triton kernels, where values are finite, as the KV write leaves them; the twins do not
    stand huge numbers in pages."""
    pages = KVCache.__init__
    requests = [(text(5, seed=1), greedy(2)), (text(9, seed=2), greedy(2, temperature=1.0, seed=3))]

    def bits(key, value):
        def filled(cache, *args):
            pages(cache, *args)
            for pools, number in ((cache.k, key), (cache.v, value)):
                for pool in pools:
                    pool.fill_(number)

        monkeypatch.setattr(KVCache, "__init__", filled)
        with Engine(tiny(), config=CONFIG) as engine:
            cost(engine)
            return bits_of(run(engine, requests))

    found = bits(0.0, 0.0)
    assert bits(float("nan"), 3e38) == bits(3e38, -3e38) == found
    assert bits(0.0, float("nan")) != found
