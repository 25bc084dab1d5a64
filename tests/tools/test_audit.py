"""audit: finished outputs computed once more, to the same bits; whatever was changed is named.

Forgeries of every kind, drawn at random with a judge: tests/fuzz/test_forgeries.py. Controls:
outputs of plain requests on a model whose linears are sensitive to the row count are found to
differ, and a cached page with other values does change what a request gets.
"""

import json
import math
import random
from dataclasses import replace
from functools import reduce
from operator import getitem

import pytest
import torch

from tests.engine.test_score import EOS, styled
from tests.support.cases import KINDS, bits_of, engine_of, greedy, model_of, run, steady, text
from tests.support.mixes import crowd, needles, plain
from tests.support.tiny import VOCAB, tiny
from tinyspec import RequestOutput, audit
from tinyspec.determinism.fingerprint_parts import digest_of

TOKENS = 9
SAMPLED = {"temperature": 1.3, "seed": 5, "num_return_sequences": 2, "top_logprobs": 3}


def asked():
    """Requests of every kind that audit must be able to replay."""
    several = greedy(12, temperature=1.1, seed=9, num_return_sequences=3, top_logprobs=2)
    return [
        *needles(),
        *styled(),
        (text(30, seed=6), several),
        (text(5, seed=7), greedy(60, eos_token_id=EOS, min_new_tokens=6, temperature=2.0, seed=1)),
        (text(26, seed=3), greedy(7, prompt_logprobs=True, stop_token_ids=tuple(range(60)))),
        (text(8, seed=8), greedy(9, logprobs=False)),
    ]


@pytest.fixture(scope="module", params=KINDS)
def audited(request):
    """An engine and its outputs, crowded and drafted."""
    with steady(model_of(request.param), page_size=8, draft_window=5) as engine:
        rng = random.Random(4)
        outputs = run(engine, [*crowd(rng, 6), *asked(), *crowd(rng, 6)])[6:-6]
        assert {c.finish_reason for o in outputs for c in o.completions} == {"stop", "length"}
        yield engine, outputs


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
    return output


def test_audit_passes(audited):
    """In few passes: rows of finished tokens run side by side. What is written is as good."""
    engine, outputs = audited
    before = sum(engine.stats().passes.values())
    assert audit(engine, outputs[4:5]) and len(outputs[4].completions[0].token_ids) == 40
    assert sum(engine.stats().passes.values()) - before <= 8
    report = audit(engine, [RequestOutput.from_json(output.to_json()) for output in outputs])
    assert report, str(report)
    assert report.fingerprint == engine.fingerprint == outputs[0].fingerprint
    assert f"{len(report.entries)} same" in str(report)
    each = [(o, n, c) for o in outputs for n, c in enumerate(o.completions)]
    for entry, (output, index, completion) in zip(report.entries, each, strict=True):
        assert (entry.request_id, entry.index) == (output.request_id, index)
        assert (entry.position, entry.tokens) == (None, len(completion.token_ids))
    assert not audit(engine, []) and "no outputs" in str(audit(engine, []))
    with pytest.raises(ValueError, match="outputs="):
        audit(engine, [outputs[0], "text"])


def edited(output, path, change):
    """Through JSON, with the value at ``path`` changed to ``change``, or by it."""
    data = json.loads(output.to_json())
    *way, last = path
    place = reduce(getitem, way, data)
    place[last] = change(place[last]) if callable(change) else change
    return RequestOutput.from_json(json.dumps(data))


def of_first(*path):
    return ("completions", 0, *path)


def bit(value):
    return math.nextafter(value, 0.0)


# Path, change, position (None: not at a token), words of the reason.
FOUND = [
    (of_first("token_ids", 2), None, 2, "token (absent) -> "),
    (of_first("token_ids", 2), 10**30, 2, "token 1000"),
    (of_first("token_ids"), "12", 0, "token_ids '12' -> ["),
    (of_first("token_ids"), lambda t: t[:-1], TOKENS - 1, "token (absent) -> "),
    (of_first("top_logprobs", 4, 1, 1), bit, 4, "top log-probabilities [("),
    (("prompt_logprobs",), None, None, "prompt_logprobs (absent) -> ["),
    (("prompt_logprobs", 5), bit, None, "of prompt token 5: "),
    (of_first("finish_reason"), "stop", None, "finish_reason 'stop' -> 'length'"),
    (("completions",), [], None, "it has 0 of 2 completions"),
    (("prompt_token_ids",), "Once", None, "prompt_token_ids is 'Once'"),
    (("params", "seed"), None, None, "seed is None"),
    (("params", "max_new_tokens"), None, None, "max_new_tokens is None"),
    (("params", "max_new_tokens"), TOKENS - 2, TOKENS - 2, "-> (absent)"),
    # Plain outputs, or those that this engine cannot repeat.
    (("params", "deterministic"), False, None, "it is plain"),
    (("params", "max_new_tokens"), 10**6, None, "this engine refuses it: max_new_tokens"),
    (("prompt_token_ids", 3), VOCAB, None, "this engine refuses it: prompt token id"),
]


def test_what_was_changed_is_found(engine, honest):
    """By name; an honest output before and one after a forged one are approved."""
    forged = [edited(honest, path, change) for path, change, *_ in FOUND]
    forged = [replace(output, request_id=f"forged-{n}") for n, output in enumerate(forged)]
    report = audit(engine, [output for one in forged for output in (honest, one)])
    mine = [entry for entry in report.entries if entry.request_id == honest.request_id]
    assert not report and {entry.verdict for entry in mine} == {"same"}
    for output, (path, _, position, said) in zip(forged, FOUND, strict=True):
        entry, *others = (e for e in report.entries if e.request_id == output.request_id)
        verdict = "not comparable" if said.startswith(("it is plain", "this engine")) else "differs"
        assert (entry.verdict, entry.position) == (verdict, position), (path, entry)
        assert said in entry.reason, (path, entry)
        assert path[:2] != of_first() or [other.verdict for other in others] == ["same"]


def test_what_says_nothing_else_is_the_same(engine, honest):
    """Fields that are no functions of the request, and parameters that change nothing. Control:
    the sign of a log-probability that is exactly 0, as one token is left by the filter."""
    for path, change in (
        (("request_id",), 7),
        (of_first("stats", "drafted"), 10**6),
        (("params", "min_p"), 0.0),
    ):
        assert audit(engine, [edited(honest, path, change)])
    (output,) = engine.generate([text(5)], greedy(4, temperature=1.0, seed=1, top_k=1))
    value = output.completions[0].logprobs[2]
    assert value == 0.0 and audit(engine, [output])
    for other in (-value, 0):
        (entry,) = audit(engine, [edited(output, of_first("logprobs", 2), other)]).entries
        assert (entry.verdict, entry.position) == ("differs", 2)


def aborted(engine, prompt, params, tokens):
    """A request's output after a step, and more until each completion has some tokens."""
    request_id = engine.add_request(prompt, params)
    assert not engine.step()
    while min(s.num_generated for s in engine.tracker.requests[request_id].sequences) < tokens:
        assert not engine.step()
    return engine.abort(request_id)


def test_aborted_outputs_are_partial(engine):
    output = aborted(engine, text(12), greedy(40, **SAMPLED), 2)
    counts = [len(completion.token_ids) for completion in output.completions]
    report = audit(engine, [output])
    assert not report and "2 partial" in str(report)
    for entry, count in zip(report.entries, counts, strict=True):
        assert 2 <= count < 40 and "its end cannot be" in entry.reason
        assert (entry.verdict, entry.tokens, entry.position) == ("partial", count, None)
    for path, change, verdict, position in (
        (of_first("token_ids", 1), lambda t: (t + 1) % VOCAB, "differs", 1),
        (of_first("logprobs", 1), bit, "differs", 1),
        (of_first("logprobs"), lambda v: v[:-1], "differs", counts[0] - 1),
        (of_first("finish_reason"), "length", "differs", counts[0]),
        (of_first("error"), 5, "differs", None),
        # What the user was told of the end is not verified.
        (of_first("error"), "out of memory", "partial", None),
    ):
        entry, other = audit(engine, [edited(output, path, change)]).entries
        assert (entry.verdict, entry.position, other.verdict) == (verdict, position, "partial")


def test_aborted_before_the_first_token():
    """Only some of the prompt's log-probabilities are known by then."""
    with steady(model_of("as is"), max_rows=16, prefix_cache=False) as engine:
        output = aborted(engine, text(40), greedy(5, prompt_logprobs=True), 0)
        values = output.prompt_logprobs
        known = [place for place, value in enumerate(values) if value is not None]
        assert 0 < len(known) < 39 and output.completions[0].token_ids == []
        (entry,) = audit(engine, [output]).entries
        assert (entry.verdict, entry.tokens) == ("partial", 0)
        assert "prompt's log-probabilities" in entry.reason
        other = bit(values[known[0]])
        (entry,) = audit(engine, [edited(output, ("prompt_logprobs", known[0]), other)]).entries
        assert entry.verdict == "differs"


def test_control_plain_outputs_differ():
    """Said to be deterministic, most are found to differ: on this model they have other bits than
    they would have alone."""
    with engine_of(model_of("shape-sensitive")) as engine:
        mixed = run(engine, [*asked(), *[(p, plain(s)) for p, s in needles()]])
        mine, theirs = mixed[: len(asked())], mixed[len(asked()) :]
        assert audit(engine, mine)
        assert {e.verdict for e in audit(engine, theirs).entries} == {"not comparable"}
        claimed = [replace(o, params=replace(o.params, deterministic=True)) for o in theirs]
        entries = audit(engine, claimed).entries
        assert len({e.request_id for e in entries if e.verdict == "differs"}) >= 4


def shout(ids, scores):
    return scores * 2


def test_fingerprints(engine, honest):
    """Parts that do not give the fingerprint differ, whatever of them was changed; an output of
    another engine, or with functions that JSON did not keep, is not comparable."""
    own, digest = honest.fingerprint_parts, honest.fingerprint
    other, zeros = {**own, "threads": 99}, "0" * 32
    untrue = "fingerprint_parts do not give its fingerprint"
    (functional,) = engine.generate([[4, 5, 6]], greedy(6, logits_processors=[shout]))
    assert audit(engine, [functional])  # the function is at hand
    (entry,) = audit(engine, [RequestOutput.from_json(functional.to_json())]).entries
    assert entry.verdict == "not comparable"
    assert "only the name of the function shout" in entry.reason
    for fingerprint, parts, verdict, said in (
        *((digest, lie, "differs", untrue) for lie in (other, {**own, 1: 1}, [])),
        (digest, {**own, "threads": float(own["threads"])}, "differs", untrue),
        *((lie, own, "differs", untrue) for lie in (zeros, None)),
        (zeros, None, "not comparable", "is 00"),
        (None, None, "not comparable", "no fingerprint"),
        (digest_of(other), other, "not comparable", f"threads 99 -> {torch.get_num_threads()}"),
    ):
        forged = replace(honest, fingerprint=fingerprint, fingerprint_parts=parts)
        entry = audit(engine, [forged]).entries[0]
        assert entry.verdict == verdict and said in entry.reason, entry
    shuffled = replace(honest, fingerprint_parts=dict(sorted(own.items())))
    assert audit(engine, [shuffled]), "control: their order is no part of it"


def test_audit_trusts_no_cached_page():
    """Pages whose KV was changed in place: a request starts from them, audit computes anew."""
    prompt = text(48, seed=2)
    with engine_of(tiny(), page_size=16) as engine:
        good = engine.generate([prompt], greedy(8))[0]
        assert len(engine.admission.prefix) == 3
        with torch.inference_mode():
            for page in engine.admission.prefix.keys:
                engine.runner.cache.v[0][page] += 1
        assert audit(engine, [good])
        # Control: the pages are still there to be started from, and spoil what is.
        spoilt = engine.generate([prompt], greedy(8))[0]
        assert spoilt.completions[0].stats.cached_prompt_tokens == 47
        assert bits_of([spoilt]) != bits_of([good])
        report = audit(engine, [good, spoilt])
        assert [e.verdict for e in report.entries] == ["same", "differs"]
