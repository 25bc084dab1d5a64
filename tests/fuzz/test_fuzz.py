"""The fuzzer: random models, crowds, settings and influences from outside, against requests alone.
Controls: with a mend taken back it has a finding within 50 runs of each of its classes, and none in
the same run with the mend in place.

pytest -n 2 tests/fuzz/test_fuzz.py -m slow --seed 3       # all runs of a seed
pytest 'tests/fuzz/test_fuzz.py::test_fuzz[17]' -m slow --seed 3
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.draws import draw
from tests.fuzz.influences import TABLE
from tests.fuzz.mends import MENDS, SILENT, take_back
from tests.fuzz.runs import Ledger, command, run
from tests.support.budget import first
from tinyspec import RequestOutput, SamplingParams
from tinyspec.outputs import Completion
from tinyspec.runner.sampler import NOT_FINITE

RUNS = 300
# Runs of a class in which a control has a finding.
TRIES = 50
# Mends, or single classes of one, whose lack shows only on some CPUs: by MKL, AVX-512 in fp16,
# products of fp32 that AMX or AVX-512 rounds to bf16 first, or operators that other row or thread
# counts change. What none of these shows on one is skipped there, by name.
BY_CPU = {
    *("mkldnn matmul precision", "matmul precision"),
    *("facts by layout", "threads between steps", "threads in the fingerprint"),
    *("heights of blocks of query rows", "proof on weights of its own"),
}
PAIRS = [(name, one) for name, mend in MENDS.items() for one in mend.classes]


def check(seed, number):
    """One run, without a finding; how to have it again."""
    result = run(draw(seed, number))
    found = "\n  ".join(result.findings)
    assert result.findings == [], f"\n{command(result.draw)}\n{result.draw}\n  {found}"
    print(result.draw, dict(result.counts), *result.refusals, sep="\n")
    return result


@pytest.mark.parametrize("number", first(1, (1, 0), 7))
def test_a_few_runs(number):
    assert check("smoke", number).counts["compared"] > 0


@pytest.mark.slow("fuzz", 3)
@pytest.mark.usefixtures("proven_on_demand")
@pytest.mark.parametrize("number", range(RUNS))
def test_fuzz(request, number):
    """With engines that prove buckets while requests run."""
    check(request.config.getoption("--seed"), number)


WHOLE = Completion(
    [7, 8, 9],
    logprobs=[-1.0, -0.0, -0.25],
    top_logprobs=[[(7, -1.0)], [(8, -0.5)], [(9, -0.25)]],
    finish_reason="length",
)


def output(completion=WHOLE, prompt_logprobs=None):
    return RequestOutput("r", [1, 2], SamplingParams(), [completion], "f", prompt_logprobs)


def cut(count, **changes):
    """The first tokens."""
    columns = ("token_ids", "logprobs", "top_logprobs")
    return {**{name: getattr(WHOLE, name)[:count] for name in columns}, **changes}


OTHER = {
    "a token": {"token_ids": [7, 8, 10]},
    "a log-probability": {"logprobs": [-1.0, -0.0, -0.25000001]},
    "the sign of a zero": {"logprobs": [-1.0, 0.0, -0.25]},
    "a top log-probability": {"top_logprobs": [[(7, -1.0)], [(8, -0.5)], [(8, -0.25)]]},
    "the end": {"finish_reason": "stop"},
    "shorter": cut(2, finish_reason="length"),
    "not finite": cut(2, finish_reason="abort", error=NOT_FINITE),
}


def test_what_is_a_finding():
    """Control: every bit that an output has."""
    found = Ledger()
    assert found.add(0, output(prompt_logprobs=[None, -1.0]), "alone") == ""
    assert found.add(0, output(), "in a crowd") == ""
    for name, changes in OTHER.items():
        assert found.add(0, output(replace(WHOLE, **changes)), "in a crowd"), name
    assert found.add(0, output(prompt_logprobs=[None, -2.0]), "in a crowd")


@pytest.mark.slow("fuzz controls", 30)
@pytest.mark.parametrize(("name", "one"), PAIRS)
def test_what_is_taken_back_is_found(name, one):
    with pytest.MonkeyPatch.context() as patches:
        take_back(name, patches)
        number = next((n for n in range(TRIES) if run(draw("control", n, [one])).findings), None)
    if number is None and not BY_CPU.isdisjoint((name, one)):
        pytest.skip(f"this CPU shows nothing of {name} in {TRIES} runs of {one}")
    assert number is not None, f"nothing found in {TRIES} runs of {one}"
    print(f"without {name}: {one}: found in run {number + 1}")
    assert run(draw("control", number, [one])).findings == []


def test_every_class_has_a_control_or_a_reason():
    covered = {one for mend in MENDS.values() for one in mend.classes}
    assert covered | SILENT == set(TABLE)
    assert not covered & SILENT


@pytest.mark.parametrize("name", MENDS)
def test_what_is_to_be_taken_back_is_there(name):
    """The controls themselves are slow: a name that is gone shows here."""
    with pytest.MonkeyPatch.context() as patches:
        take_back(name, patches)
