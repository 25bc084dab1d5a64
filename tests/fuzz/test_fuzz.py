"""The fuzzer: random models, crowds, settings and influences from outside, against requests alone.

pytest tests/fuzz/test_fuzz.py -m slow --seed 3            # ten minutes, resumed next time
pytest tests/fuzz/test_fuzz.py -m slow --seed 3 --number 17
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.draws import draw
from tests.fuzz.influences import TABLE
from tests.fuzz.runs import Ledger, command, failure, noticed, run
from tests.fuzz.tally import ROOT, Tally
from tests.support.budget import first, quota
from tinyspec import RequestOutput, SamplingParams
from tinyspec.outputs import Completion
from tinyspec.runner.sampler import NOT_FINITE

MINUTES = 10


def told(result):
    """A finding, and how to have it again."""
    found = "\n  ".join(result.findings)
    return f"\n{command(result.draw)}\n{result.draw}\n  {found}"


@pytest.mark.parametrize("number", first(1, (1, 0), 7))
def test_a_few_runs(number):
    result = run(draw("smoke", number))
    assert result.findings == [], told(result)
    assert result.counts["compared"] > 0


def test_a_draw_is_a_function_of_seed_and_number():
    for number in range(6):
        assert str(draw("a", number)) == str(draw("a", number))
    assert len({str(draw("a", number)) for number in range(6)}) == 6
    assert str(draw("a", 1)) != str(draw("b", 1))


@pytest.mark.slow("fuzz", 60 * MINUTES)
@pytest.mark.usefixtures("proven_on_demand")
def test_fuzz(request):
    """With engines that prove buckets while requests run."""
    option = request.config.getoption
    seed, number = option("--seed"), option("--number")
    classes = tuple(filter(None, (option("--influences") or "").split(",")))
    assert set(classes) <= set(TABLE), f"influences are: {', '.join(TABLE)}"
    if number is not None:
        result = run(draw(seed, number, classes))
        print(result.draw, dict(result.counts), *result.refusals, sep="\n")
        assert result.findings == [], told(result)
        return
    path = Path(option("--tally") or ROOT / ".pytest_cache" / "fuzz.json")
    tally = Tally(path, f"{seed} {','.join(classes)}".strip())
    ends = time.monotonic() + (quota(request.config, "fuzz") or 60 * MINUTES)
    before = len(tally.findings)
    while time.monotonic() < ends:
        began = time.monotonic()
        result = run(draw(seed, tally.runs, classes))
        tally.add(result, command(result.draw), time.monotonic() - began)
        if result.findings:
            print(told(result), flush=True)
    print(tally)
    new = tally.findings[before:]
    assert new == [], "\n".join(f"{one['command']}\n  {one['found'][0]}" for one in new)


WHOLE = Completion(
    [7, 8, 9],
    logprobs=[-1.0, -0.0, -0.25],
    top_logprobs=[[(7, -1.0)], [(8, -0.5)], [(9, -0.25)]],
    finish_reason="length",
)


def output(completion=WHOLE, fingerprint="f", prompt_logprobs=None):
    return RequestOutput("r", [1, 2], SamplingParams(), [completion], fingerprint, prompt_logprobs)


def cut(completion, tokens, **changes):
    """The first tokens of a completion."""
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        top_logprobs=completion.top_logprobs[:tokens],
        **changes,
    )


SAME = {
    "again": output(),
    "ended by the user": output(cut(WHOLE, 2, finish_reason="abort")),
    "ended by a notice": output(cut(WHOLE, 1, finish_reason="abort", error="weights changed")),
    "another fingerprint": output(replace(WHOLE, token_ids=[1, 2, 3]), fingerprint="g"),
    "a part of the prompt": output(prompt_logprobs=[None, None]),
}
OTHER = {
    "a token": replace(WHOLE, token_ids=[7, 8, 10]),
    "a log-probability": replace(WHOLE, logprobs=[-1.0, -0.0, -0.25000001]),
    "the sign of a zero": replace(WHOLE, logprobs=[-1.0, 0.0, -0.25]),
    "a top log-probability": replace(WHOLE, top_logprobs=[[(7, -1.0)], [(8, -0.5)], [(8, -0.25)]]),
    "the end": replace(WHOLE, finish_reason="stop"),
    "shorter": cut(WHOLE, 2, finish_reason="length"),
    "longer": replace(
        WHOLE,
        token_ids=[7, 8, 9, 1],
        logprobs=[*WHOLE.logprobs, -3.0],
        top_logprobs=[*WHOLE.top_logprobs, [(1, -3.0)]],
    ),
    "not finite": cut(WHOLE, 2, finish_reason="abort", error=NOT_FINITE),
    "ended by the user elsewhere": cut(
        replace(WHOLE, token_ids=[7, 1, 9]), 2, finish_reason="abort"
    ),
}


def ledger():
    found = Ledger()
    assert found.add(0, output(prompt_logprobs=[None, -1.0]), "alone") == ""
    return found


def test_what_may_follow():
    assert ledger().add(1, output(OTHER["a token"]), "in a crowd") == "", "another request"
    for name, later in SAME.items():
        assert ledger().add(0, later, "in a crowd") == "", name


def test_what_is_a_finding():
    """Control: of every bit that an output has."""
    for name, other in OTHER.items():
        assert ledger().add(0, output(other), "in a crowd"), name
    assert ledger().add(0, output(prompt_logprobs=[None, -2.0]), "in a crowd")


def test_failures_are_no_notices():
    failed = output(cut(WHOLE, 1, finish_reason="abort", error="the pass raised TypeError: x"))
    told = output(cut(WHOLE, 1, finish_reason="abort", error="the weights changed"))
    own = output(cut(WHOLE, 1, finish_reason="abort", error=NOT_FINITE))
    assert [bool(failure(o)) for o in (failed, told, own, output())] == [True, False, False, False]
    assert [noticed(o) for o in (failed, told, own, output())] == [False, True, False, False]
