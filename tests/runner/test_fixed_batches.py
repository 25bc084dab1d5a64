"""Passes of one shape launch the same, whatever they hold: recorded with the Triton kernels.

The engines compute with the twins, so that their sequences go on; what the Triton kernels would be
launched with is recorded before each pass.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.budget import first
from tests.support.cases import cost, text
from tests.support.recorded import as_on_a_gpu, record_passes
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.runner.fixed_batches import FixedBatches

CONFIG = EngineConfig(
    reference_rows=8,
    page_size=8,
    max_model_len=128,
    max_rows=16,
    max_sequences=8,
    backend="triton",
)
REQUESTS = [
    (text(length, seed=n), SamplingParams(max_new_tokens=new, deterministic=n % 2 == 0))
    for n, (length, new) in enumerate([(1, 9), (7, 6), (11, 12), (3, 8), (19, 4), (25, 5), (2, 3)])
]


ORDER = ["llama", "gemma2", *(name for name in FAMILIES if name not in ("llama", "gemma2"))]


@pytest.fixture
def kernels(monkeypatch):
    """Those that are recorded."""
    return as_on_a_gpu(monkeypatch)


def recorded(model, kernels, requests=REQUESTS, **settings):
    """All that was recorded while ``requests`` ran, and why graphs cannot hold passes."""
    with Engine(model, config=replace(CONFIG, **settings)) as engine:
        cost(engine)
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))  # allocates what lasts
        found = record_passes(engine, kernels)
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        assert not any(c.error for output in outputs for c in output.completions)
        return found


def check(found):
    """Passes of a shape have recorded the same; how many held something else than the first."""
    others = 0
    for key, passes in found.items():
        sent, first = passes[0]
        for now, calls in passes[1:]:
            assert [call[0] for call in calls.calls] == [call[0] for call in first.calls], key
            for mine, theirs in zip(calls.calls, first.calls, strict=True):
                assert mine == theirs, key
            assert calls.addresses == first.addresses, key
            others += now != sent
    return others


@pytest.mark.parametrize("family", first(1, ORDER, 2))
def test_same_launches(family, kernels):
    found = recorded(tiny(family), kernels)
    assert check(found) > 10
    shapes = {key[0] for key in found} - {"sample"}
    assert {shape.canonical for shape in shapes} == {False, True}
    every = [call[0] for passes in found.values() for _, calls in passes for call in calls.calls]
    assert {"attention_kernel", "kv_write_kernel", "sample_kernel", "work_kernel"} <= {*every}


def test_control_an_argument_that_depends_on_lengths(kernels, monkeypatch):
    batch = FixedBatches.batch

    def planted(self, shape):
        found, keep = batch(self, shape)
        found.metadata.max_seqlen_k = int(found.metadata.seq_lens.max())
        return found, keep

    def attend(q, k, v, metadata, **scores):
        return kernels.paged_attention(q * metadata.max_seqlen_k, k, v, metadata, **scores)

    monkeypatch.setattr(FixedBatches, "batch", planted)
    with pytest.raises(AssertionError):
        check(recorded(tiny(), replace(kernels, paged_attention=attend)))


def test_control_memory_of_another_address(kernels, monkeypatch):
    batch = FixedBatches.batch
    kept = []

    def moved(self, shape):
        found, keep = batch(self, shape)
        kept.append(found.metadata.seq_lens)
        found.metadata.seq_lens = found.metadata.seq_lens.clone()
        kept.append(found.metadata.seq_lens)
        return found, keep

    monkeypatch.setattr(FixedBatches, "batch", moved)
    with pytest.raises(AssertionError):
        check(recorded(tiny(), kernels))
