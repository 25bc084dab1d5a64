"""The contract on the Triton path as a whole: twins pose as kernels, all else is what a GPU runs.

Passes and samples are padded there, which the twins' own path never does. Every needle is run alone
and in crowds of several sizes and orders. Control: plain requests differ.
"""

import random

import pytest

from tests.support.cases import (
    DTYPES,
    HYBRIDS,
    bits_of,
    engine_of,
    model_of,
    one_by_one,
    run,
    whole,
)
from tests.support.mixes import bits, crowd, needles, plain
from tests.support.recorded import as_on_a_gpu

SIZES = (3, 16)
# The last has no layer of attention.
SUBJECTS = [("shape-sensitive", dtype) for dtype in DTYPES]
SUBJECTS += [(kind, "fp32") for kind in HYBRIDS] + [("delta rule", "bf16"), ("mamba2", "fp32")]


@pytest.fixture(autouse=True)
def posing(monkeypatch):
    as_on_a_gpu(monkeypatch)


def triton_engine(model, **settings):
    return engine_of(model, backend="triton", max_rows=128, **settings)


@pytest.fixture(scope="module", params=SUBJECTS, ids=" ".join)
def subject(request):
    """A model, and the bits of every needle alone."""
    model = model_of(*request.param)
    with pytest.MonkeyPatch.context() as patches:
        as_on_a_gpu(patches)
        with triton_engine(model) as engine:
            return model, one_by_one(engine, needles())


@pytest.mark.crossed(7)
@pytest.mark.parametrize("verify", ["auto", "padded", "always"])
def test_crowds(subject, verify):
    """Greedy and sampled needles, first, last and in between."""
    model, alone = subject
    with triton_engine(model, verify=verify) as engine:
        for size in SIZES:
            rng = random.Random(size)
            others = crowd(rng, size)
            mixed = [*enumerate(needles()), *((-1, other) for other in others)]
            rng.shuffle(mixed)
            outputs = run(engine, [request for _, request in mixed])
            found = {n: bits(o) for (n, _), o in zip(mixed, outputs, strict=True) if n >= 0}
            assert [found[n] for n in range(len(alone))] == alone, f"crowd of {size}"
        assert engine.stats().preemptions == 0  # no pass failed and ran again
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
