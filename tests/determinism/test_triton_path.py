"""The contract on the Triton path as a whole: twins pose as kernels, all else is what a GPU runs.

Passes and samples are padded there, which the twins' own path never does. Every needle is run alone
and in crowds of several sizes and orders, under each of the settings that must not matter; so are
requests that think; a small model runs by the kernels themselves, interpreted. Controls: plain
requests differ.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.support import late_device, zoo
from tests.support.budget import first
from tests.support.cases import bits_of, engine_of, model_of, one_by_one, run, whole
from tests.support.mixes import Liar, bits, crowd, needles, plain
from tests.support.recorded import as_on_a_gpu
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.thinking import all_bits, exact, params, prompt_of, thinking_model
from tests.support.thinking import engine_of as thinking_engine

SIZES = (3, 16)
# The fourth has no layer of attention. By default two.
SUBJECTS = [("shape-sensitive", "bf16"), ("delta rule", "bf16"), ("convolutions", "fp32")]
SUBJECTS += [("mamba2", "fp32"), ("mamba 2", "fp32"), ("delta rule", "fp32")]
SUBJECTS += [("shape-sensitive", "fp32"), ("shape-sensitive", "fp16")]


@pytest.fixture(autouse=True)
def posing(monkeypatch):
    as_on_a_gpu(monkeypatch)


def triton_engine(model, **settings):
    return engine_of(model, **{"backend": "triton", "max_rows": 128, **settings})


@pytest.fixture(scope="module", params=first(2, SUBJECTS, 8), ids=" ".join)
def subject(request):
    """A model, and the bits of every needle alone."""
    model = model_of(*request.param)
    with pytest.MonkeyPatch.context() as patches:
        as_on_a_gpu(patches)
        with triton_engine(model) as engine:
            return model, one_by_one(engine, needles())


# By default five.
SETTINGS = {
    "late results": {"overlap": True},
    "always drafts": {"verify": "always"},
    "few pages": {"max_rows": 37, "max_sequences": 5, "page_size": 8, "num_pages": 24},
    "small chunks": {"max_rows": 16, "page_size": 1, "num_pages": 1500},
    "a drafter that lies": {"drafter": Liar, "draft_window": 5},
    "no prefix cache": {"prefix_cache": False, "page_size": 32},
    "padded": {"verify": "padded"},
    "as they are": {},
}


@pytest.mark.crossed(7)
@pytest.mark.parametrize("named", first(5, SETTINGS, 7))
def test_crowds(subject, named, monkeypatch):
    """Greedy and sampled needles, one and several completions, first, last and in between; the
    second crowd finds pages of the first."""
    model, alone = subject
    if named == "late results":
        late_device.force(monkeypatch)
    settings = dict(SETTINGS[named])
    if "drafter" in settings:
        settings["drafter"] = settings["drafter"](1)  # it has a state
    with triton_engine(model, **settings) as engine:
        for size in SIZES:
            rng = random.Random(size)
            others = crowd(rng, size)
            mixed = [*enumerate(needles()), *((-1, other) for other in others)]
            rng.shuffle(mixed)
            outputs = run(engine, [request for _, request in mixed])
            found = {n: bits(o) for (n, _), o in zip(mixed, outputs, strict=True) if n >= 0}
            assert [found[n] for n in range(len(alone))] == alone, f"crowd of {size}"
        stats = engine.stats()
        # Without a lack of pages none: no pass failed and ran again.
        assert (stats.preemptions > 0) == (named == "few pages")
        assert (stats.cached_prompt_tokens > 0) >= (named != "no prefix cache")
        assert whole(engine)


def test_control_plain_requests_differ(subject):
    model, _ = subject
    every = [*needles(), *crowd(random.Random(0), 9)]
    requests = [(prompt, plain(params)) for prompt, params in every]
    with triton_engine(model) as engine:
        alone = one_by_one(engine, requests[: len(needles())])
        among = bits_of(run(engine, requests))[: len(alone)]
        assert engine.stats().preemptions == 0
    assert among != alone


THINKING = [
    (prompt_of(67, 67), exact()),
    (prompt_of(80, 80), exact(temperature=0.9, seed=3)),
    (prompt_of(21, 21), exact(num_return_sequences=2, temperature=1.2, seed=5)),
]


def test_thoughts():
    """Of requests that think, alone and among others that do or do not. Control: without
    ``deterministic``."""
    model = replace_linears(thinking_model(), ShapeSensitiveLinear)
    others = [(prompt_of(40, n), params(9, thinking=n % 2 == 0, seed=n)) for n in range(5)]
    for deterministic in (True, False):
        asked = [(p, replace(wanted, deterministic=deterministic)) for p, wanted in THINKING]
        with thinking_engine(model, backend="triton") as engine:
            alone = [all_bits(engine.generate([p], wanted)[0]) for p, wanted in asked]
            among = [all_bits(output) for output in run(engine, [*others, *asked])[len(others) :]]
        assert (among == alone) == deterministic


@pytest.mark.slow("crosses", 200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on a CPU")
def test_interpreted_kernels(monkeypatch):
    """A model of one layer by the kernels themselves, everything on: drafts that lie, small chunks,
    pages of a prefix, results that are late. Control: plain requests differ."""
    monkeypatch.undo()
    late_device.force(monkeypatch)
    model = replace_linears(zoo.tiny("llama", num_hidden_layers=1), ShapeSensitiveLinear)
    model = model.to(torch.bfloat16)
    settings = {"reference_rows": 8, "max_rows": 16, "page_size": 8, "drafter": Liar(1)}
    for deterministic in (True, False):
        asked = [
            (prompt[:20], replace(wanted, max_new_tokens=6, deterministic=deterministic))
            for prompt, wanted in needles()[1:4]
        ]
        beside = [
            (prompt[:12], replace(wanted, max_new_tokens=4))
            for prompt, wanted in crowd(random.Random(1), 3)
        ]
        with engine_of(model, backend="triton", **settings) as engine:
            alone = one_by_one(engine, asked)
            among = bits_of(run(engine, [*beside, *asked])[len(beside) :])
            assert engine.stats().cached_prompt_tokens > 0
        assert (among == alone) == deterministic
