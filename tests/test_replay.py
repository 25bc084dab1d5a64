"""score and audit: finished tokens computed once more, to the same bits; whatever was changed shows.

Controls: outputs of plain requests on a model whose linears are sensitive to the row count are
found to differ, and a cached page with other values does change what a request gets.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    DTYPES,
    KINDS,
    bits_of,
    drain,
    engine_of,
    greedy,
    model_of,
    run,
    text,
    whole,
)
from tests.support.mixes import crowd, needles, plain
from tests.support.tiny import VOCAB, tiny
from tinyspec import RequestOutput, SamplingParams, audit
from tinyspec.models import BUNDLED

EOS = (5, 40, 41, 42, 90)
STYLES = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 2},
    "top_k": {"temperature": 1.2, "seed": 3, "top_k": 9},
    "top_p": {"temperature": 1.0, "seed": 4, "top_p": 0.8, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.4, "temperature": 0.6, "seed": 5},
    "minimum": {"min_new_tokens": 9, "eos_token_id": EOS, "temperature": 1.5, "seed": 6},
    "raw": {"temperature": 0.8, "seed": 7, "logprobs_mode": "raw"},
    "ignored stop": {"eos_token_id": EOS, "ignore_eos": True, "temperature": 1.5, "seed": 8},
}


def styled():
    """A request of every style; their prompts share prefixes."""
    return [
        (text(11 + 9 * n, seed=3), greedy(14, **style)) for n, style in enumerate(STYLES.values())
    ]


def tokens_of(outputs):
    return [output.completions[0].token_ids for output in outputs]


def logprobs_of(outputs):
    return [output.completions[0].logprobs for output in outputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_score_has_the_bits_of_generation(kind, dtype):
    """Generated one by one; scored together, alone, in a crowd, with and without the flag."""
    model = model_of(kind, dtype)
    prompts, params = zip(*styled(), strict=True)
    with engine_of(model, prefix_cache=False) as engine:
        outputs = [engine.generate([p], s)[0] for p, s in styled()]
        tokens, expected = tokens_of(outputs), logprobs_of(outputs)
    with engine_of(model, page_size=8) as engine:
        assert engine.score(prompts, tokens, list(params)) == expected
        assert engine.score(prompts, tokens, [plain(s) for s in params]) == expected
        for prompt, own, wanted, theirs in zip(prompts, tokens, params, expected, strict=True):
            assert engine.score([prompt], [own], wanted) == [theirs]
        for prompt, others in crowd(random.Random(3), 15):
            engine.add_request(prompt, others)
        for _ in range(3):
            engine.step()
        assert engine.score(prompts, tokens, list(params)) == expected
        drain(engine)
        assert whole(engine)


def test_control_plain_generation_has_other_bits_than_its_score():
    with engine_of(model_of("shape-sensitive")) as engine:
        outputs = run(engine, [(p, plain(s)) for p, s in styled()])
        params = [s for _, s in styled()]
        scores = engine.score([p for p, _ in styled()], tokens_of(outputs), params)
    assert all(mine != theirs for mine, theirs in zip(scores, logprobs_of(outputs), strict=True))


@pytest.mark.parametrize("name", STYLES)
def test_score_of_given_tokens(name):
    """Tokens that nobody would have sampled, stop tokens among them: scored one place after the
    other, each is what a prompt up to there gives it, and nothing stops."""
    prompt, given = text(20, seed=1), [7, *EOS, 100, 5, 5, 3]
    style = {**STYLES[name], "stop_token_ids": (7,)}
    if name == "minimum":
        style["min_new_tokens"] = 0
    with engine_of(model_of("shape-sensitive"), page_size=8) as engine:
        scores = engine.score([prompt], [given], greedy(14, **style))[0]
        assert len(scores) == len(given)
        forced = [
            engine.score([prompt + given[:n]], [given[n:]], greedy(14, **style))[0]
            for n in range(len(given))
        ]
        chosen = engine.generate([prompt + given[:4]], greedy(1, top_logprobs=VOCAB, **style))[0]
    assert forced == [scores[n:] for n in range(len(given))]
    top = dict(chosen.completions[0].top_logprobs[0])
    assert scores[4] == top[given[4]]


def test_score_of_a_stop_before_the_minimum_is_minus_infinity():
    """As in generation, where no stop token can be sampled before ``min_new_tokens``."""
    params = SamplingParams(min_new_tokens=3, eos_token_id=5)
    with engine_of(tiny()) as engine:
        (early,) = engine.score([[1, 2]], [[9, 5, 8, 5]], params)
        (late,) = engine.score([[1, 2]], [[9, 5, 8, 5]], SamplingParams(eos_token_id=5))
    assert [math.isinf(value) for value in early] == [False, True, False, False]
    assert early[1] < 0 and not any(map(math.isinf, late))
    assert early[3] == late[3] and early[0] != late[0]


@pytest.mark.parametrize(
    ("prompts", "continuations", "params", "said"),
    [
        ([[1]], [[1], [2]], None, "continuations='2 of them'"),
        ([[1]], [[]], None, "continuation="),
        ([[1]], [[VOCAB]], None, f"continuation token id={VOCAB}"),
        ([[1]], [[-1]], None, "continuation token id=-1"),
        ([[1]], [[True]], None, "continuation="),
        ([[1]], ["text"], None, "continuation='text'"),
        ([[VOCAB]], [[1]], None, "prompt token id"),
        ([], [], None, "prompts="),
        ([[1]], [[2]], [], "params="),
        ([[1]], [[2] * 512], None, "max_new_tokens=512"),
    ],
    ids=str,
)
def test_score_refuses_by_name(prompts, continuations, params, said):
    with engine_of(tiny()) as engine:
        with pytest.raises(ValueError) as caught:
            engine.score(prompts, continuations, params)
        assert said in str(caught.value)
        assert not engine.has_unfinished()


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
    with engine_of(model, page_size=8, draft_window=5) as engine:
        rng = random.Random(4)
        requests = [*crowd(rng, 6), *asked(), *crowd(rng, 6)]
        outputs = run(engine, requests)[6:-6]
        reasons = {c.finish_reason for output in outputs for c in output.completions}
        assert reasons == {"stop", "length"}
        yield engine, outputs


def test_audit_passes(audited):
    engine, outputs = audited
    report = audit(engine, outputs)
    assert report, str(report)
    assert [(e.request_id, e.index) for e in report.entries] == [
        (output.request_id, n) for output in outputs for n in range(len(output.completions))
    ]
    assert all(e.verdict == "same" and e.position is None for e in report.entries)
    assert [e.tokens for e in report.entries] == [
        len(c.token_ids) for output in outputs for c in output.completions
    ]
    assert report.fingerprint == engine.fingerprint == outputs[0].fingerprint
    assert f"{len(report.entries)} same" in str(report)


def test_audit_after_json(audited):
    """Nothing that audit needs is lost on disk; another engine of the same fingerprint will do."""
    _, outputs = audited
    again = [RequestOutput.from_json(output.to_json()) for output in outputs]
    kind = "as is" if type(audited[0].model.lm_head).__name__ != "ShapeSensitiveLinear" else KINDS[1]
    with engine_of(model_of(kind), page_size=64, max_rows=50) as other:
        report = audit(other, again)
    assert report, str(report)


def test_audit_takes_few_passes(audited):
    engine, outputs = audited
    alone = [output for output in outputs if output.params.num_return_sequences == 1]
    before = sum(engine.stats().passes.values())
    assert audit(engine, alone)
    taken = sum(engine.stats().passes.values()) - before
    longest = max(len(output.completions[0].token_ids) for output in alone)
    assert taken <= longest / 3


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
        expected.append(("same", None))
    assert verdicts(engine, forged) == expected


@pytest.mark.parametrize(
    "changes", [{"seed": 12345}, {"temperature": 0.1}, {"top_k": 2}, {"repetition_penalty": 3.0}]
)
def test_audit_finds_other_parameters(audited, changes):
    """At the first place where the engine, so asked, has something else."""
    engine, outputs = audited
    output = outputs[2]
    params = replace(output.params, **changes)
    own = engine.generate([output.prompt_token_ids], params)[0].completions[0]
    theirs = output.completions[0]
    pairs = zip(
        zip(own.token_ids, own.logprobs, strict=True),
        zip(theirs.token_ids, theirs.logprobs, strict=True),
        strict=False,
    )
    first = next(n for n, (mine, other) in enumerate(pairs) if mine != other)
    assert verdicts(engine, [replace(output, params=params)]) == [("differs", first)]


def test_audit_finds_another_prompt(audited):
    engine, outputs = audited
    prompt = outputs[3].prompt_token_ids
    forged = replace(outputs[3], prompt_token_ids=at(prompt, 0, (prompt[0] + 1) % VOCAB))
    assert not audit(engine, [forged])
    assert audit(engine, [outputs[3]])


def test_audit_of_plain_outputs():
    """Plain requests on this model have other bits than they would have alone; the others pass."""
    with engine_of(model_of("shape-sensitive")) as engine:
        fingerprint = engine.fingerprint
        mixed = run(engine, [*asked(), *[(p, plain(s)) for p, s in needles()]])
        assert audit(engine, mixed[: len(asked())])
        report = audit(engine, mixed[len(asked()) :])
        assert not report
        assert all(output.fingerprint == fingerprint for output in mixed)
        differing = {e.request_id for e in report.entries if e.verdict == "differs"}
        assert len(differing) >= 4
        assert all(e.position is not None for e in report.entries if e.verdict == "differs")


def shout(ids, scores):
    return scores * 2


def never(ids, scores):
    return False


def test_audit_says_what_cannot_be_compared(audited):
    engine, outputs = audited
    functions = greedy(6, logits_processors=[shout], stopping_criteria=[never])
    own = engine.generate([[4, 5, 6]], functions)[0]
    assert audit(engine, [own])  # the functions are at hand
    unlike = [
        (replace(outputs[0], fingerprint="0" * 32), "its fingerprint is 0000"),
        (replace(outputs[0], fingerprint=None), "no fingerprint"),
        (RequestOutput.from_json(own.to_json()), "shout was a function"),
        (replace(outputs[-4], completions=outputs[-4].completions[:2]), "2 of 3 completions"),
    ]
    *found, last = audit(engine, [*(output for output, _ in unlike), outputs[1]]).entries
    assert last.verdict == "same"
    said = [reason for output, reason in unlike for _ in output.completions]
    for entry, reason in zip(found, said, strict=True):
        assert (entry.verdict, entry.position) == ("not comparable", None)
        assert reason in entry.reason


def test_audit_refuses_what_is_no_output(audited):
    engine, outputs = audited
    with pytest.raises(ValueError, match="outputs="):
        audit(engine, [outputs[0], "text"])
    assert audit(engine, [])


def test_audit_trusts_no_cached_page():
    """Pages whose KV was changed in place: audit computes anew, where a request starts from them."""
    prompt = text(48, seed=2)
    with engine_of(tiny(), page_size=16) as engine:
        good = engine.generate([prompt], greedy(8))[0]
        assert len(engine._scheduler.prefix) == 3
        with torch.inference_mode():
            for page in engine._scheduler.prefix._keys:
                engine._runner.cache.v[0][page] += 1
        assert audit(engine, [good])
        # Control: the pages are still there to be started from, and spoil what is.
        spoilt = engine.generate([prompt], greedy(8))[0]
        assert spoilt.completions[0].stats.cached_prompt_tokens == 47
        assert bits_of([spoilt]) != bits_of([good])
        report = audit(engine, [good, spoilt])
        assert [e.verdict for e in report.entries] == ["same", "differs"]


def test_audit_of_text():
    """With a tokenizer: stop strings and text prompts, through JSON."""
    from tinyspec import Engine

    params = greedy(30, stop_strings=("the", "."))
    with Engine.from_pretrained(BUNDLED, device="cpu") as engine:
        outputs = engine.generate(["Once upon a time", "Tom"], params)
        assert audit(engine, [RequestOutput.from_json(o.to_json()) for o in outputs])
        ended = next(o for o in outputs if o.completions[0].finish_reason == "stop")
        assert verdicts(engine, [replace(ended, params=replace(ended.params, stop_strings=()))]) == [
            ("differs", len(ended.completions[0].token_ids))
        ]
