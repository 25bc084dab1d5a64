"""Engines whose KV cache holds e4m3 codes: the same contract, with results of their own."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.determinism.test_attention_probe import of_engine, probe
from tests.support.budget import first
from tests.support.cases import DTYPES, KINDS, bits_of, engine_of, greedy, model_of, run, text
from tests.support.mixes import bits, crowd, plain, solo
from tests.support.tiny import tiny
from tinyspec import SamplingParams
from tinyspec.kernels import backend
from tinyspec.kernels.twins.layers import CODES, stored

coded = partial(engine_of, kv_dtype="fp8_e4m3")

REQUESTS = [(text(21, seed=n), greedy(9, temperature=n * 0.8, seed=n)) for n in range(2)]


def alone_and_among(model, requests, others=3, **settings):
    """Bits of each request alone, without a prefix cache; and of all in a crowd, twice, from pages
    that the first time has left."""
    with coded(model, prefix_cache=False, **settings) as engine:
        alone = [bits(solo(engine, request)) for request in requests]
    with coded(model, page_size=8, **settings) as engine:
        mixed = [*requests, *crowd(random.Random(1), others)]
        found = [bits_of(run(engine, mixed)[: len(requests)]) for _ in range(2)]
        assert engine.stats().cached_prompt_tokens > 0
    return alone, found


@pytest.mark.parametrize("dtype", first(1, DTYPES, 2))
@pytest.mark.parametrize("kind", first(1, KINDS, 2))
def test_alone_and_in_a_crowd(kind, dtype):
    alone, found = alone_and_among(model_of(kind, dtype), REQUESTS, max_rows=32)
    assert found == [alone, alone]


def test_control_without_the_flag_bits_differ():
    requests = [(prompt, plain(wanted)) for prompt, wanted in REQUESTS]
    alone, (found, _) = alone_and_among(model_of("shape-sensitive"), requests, max_rows=32)
    assert found != alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_cache_holds(dtype):
    """Codes of the keys and values of the model's own cache, and later layers follow from them."""
    model, prompt, held = tiny("llama", dtype), text(40), []
    for make in (engine_of, coded):
        with make(model, page_size=64, num_pages=4) as engine:
            cache = engine.runner.cache
            cache.zero([0, 1, 2, 3])
            engine.generate([prompt], SamplingParams(max_new_tokens=1))
            held.append([pool.flatten(0, 1).clone() for pool in (*cache.k, *cache.v)])
    own, codes = held
    assert {pool.dtype for pool in own} == {dtype} and {pool.dtype for pool in codes} == {CODES}
    written = own[0].flatten(1).any(1)
    assert written.sum() == len(prompt)
    pairs = zip(own, codes, strict=True)
    same = [torch.equal(after[written], stored(before[written], CODES)) for before, after in pairs]
    assert same == [True, False] * 2, "keys and values of the first layer, and of the next"


def test_the_probe_reads_codes(monkeypatch):
    """Over codes it compares as many rows, and finds a kernel that depends on the pass there."""
    kernels = backend.load("torch")

    def other(q, k, *args, **kwargs):
        out = kernels.paged_attention(q, k, *args, **kwargs)
        return out * (1 + 2e-7) if len(q) == 1 and k.dtype == CODES else out

    broken = replace(kernels, paged_attention=other)
    half = partial(probe, torch.float32, 32, heads=(4, 2))
    assert half(kernels=kernels, kv_dtype=CODES) and half(kernels=broken)
    found = half(kernels=broken, kv_dtype=CODES)
    assert not found and found.checked > 1000
    with coded(tiny()) as engine:
        engine.served.context.kernels = broken
        assert not any(of_engine(engine))
