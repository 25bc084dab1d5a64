"""What the fuzzer takes for a finding, and what not; its tally, which is resumed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fuzz.ledger import Ledger, failure, noticed
from tests.fuzz.tally import Tally
from tinyspec import RequestOutput, SamplingParams
from tinyspec.outputs import Completion
from tinyspec.runner.sampler import NOT_FINITE

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
    "longer": replace(WHOLE, token_ids=[7, 8, 9, 1], logprobs=[*WHOLE.logprobs, -3.0]),
    "not finite": cut(WHOLE, 2, finish_reason="abort", error=NOT_FINITE),
    "ended by the user elsewhere": cut(
        replace(WHOLE, token_ids=[7, 1, 9]), 2, finish_reason="abort"
    ),
}


def ledger():
    found = Ledger()
    assert found.add(0, output(prompt_logprobs=[None, -1.0]), "alone") == ""
    return found


@pytest.mark.parametrize("later", SAME.values(), ids=SAME)
def test_what_may_follow(later):
    assert ledger().add(0, later, "in a crowd") == ""


def test_other_requests_are_not_compared():
    assert ledger().add(1, output(OTHER["a token"]), "in a crowd") == ""


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_what_is_a_finding(other):
    if other is OTHER["longer"]:
        other = replace(other, top_logprobs=[*WHOLE.top_logprobs, [(1, -3.0)]])
    assert ledger().add(0, output(other), "in a crowd")


def test_prompts_are_compared():
    assert ledger().add(0, output(prompt_logprobs=[None, -2.0]), "in a crowd")


def test_failures_are_no_notices():
    failed = output(cut(WHOLE, 1, finish_reason="abort", error="the pass raised TypeError: x"))
    told = output(cut(WHOLE, 1, finish_reason="abort", error="the weights changed"))
    own = output(cut(WHOLE, 1, finish_reason="abort", error=NOT_FINITE))
    assert [bool(failure(o)) for o in (failed, told, own, output())] == [True, False, False, False]
    assert [noticed(o) for o in (failed, told, own, output())] == [False, True, False, False]


def result(*findings):
    model = SimpleNamespace(kind="llama", dtype="fp32")
    draw = SimpleNamespace(influence=None, model=model)
    return SimpleNamespace(draw=draw, counts=Counter(compared=3), findings=list(findings))


def test_a_tally_is_resumed(tmp_path):
    path = tmp_path / "folder" / "tally.json"
    first = Tally(path, "a")
    first.add(result(), "", 1.0)
    first.add(result("other bits"), "the command", 1.0)
    again = Tally(path, "a")
    assert again.runs == 2 and [one["command"] for one in again.findings] == ["the command"]
    again.add(result(), "", 1.0)
    assert Tally(path, "a").runs == 3 and Tally(path, "b").runs == 0
    (kept,) = json.loads(path.read_text()).values()
    assert kept["counts"] == {"compared": 9} and kept["kinds"] == {"llama": 3}
