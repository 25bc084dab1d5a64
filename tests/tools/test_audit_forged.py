"""audit of outputs in which something was changed: it is found, by name, whatever it is.

An honest output before and one after the forged one keep their verdicts.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.cases import greedy, model_of, steady, text
from tests.support.tiny import VOCAB
from tinyspec import Engine, RequestOutput, SamplingParams, audit
from tinyspec.tools.demo import BUNDLED

TOKENS = 9
SAMPLED = {"temperature": 1.3, "seed": 5, "num_return_sequences": 2, "top_logprobs": 3}


@pytest.fixture(scope="module")
def engine():
    with steady(model_of("as is"), page_size=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def honest(engine):
    """Everything that an output can state: two completions, all kinds of log-probabilities."""
    params = greedy(TOKENS, prompt_logprobs=True, **SAMPLED)
    (output,) = engine.generate([text(12)], params)
    assert output.completions[0].token_ids != output.completions[1].token_ids
    assert audit(engine, [output])
    return output


@pytest.fixture(scope="module")
def bare(engine):
    """An output without log-probabilities."""
    return engine.generate([text(7, seed=2)], greedy(6, logprobs=False))[0]


def edited(output, path, change):
    """Through JSON, with the value at ``path`` changed to ``change``, or by it."""
    data = json.loads(output.to_json())
    *way, last = path
    place = data
    for step in way:
        place = place[step]
    place[last] = change(place[last]) if callable(change) else change
    return RequestOutput.from_json(json.dumps(data))


def entries_of(engine, honest, forged):
    """Entries of ``forged``, audited between two honest ones."""
    report = audit(engine, [honest, forged, honest])
    assert not report
    before, found, after = report.entries[:2], report.entries[2:-2], report.entries[-2:]
    assert [entry.verdict for entry in (*before, *after)] == ["same"] * 4
    assert json.loads(report.to_json())["entries"][2]["reason"] == found[0].reason
    assert found[0].reason in str(report)
    return found


def of_first(*path):
    return ("completions", 0, *path)


# Path, change, position (None: not at a token), words of the reason.
FOUND = [
    (of_first("token_ids", 2), float, 2, ".0, but the engine has"),
    (of_first("token_ids", 2), None, 2, "token None"),
    (of_first("token_ids", 2), lambda t: (t + 1) % VOCAB, 2, "but the engine has"),
    (of_first("token_ids", 2), 10**30, 2, "token 1000"),
    (of_first("token_ids"), "12", 0, "token_ids is '12', not a list"),
    (of_first("token_ids"), lambda t: t[:-1], TOKENS - 1, "the engine continues"),
    (of_first("token_ids"), lambda t: [*t, 3], TOKENS, "the engine ends before it"),
    (of_first("logprobs"), None, None, "it has no logprobs, which its parameters ask for"),
    (of_first("logprobs"), "abc", None, "logprobs is 'abc', not a list"),
    (of_first("logprobs"), lambda v: v[:-1], TOKENS - 1, f"{TOKENS - 1} logprobs for {TOKENS}"),
    (of_first("logprobs"), lambda v: [*v, -1.0], TOKENS, f"{TOKENS + 1} logprobs for {TOKENS}"),
    (of_first("logprobs", 3), int, 3, "logprobs"),
    (of_first("logprobs", 3), lambda v: math.nextafter(v, 0.0), 3, "logprobs"),
    (of_first("top_logprobs"), None, None, "it has no top_logprobs"),
    (of_first("top_logprobs"), lambda v: [*v, v[0]], TOKENS, f"{TOKENS + 1} top_logprobs"),
    (of_first("top_logprobs", 4), lambda row: row[::-1], 4, "top_logprobs"),
    (of_first("top_logprobs", 4, 1, 0), float, 4, "top_logprobs"),
    (of_first("top_logprobs", 4, 1, 1), lambda v: math.nextafter(v, 0.0), 4, "top_logprobs"),
    (("prompt_logprobs",), None, None, "it has no prompt_logprobs"),
    (("prompt_logprobs",), lambda v: v[:-1], 0, "11 prompt_logprobs for 12"),
    (("prompt_logprobs", 0), -1.0, 0, "of prompt token 0"),
    (("prompt_logprobs", 5), lambda v: math.nextafter(v, 0.0), 0, "of prompt token 5"),
    (of_first("text"), 5, None, "text 5"),
    (of_first("finish_reason"), "stop", TOKENS, "but the engine with 'length'"),
    (of_first("finish_reason"), "abort", TOKENS, "it ends with 'abort'"),
    (of_first("error"), "out of memory", None, "error is 'out of memory'"),
    (of_first("error"), 0, None, "error is 0"),
    (("completions",), [], None, "it has 0 of 2 completions"),
    (("completions",), lambda c: [*c, c[0]], None, "it has 3 of 2 completions"),
    (("completions",), lambda c: c[::-1], 0, "but the engine has"),
    (("prompt_token_ids",), "Once", None, "prompt_token_ids is 'Once'"),
    (("prompt_token_ids",), [{"role": "user", "content": "a"}], None, "which is no token id"),
    (("prompt_token_ids", 3), float, None, "which is no token id"),
    (("prompt_token_ids", 3), True, None, "prompt_token_ids has True"),
    (("prompt_token_ids", 3), VOCAB, None, f"{VOCAB}, not in a vocabulary of {VOCAB}"),
    (("params", "seed"), None, None, "seed is None"),
    (("params", "eos_token_id"), None, None, "eos_token_id is None"),
    (("params", "max_new_tokens"), TOKENS - 2, TOKENS - 2, "the engine ends before it"),
    (("params", "max_new_tokens"), TOKENS + 2, TOKENS, "the engine continues"),
    (("params", "num_return_sequences"), 10**9, None, "it has 2 of 1000000000 completions"),
    (("params", "logprobs"), False, None, "it has logprobs, which its parameters do not ask for"),
    (("params", "top_logprobs"), 4, 0, "top_logprobs"),
    (("params", "prompt_logprobs"), False, None, "it has prompt_logprobs, which its"),
]


@pytest.fixture(scope="module")
def found(engine, honest):
    """Entries of every forgery, all audited in one call, each after an honest output."""
    forged = [edited(honest, path, change) for path, change, *_ in FOUND]
    forged = [replace(output, request_id=f"forged-{n}") for n, output in enumerate(forged)]
    report = audit(engine, [output for one in forged for output in (honest, one)])
    mine = [entry for entry in report.entries if entry.request_id == honest.request_id]
    assert [entry.verdict for entry in mine] == ["same"] * 2 * len(FOUND)
    return [[e for e in report.entries if e.request_id == o.request_id] for o in forged]


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_changed_is_found(found, number):
    path, _, position, said = FOUND[number]
    entry, *others = found[number]
    assert (entry.verdict, entry.position) == ("differs", position), entry
    assert said in entry.reason
    if path[:2] == of_first():
        assert [other.verdict for other in others] == ["same"]


class Unprintable(int):
    def __repr__(self):
        raise RuntimeError("never")


# Values that JSON does not keep: of the first completion, of the output.
IN_MEMORY = [
    ("token_ids", lambda c: [*c.token_ids[:-1], np.int64(c.token_ids[-1])]),
    ("token_ids", lambda c: [Unprintable(c.token_ids[0]), *c.token_ids[1:]]),
    ("token_ids", lambda c: [10**5000, *c.token_ids[1:]]),
    ("token_ids", lambda c: torch.tensor(c.token_ids)),
    ("logprobs", lambda c: list(map(np.float64, c.logprobs))),
    ("logprobs", lambda c: tuple(c.logprobs)),
    ("top_logprobs", lambda c: [list(map(list, row)) for row in c.top_logprobs]),
    ("finish_reason", lambda c: np.array(["length"])),
    ("error", lambda c: RuntimeError("none")),
]
WHOLE = [
    ("params", lambda o: o.params.to_dict()),
    ("prompt_token_ids", lambda o: torch.tensor(o.prompt_token_ids)),
    ("completions", lambda o: [json.loads(c.to_json()) for c in o.completions]),
    ("completions", lambda o: None),
    ("prompt_logprobs", lambda o: tuple(o.prompt_logprobs)),
]


def test_other_types_are_found(engine, honest):
    first, second = honest.completions
    for name, change in IN_MEMORY:
        changed = replace(first, **{name: change(first)})
        entries = entries_of(engine, honest, replace(honest, completions=[changed, second]))
        assert [entry.verdict for entry in entries] == ["differs", "same"], name
    for name, change in WHOLE:
        entries = entries_of(engine, honest, replace(honest, **{name: change(honest)}))
        assert {entry.verdict for entry in entries} == {"differs"}
        assert name in entries[0].reason


def test_the_sign_of_zero(engine, honest):
    """One token left by the filter: its log-probability is exactly 0."""
    (output,) = engine.generate([text(5)], greedy(4, temperature=1.0, seed=1, top_k=1))
    values = output.completions[0].logprobs
    assert set(map(abs, values)) == {0.0} and audit(engine, [output])
    for other in (-values[2], 0):
        forged = edited(output, of_first("logprobs", 2), other)
        (entry,) = entries_of(engine, honest, forged)
        assert (entry.verdict, entry.position) == ("differs", 2)


def test_requests_that_the_engine_refuses(engine, honest, bare):
    for path, change in (
        (("params", "max_new_tokens"), 10**6),
        (("params", "stop_token_ids"), [VOCAB]),
        (("params", "top_logprobs"), VOCAB + 1),
        (("params", "stop_strings"), ["a"]),
    ):
        (entry,) = entries_of(engine, honest, edited(bare, path, change))
        assert entry.verdict == "not comparable" and path[1] in entry.reason


def test_what_says_nothing_else_is_the_same(engine, honest, bare):
    """Fields that are no functions of the request, and parameters that change nothing."""
    for path, change in (
        (("request_id",), 7),
        (of_first("stats", "drafted"), 10**6),
        (("params", "min_p"), 0.0),
        (("params", "stop_strings"), list),
    ):
        report = audit(engine, [edited(honest, path, change)])
        assert report, str(report)
    assert audit(engine, [edited(bare, ("params", "seed"), 3)])


def aborted(engine, prompt, params, tokens):
    """A request's output after a step, and more until each completion has some tokens."""
    request_id = engine.add_request(prompt, params)
    assert not engine.step()
    while min(s.num_generated for s in engine.tracker.requests[request_id].sequences) < tokens:
        assert not engine.step()
    return engine.abort(request_id)


def test_aborted_outputs_are_partial(engine, honest):
    output = aborted(engine, text(12), greedy(40, **SAMPLED), 2)
    counts = [len(completion.token_ids) for completion in output.completions]
    assert 2 <= min(counts) <= max(counts) < 40
    report = audit(engine, [output])
    assert not report and "2 partial" in str(report)
    for entry, count in zip(report.entries, counts, strict=True):
        assert (entry.verdict, entry.tokens, entry.position) == ("partial", count, None)
        assert "its end cannot be" in entry.reason
        assert entry.verified == ("token_ids", "logprobs", "top_logprobs")
    for path, change, position in (
        (of_first("token_ids", 1), lambda t: (t + 1) % VOCAB, 1),
        (of_first("logprobs", 1), lambda v: math.nextafter(v, 0.0), 1),
        (of_first("logprobs"), lambda v: v[:-1], counts[0] - 1),
        (of_first("finish_reason"), "length", counts[0]),
        (of_first("error"), 5, None),
    ):
        entry, other = entries_of(engine, honest, edited(output, path, change))
        assert (entry.verdict, entry.position) == ("differs", position)
        assert other.verdict == "partial"
    # What the user was told of the end is not verified.
    entry, _ = entries_of(engine, honest, edited(output, of_first("error"), "out of memory"))
    assert entry.verdict == "partial"


def test_aborted_before_the_first_token(honest):
    """Only some of the prompt's log-probabilities are known by then."""
    with steady(model_of("as is"), max_rows=16, prefix_cache=False) as engine:
        output = aborted(engine, text(40), greedy(5, prompt_logprobs=True), 0)
        values = output.prompt_logprobs
        known = [place for place, value in enumerate(values) if value is not None]
        assert 0 < len(known) < 39 and output.completions[0].token_ids == []
        (entry,) = audit(engine, [output]).entries
        assert (entry.verdict, entry.tokens) == ("partial", 0)
        assert "prompt's log-probabilities" in entry.reason
        assert "prompt_logprobs" not in entry.verified
        other = math.nextafter(values[known[0]], 0.0)
        (entry,) = audit(engine, [edited(output, ("prompt_logprobs", known[0]), other)]).entries
        assert (entry.verdict, entry.position) == ("differs", 0)


@pytest.fixture(scope="module")
def reader():
    """An engine with a tokenizer, and outputs with text."""
    with Engine.from_pretrained(BUNDLED, device="cpu") as engine:
        params = SamplingParams(max_new_tokens=12, deterministic=True, temperature=0.8, seed=3)
        yield engine, engine.generate(["Once upon a time", "Tom had a"], params)


def test_text_is_compared(reader):
    engine, (output, other) = reader
    report = audit(engine, [output, other])
    assert report and all("text" in entry.verified for entry in report.entries)
    own = output.completions[0].text
    for text_, verdict in (
        (own + " ", "differs"),
        (own[:-1], "differs"),
        (own.swapcase(), "differs"),
        ("", "differs"),
        (other.completions[0].text, "differs"),
        ([own], "differs"),
        (None, "partial"),
    ):
        forged = edited(output, of_first("text"), text_)
        entry, kept = audit(engine, [forged, other]).entries
        assert (entry.verdict, entry.position, kept.verdict) == (verdict, None, "same"), entry
        assert "text" in entry.reason and "text" not in entry.verified
        assert entry.tokens == len(output.completions[0].token_ids)
