"""audit: finished outputs computed once more, to the same bits; whatever was changed shows.

Controls: outputs of plain requests on a model whose linears are sensitive to the row count are
found to differ, and a cached page with other values does change what a request gets.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.engine.test_score import EOS, styled
from tests.support.cases import KINDS, bits_of, engine_of, greedy, model_of, run, steady, text
from tests.support.mixes import crowd, needles, plain
from tests.support.tiny import VOCAB, tiny
from tinyspec import RequestOutput, audit
from tinyspec.determinism.fingerprint_parts import digest_of

LISTS = ("logprobs", "top_logprobs")


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
    model = model_of(request.param)
    with steady(model, page_size=8, draft_window=5) as engine:
        rng = random.Random(4)
        requests = [*crowd(rng, 6), *asked(), *crowd(rng, 6)]
        outputs = run(engine, requests)[6:-6]
        reasons = {c.finish_reason for output in outputs for c in output.completions}
        assert reasons == {"stop", "length"}
        yield engine, outputs


def test_audit_passes(audited):
    engine, outputs = audited
    # What is written is as good: nothing that audit needs is lost on disk.
    outputs = [RequestOutput.from_json(output.to_json()) for output in outputs]
    report = audit(engine, outputs)
    assert report, str(report)
    assert not audit(engine, []) and "no outputs" in str(audit(engine, []))
    with pytest.raises(ValueError, match="outputs="):
        audit(engine, [outputs[0], "text"])
    assert [(e.request_id, e.index) for e in report.entries] == [
        (output.request_id, n) for output in outputs for n in range(len(output.completions))
    ]
    assert all(e.verdict == "same" and e.position is None for e in report.entries)
    assert [e.tokens for e in report.entries] == [
        len(c.token_ids) for output in outputs for c in output.completions
    ]
    assert report.fingerprint == engine.fingerprint == outputs[0].fingerprint
    assert f"{len(report.entries)} same" in str(report)
    for entry in report.entries:
        output = next(o for o in outputs if o.request_id == entry.request_id)
        stated = ["token_ids", "finish_reason", "error"]
        stated += [name for name in LISTS if getattr(output.completions[0], name) is not None]
        stated += ["prompt_logprobs"] if output.prompt_logprobs else []
        assert list(entry.verified) == stated


@pytest.mark.parametrize("kind", KINDS)
def test_audit_takes_few_passes(kind):
    """Rows of finished tokens run side by side, as many as a canonical pass holds."""

    def passes():
        return sum(engine.stats().passes.values())

    with steady(model_of(kind)) as engine:
        outputs = run(engine, [(text(20, seed=n), greedy(90)) for n in (1, 2)])
        generated = passes()
        assert audit(engine, outputs)
    assert generated >= 90
    assert passes() - generated <= generated / 5


def edited(output, index=0, **changes):
    """The output with one completion changed."""
    completions = list(output.completions)
    completions[index] = replace(completions[index], **changes)
    return replace(output, completions=completions)


def at(values, place, value):
    return [*values[:place], value, *values[place + 1 :]]


def verdicts(engine, outputs):
    return [(e.verdict, e.position) for e in audit(engine, outputs).entries]


def next_up(value):
    """The neighbouring fp32 value."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(0.0)))


def test_audit_finds_one_token(audited):
    """At every place of a greedy, a sampled and a stopped completion."""
    engine, outputs = audited
    forged, expected = [], []
    for output in (outputs[1], outputs[2], outputs[5], outputs[-3]):
        tokens = output.completions[0].token_ids
        for place in range(len(tokens)):
            other = (tokens[place] + 1) % VOCAB
            forged.append(edited(output, token_ids=at(tokens, place, other)))
            expected.append(("differs", place))
    assert verdicts(engine, forged) == expected


def test_audit_finds_one_bit(audited):
    """In any log-probability: the chosen token's, the best tokens', the prompt's."""
    engine, outputs = audited
    forged, expected = [], []
    for output in (outputs[1], outputs[2], outputs[8]):
        values = output.completions[0].logprobs
        for place, value in enumerate(values):
            assert next_up(value) != value and torch.tensor(next_up(value)).item() == next_up(value)
            forged.append(edited(output, logprobs=at(values, place, next_up(value))))
            expected.append(("differs", place))
    several = outputs[-4]
    top = several.completions[1].top_logprobs
    row = at(top[4], 1, (top[4][1][0], next_up(top[4][1][1])))
    forged.append(edited(several, 1, top_logprobs=at(top, 4, row)))
    expected += [("same", None), ("differs", 4), ("same", None)]
    scored = outputs[-2]
    prompt = scored.prompt_logprobs
    forged.append(replace(scored, prompt_logprobs=at(prompt, 7, next_up(prompt[7]))))
    expected.append(("differs", 0))
    assert verdicts(engine, forged) == expected


def test_audit_finds_a_wrong_end(audited):
    """Too short, too long, past its stop, or ended for another reason than it says."""
    engine, outputs = audited
    cut, stopped = outputs[1], outputs[-3]
    assert [o.completions[0].finish_reason for o in (cut, stopped)] == ["length", "stop"]
    forged, expected = [], []
    for output in (cut, stopped):
        tokens, values = output.completions[0].token_ids, output.completions[0].logprobs
        end, reason = len(tokens), output.completions[0].finish_reason
        for kept in (1, end - 1):
            forged.append(edited(output, token_ids=tokens[:kept], logprobs=values[:kept]))
            expected.append(("differs", kept))
        forged.append(edited(output, token_ids=[*tokens, 1], logprobs=[*values, -1.0]))
        expected.append(("differs", end))
        other = {"length": "stop", "stop": "length"}[reason]
        forged.append(edited(output, finish_reason=other))
        expected.append(("differs", end))
        # Aborted by its user: right as far as it goes.
        half = {"token_ids": tokens[: end - 2], "logprobs": values[: end - 2]}
        forged.append(edited(output, **half, finish_reason="abort"))
        expected.append(("partial", None))
    assert verdicts(engine, forged) == expected


def test_audit_of_plain_outputs():
    """Nothing is promised of them. Said to be deterministic, most are found to differ: on this
    model they have other bits than they would have alone."""
    with engine_of(model_of("shape-sensitive")) as engine:
        fingerprint = engine.fingerprint
        mixed = run(engine, [*asked(), *[(p, plain(s)) for p, s in needles()]])
        assert all(output.fingerprint == fingerprint for output in mixed)
        mine, theirs = mixed[: len(asked())], mixed[len(asked()) :]
        assert audit(engine, mine)
        report = audit(engine, theirs)
        assert not report
        assert {(e.verdict, e.tokens, e.verified) for e in report.entries} == {
            ("not comparable", 0, ())
        }
        assert all("it is plain" in entry.reason for entry in report.entries)
        claimed = [replace(o, params=replace(o.params, deterministic=True)) for o in theirs]
        entries = audit(engine, claimed).entries
        differing = {entry.request_id for entry in entries if entry.verdict == "differs"}
        assert len(differing) >= 4
        assert all(e.position is not None for e in entries if e.verdict == "differs")


def shout(ids, scores):
    return scores * 2


def never(ids, scores):
    return False


def elsewhere(output):
    """As an engine with 99 threads would have written it."""
    parts = {**output.fingerprint_parts, "threads": 99}
    return replace(output, fingerprint=digest_of(parts), fingerprint_parts=parts)


def test_parts_give_the_fingerprint(audited):
    """Whatever of them was changed: the value, its type, a name, or the fingerprint itself."""
    engine, outputs = audited
    own = outputs[0].fingerprint_parts
    assert own == engine.contract.fingerprint.parts
    changed = (
        {**own, "threads": 99},
        {**own, "threads": float(own["threads"])},
        {**own, 1: 1},
        {name: value for name, value in own.items() if name != "threads"},
        [],
    )
    forged = [replace(outputs[0], fingerprint_parts=parts) for parts in changed]
    forged.append(replace(outputs[0], fingerprint="0" * 32))
    forged.append(replace(outputs[0], fingerprint=None))
    shuffled = replace(outputs[0], fingerprint_parts=dict(sorted(own.items())))
    count = len(outputs[0].completions)
    *found, last = audit(engine, [*forged, shuffled]).entries[::count]
    assert len(found) == len(forged)
    for entry in found:
        assert entry.verdict == "differs", entry
        assert "fingerprint_parts do not give its fingerprint" in entry.reason
    assert last.verdict == "same", "control: their order is no part of it"


def test_audit_says_what_cannot_be_compared(audited):
    engine, outputs = audited
    functions = greedy(6, logits_processors=[shout], stopping_criteria=[never])
    own = engine.generate([[4, 5, 6]], functions)[0]
    assert audit(engine, [own])  # the functions are at hand
    unlike = [
        (
            replace(outputs[0], fingerprint="0" * 32, fingerprint_parts=None),
            "its fingerprint is 00",
        ),
        (elsewhere(outputs[0]), f": threads 99 -> {torch.get_num_threads()}"),
        (replace(outputs[0], fingerprint=None, fingerprint_parts=None), "no fingerprint"),
        (RequestOutput.from_json(own.to_json()), "only the name of the function shout"),
    ]
    *found, last = audit(engine, [*(output for output, _ in unlike), outputs[1]]).entries
    assert last.verdict == "same"
    said = [reason for output, reason in unlike for _ in output.completions]
    for entry, reason in zip(found, said, strict=True):
        assert (entry.verdict, entry.position, entry.verified) == ("not comparable", None, ())
        assert reason in entry.reason


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
