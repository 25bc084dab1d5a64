"""The contract crossed with all that must not matter: the cache and what it holds, chunks, sizes,
ways, dtypes, families, processes.

Every test compares the bits of the same requests; the controls that such a comparison can fail on
these models stand beside them.
"""

import ast
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.determinism.test_attention_probe import of_engine, probe
from tests.support.budget import first
from tests.support.cases import (
    DTYPES,
    HYBRIDS,
    KINDS,
    bits_of,
    engine_of,
    greedy,
    model_of,
    one_by_one,
    run,
    steady,
    text,
    whole,
)
from tests.support.mixes import bits, crowd, needles, plain
from tests.support.sensitive import ShapeSensitiveLinear
from tests.support.tiny import FAMILIES, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.config import STATE_TILE
from tinyspec.kernels import backend
from tinyspec.kernels.twins.layers import CODES, stored


def mixed():
    """Needles of every style and prompts that share prefixes."""
    shared = [([*text(n, seed=8), n % 5], greedy(9)) for n in (31, 64, 90)]
    return [*needles(), *shared]


def quick(kind, dtype):
    """Of each kind one by default: hybrids follow no dtype."""
    always = dtype == ("fp32" if kind in HYBRIDS else "bf16")
    slow = () if always else pytest.mark.slow("crosses", 5)
    return pytest.param((kind, dtype), marks=slow, id=f"{kind}-{dtype}")


@pytest.fixture(scope="module", params=[quick(k, d) for k in KINDS for d in DTYPES])
def subject(request):
    """A model, and the solo bits of every mixed request by an engine with default settings."""
    model = model_of(*request.param)
    with engine_of(model) as engine:
        return model, one_by_one(engine, mixed())


def cached_tokens(outputs):
    return [sum(c.stats.cached_prompt_tokens for c in output.completions) for output in outputs]


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    ("cache", "page_size"), [(True, 8), (True, 32), (False, 32)], ids=["8", "32", "off"]
)
def test_cache_cold_and_warm(subject, cache, page_size):
    model, alone = subject
    with engine_of(model, prefix_cache=cache, page_size=page_size) as engine:
        cold = run(engine, mixed())
        warm = run(engine, mixed())
        assert whole(engine)
    assert bits_of(cold) == bits_of(warm) == alone
    for (prompt, params), count in zip(mixed(), cached_tokens(warm), strict=True):
        # Completions beyond the first start from the prompt that the first has computed.
        full = len(prompt) > 1 and len(prompt) >= page_size
        if engine.served.recurrent:  # the token that gives logits follows a state
            full = len(prompt) > max(page_size, STATE_TILE)
        assert (count > 0) == (params.num_return_sequences > 1 or (cache and full))
    assert sum(cached_tokens(warm)) > sum(cached_tokens(cold)) or not cache


SETTINGS = {
    "smallest passes": {"max_rows": 16, "max_sequences": 16, "page_size": 1, "num_pages": 400},
    "odd passes": {"max_rows": 37, "max_sequences": 5, "page_size": 8, "num_pages": 24},
    "one sequence": {"max_rows": 512, "max_sequences": 1, "page_size": 256, "num_pages": 1},
    "one page each": {"max_rows": 512, "max_sequences": 64, "page_size": 1024, "num_pages": 3},
    "few sequences": {"max_rows": 512, "max_sequences": 3, "page_size": 16, "num_pages": 600},
}


@pytest.mark.parametrize("named", first(1, SETTINGS, 4))
def test_sizes(subject, named):
    model, alone = subject
    with engine_of(model, **SETTINGS[named], draft_window=5) as engine:
        assert bits_of(run(engine, mixed())) == alone
        assert whole(engine)


@pytest.mark.parametrize("dtype", first(1, ["bf16", "fp32", "fp16"], 8))
def test_a_long_prompt(dtype, whole_ladder):
    """Alone in large chunks, in small ones twice among others, and in a warm cache."""
    model = model_of("shape-sensitive", dtype, positions=2048)
    request = (text(1696, seed=4), greedy(6, temperature=0.7, seed=1))
    small = {"reference_rows": 128, "max_rows": 200, "page_size": 16}
    others = crowd(random.Random(1), 6)
    with engine_of(model, reference_rows=128, max_rows=1024) as engine:
        alone = bits(engine.generate([request[0]], request[1])[0])
        assert alone[0][2] == "length"
    with engine_of(model, **small) as engine:
        among = run(engine, [*others, request, request])
        again = engine.generate([request[0]], request[1])[0]
    assert bits_of(among[-2:]) == [alone, alone]
    assert bits(again) == alone
    assert again.completions[0].stats.cached_prompt_tokens == 1695
    with engine_of(model, **small) as engine:
        unflagged = bits(run(engine, [*others, (request[0], plain(request[1]))])[-1])
    assert unflagged != alone  # control


def test_ways(subject):
    """The same settings but for the way: all agree, and each way was really taken."""
    model, alone = subject
    taken = {}
    for way in ("auto", "padded", "always", "direct"):
        with steady(model, verify=way, trace=True, draft_window=6) as engine:
            try:
                one = one_by_one(engine, mixed()[:3])
            except DeterminismError:  # what a device cannot serve
                continue
            assert [*bits_of(run(engine, mixed())), *one] == [*alone, *alone[:3]], way
            taken[way] = Counter(record.way for record in engine.records)
    assert taken["padded"]["draft"] == 0 < taken["always"]["draft"]
    if type(model.lm_head) is ShapeSensitiveLinear:
        assert set(taken) == {"auto", "padded", "always"}
        assert taken["padded"]["padded"] > 10
        assert all(taken["auto"][way] > 0 for way in ("direct", "padded", "draft"))


# Every family, and a process of its own

SMALL = EngineConfig(reference_rows=16, max_rows=64)


@pytest.mark.crossed(2)
@pytest.mark.parametrize("family", first(2, FAMILIES, 2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_family_on_two_threads(family, dtype, two_threads):
    with Engine(tiny(family, dtype), config=SMALL) as engine:
        alone = one_by_one(engine, needles())
        outputs = run(engine, [*needles(), *crowd(random.Random(1), 10)])
    assert bits_of(outputs[: len(alone)]) == alone


CHILD = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
torch.set_num_threads(1)
from tests.support.cases import bits_of, run
from tests.support.mixes import needles
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
config = EngineConfig(reference_rows=16, max_rows=64, draft_window=5)
with Engine(tiny(), config=config) as engine:
    found = bits_of(run(engine, needles()[:3])), engine.fingerprint
print((found, [name for name in sys.modules if name.startswith("tinyspec.kernels")]))
"""


def test_a_new_process_without_triton():
    """A CPU has the same bits there, by the twins, and loads no Triton kernel."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found, loaded = ast.literal_eval(child.stdout.splitlines()[-1])
    with Engine(tiny(), config=SMALL) as engine:
        assert found == (one_by_one(engine, needles()[:3]), engine.fingerprint)
    assert "tinyspec.kernels.twins.sample" in loaded and "tinyspec.kernels.sample" not in loaded


# A KV cache of e4m3 codes: the same contract, with results of its own

coded = partial(engine_of, kv_dtype="fp8_e4m3")

REQUESTS = [(text(21, seed=n), greedy(9, temperature=n * 0.8, seed=n)) for n in range(2)]


@pytest.mark.parametrize("dtype", first(1, DTYPES, 2))
@pytest.mark.parametrize("kind", first(1, KINDS, 2))
def test_alone_and_in_a_crowd(kind, dtype):
    """Alone, without a prefix cache; and twice in a crowd, from pages that the first time has
    left."""
    model, mixed = model_of(kind, dtype), [*REQUESTS, *crowd(random.Random(1), 3)]
    with coded(model, prefix_cache=False, max_rows=32) as engine:
        alone = one_by_one(engine, REQUESTS)
    with coded(model, page_size=8, max_rows=32) as engine:
        for _ in range(2):
            assert bits_of(run(engine, mixed)[: len(REQUESTS)]) == alone
        assert engine.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_cache_holds(dtype):
    """Codes of the keys and values of the model's own cache, and later layers follow from them."""
    model, prompt, held = tiny("llama", dtype), text(40), []
    for make in (engine_of, coded):
        with make(model, page_size=64, num_pages=4) as engine:
            cache = engine.runner.cache
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
