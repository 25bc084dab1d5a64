"""Structured output: texts of the form that was asked for, by masks that drafts, verifies and
scores share, with the bits of the request alone wherever it runs."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.cases import bits_of, cost, one_by_one
from tests.support.mixes import Liar, plain
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams, audit
from tinyspec.structured import grammars
from tinyspec.tools.demo import BUNDLED, THINKER

llguidance = pytest.importorskip("llguidance")
END = 0
SCHEMA = {
    **{"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False},
    **{"type": "object", "required": ["name", "age", "friends"]},
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "friends": {"type": "array", "items": {"enum": ["fox", "bear"]}, "maxItems": 2},
    },
}
REGEX = r"(The|A) (fox|bear) (ran|sat)( and (ran|sat)){2,3}\."
LARK = 'start: "yes" | "no" | (word " ")~2 "!"\nword: /[a-z]{2,5}/'
FORMS = {"json_schema": SCHEMA, "regex": REGEX, "grammar": LARK}
PATTERNS = {
    "json_schema": r'{"name":"[A-Z][a-z]{2,5}","age":\d\d?,"friends":\[("(fox|bear)",?){0,2}\]}',
    "regex": REGEX,
    "grammar": "yes|no|([a-z]{2,5} ){2}!",
}
SAMPLED = {"temperature": 1.2, "seed": 3, "num_return_sequences": 3}
PROMPTS = ["Once there was a brave fox", "Tell me about the bear.", "The", "Where did they go?"]


def asked(form, **settings):
    given = {"max_new_tokens": 90, "deterministic": True, "logprobs": True, **settings}
    return SamplingParams(**{form: FORMS[form]}, **given)


def requests():
    """A request of every form, greedy and sampled, one with words that the form would allow."""
    found = [asked(form, **style) for form in FORMS for style in ({}, SAMPLED)]
    found.append(asked("regex", bad_words_ids=[[22]], presence_penalty=1.0, **SAMPLED))
    return [PROMPTS[n % len(PROMPTS)] for n in range(len(found))], found


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


def engine_of(tokenizer=None, sensitive=False, vocab_size=896, **settings):
    """Of the bundled model; or in 16 bits, and its linears sensitive to the row count."""
    config = EngineConfig(**{"reference_rows": 16, "max_rows": 64, **settings})
    dtype = torch.bfloat16 if sensitive else torch.float32
    model = LlamaForCausalLM.from_pretrained(BUNDLED, dtype=dtype).eval()
    model.resize_token_embeddings(vocab_size)
    if sensitive:
        model = replace_linears(model, ShapeSensitiveLinear)
    engine = Engine(model, tokenizer, config)
    cost(engine)
    return engine


def test_alone_and_in_a_crowd(tokenizer):
    prompts, params = requests()
    with engine_of(tokenizer, sensitive=True, prefix_cache=False) as engine:
        alone = one_by_one(engine, list(zip(prompts, params, strict=True)))
    with engine_of(tokenizer, sensitive=True, verify="always", draft_window=7) as engine:
        free = SamplingParams(max_new_tokens=40)
        given = [*params, plain(params[0]), plain(params[3]), free]
        *outputs, _, _, other = engine.generate([*prompts, *PROMPTS[:3]], given)
        assert bits_of(outputs) == alone
        assert audit(engine, outputs)
        for output in outputs:
            pattern = PATTERNS[output.params.structure[0]]
            assert all(re.fullmatch(pattern, c.text) for c in output.completions)
            assert {c.finish_reason for c in output.completions} == {"stop"}
        first = [output.completions[0] for output in outputs]
        scores = engine.score(prompts, [c.token_ids for c in first], params)
        assert scores == [c.logprobs for c in first]
        stats = [c.stats for output in outputs for c in output.completions]
        assert sum(s.accepted for s in stats) > 100
        assert sum(s.rollbacks for s in stats) > 0
        # Control: without the forms texts and scores are others.
        assert not any(re.fullmatch(p, other.completions[0].text) for p in PATTERNS.values())
        assert engine.score(prompts[:1], [first[0].token_ids], plain(free)) != scores[:1]


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_proposals_are_cut(tokenizer, deterministic):
    """A drafter that knows no form costs no rows for what could not be accepted."""
    prompts, params = requests()
    prompts, params = prompts[:4], [replace(s, deterministic=deterministic) for s in params[:4]]
    found = []
    for settings in ({}, {"drafter": Liar(1), "draft_window": 9}):
        with engine_of(tokenizer, **settings) as engine:
            outputs = engine.generate(prompts, params)
            free = engine.generate(prompts, SamplingParams(max_new_tokens=30))
        found.append([[c.token_ids for c in output.completions] for output in outputs])
    cut, uncut = (sum(o.completions[0].stats.drafted for o in each) for each in (outputs, free))
    assert cut < 20 < 100 < uncut
    assert found[0] == found[1]


def test_complete_texts_end(tokenizer):
    """With fewer tokens than the least, too; where more may follow, that comes first. A stop token
    that the form needs is not kept from it."""
    ids = {word: tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("!", "?")}
    styles = [
        ({"regex": "!{3}"}, "!!!"),
        ({"regex": "!{3}", "min_new_tokens": 20}, "!!!"),
        (
            {"regex": "(!!)+", "min_new_tokens": 4, "max_new_tokens": 5, "logit_bias": {END: 99}},
            "!!!!",
        ),
        ({"regex": "!+", "logit_bias": {END: 99}}, "!"),
        ({"regex": "!{3}|[?]", "stop_token_ids": ids["?"], "logit_bias": {ids["?"][0]: 99}}, "?"),
        ({"regex": "!{3}", "ignore_eos": True, "stop_token_ids": ids["?"]}, "!!!?"),
        # Of two end tokens the likelier one, which is a word here.
        ({"regex": "!{3}", "eos_token_id": [END, 895], "logit_bias": {895: 99}}, "!!! rice"),
        ({"regex": ""}, ""),
    ]
    with engine_of(tokenizer) as engine:
        for deterministic in (True, False):
            params = [SamplingParams(deterministic=deterministic, **style) for style, _ in styles]
            outputs = engine.generate(["Once"] * len(styles), params)
            found = [(o.completions[0].text, o.completions[0].finish_reason) for o in outputs]
            assert found == [(text, "stop") for _, text in styles]


def test_a_vocabulary_larger_than_the_tokenizers(tokenizer):
    style = {"temperature": 9.0, "seed": 1, "max_new_tokens": 30}
    with engine_of(tokenizer, vocab_size=1500) as engine:
        params = [SamplingParams(regex="[ -~]*", **style), SamplingParams(**style)]
        found, free = (o.completions[0] for o in engine.generate(["Once"] * 2, params))
    assert max(found.token_ids) < 896 < max(free.token_ids)
    assert re.fullmatch("[ -~]*", found.text)


def test_the_tokenizer_is_in_the_fingerprint(tokenizer):
    with engine_of(tokenizer) as engine:
        output, other = engine.generate(["Once"] * 2, [asked("regex"), plain(asked("regex"))])
        assert other.fingerprint_parts.keys() & {"tokenizer", "llguidance"} == set()
        parts = output.fingerprint_parts
        assert parts["llguidance"] == llguidance.__version__ and parts["tokenizer"]
        assert output.fingerprint != other.fingerprint
        back = RequestOutput.from_json(output.to_json())
        assert back == output and audit(engine, [back])
    changed = AutoTokenizer.from_pretrained(BUNDLED)
    changed.add_tokens(["foxes"])
    with engine_of(changed) as engine:
        assert "tokenizer" in str(audit(engine, [output]).entries[0].reason)


def _refused(engine, prompt, params):
    with pytest.raises(ValueError) as refusal:
        engine.generate([prompt, prompt], [SamplingParams(max_new_tokens=1), params])
    assert not engine.has_unfinished() and engine.pool.num_held == 0
    return str(refusal.value)


BAD = {
    "regex": ({"regex": "(a"}, "regex='.a' is not allowed: .*unclosed group"),
    "look-around": ({"regex": "(?!a)b"}, "regex=.*what llguidance compiles"),
    "schema": ({"json_schema": {"type": "nonsense"}}, "json_schema=.*Invalid type: nonsense"),
    "its own": ({"json_schema": {"$ref": "#"}}, "json_schema=.*compiles .NoExtensionBias.$"),
    "not JSON": ({"json_schema": "nope"}, "json_schema='nope' is not allowed"),
    "surrogate": ({"regex": "\ud800"}, "regex=.* is not allowed"),
    "grammar": ({"grammar": "start: foo"}, "grammar='start: foo' is not allowed: .*foo"),
    "no end": ({"regex": "a", "ignore_eos": True}, "regex='a' is not allowed: none without an end"),
}


@pytest.fixture(scope="module")
def plain_engine(tokenizer):
    with engine_of(tokenizer) as engine:
        yield engine


@pytest.mark.parametrize("style, said", BAD.values(), ids=BAD)
def test_what_cannot_be_served(plain_engine, style, said, monkeypatch):
    assert re.search(said, _refused(plain_engine, "Once", SamplingParams(**style)), re.DOTALL)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert plain_engine.generate(["Once"], SamplingParams(max_new_tokens=1))
    if "ignore_eos" not in style:
        said = _refused(plain_engine, "Once", SamplingParams(**style))
        assert "pip install 'tinyspec[structured]'" in said


def test_tokenizers_that_llguidance_cannot_read():
    for tokenizer, said in (
        (AutoTokenizer.from_pretrained(THINKER), "regex='a' is not allowed"),
        (None, "without a tokenizer"),
    ):
        with engine_of(tokenizer) as engine:
            assert said in _refused(engine, [5], SamplingParams(regex="a"))


LARGE = r"([a-z]|\s){1,99}(e|t)([a-z]|\s){40}"
WAYS = {
    "padded": {"verify": "padded"},
    "a long window": {"verify": "always", "draft_window": 16},
    "lies": {"verify": "always", "drafter": Liar(1), "draft_window": 7},
    "looked up": {"drafter": "ngram"},
}


def test_a_form_that_llguidance_gives_up(tokenizer, monkeypatch):
    """A request ends where it would alone, with the reason, whatever was drafted and whoever asked
    for the same before; others go on."""
    style = {"temperature": 1.5, "max_new_tokens": 24, "deterministic": True, "logprobs": True}
    one, *others = (SamplingParams(regex=LARGE, seed=seed, **style) for seed in range(6))
    for states, said in (
        (500, "llguidance gave up: lexer error: too many states: 500"),
        (9999, ""),
    ):
        monkeypatch.setattr(grammars, "MOST_STATES", states)
        found = []
        for settings in WAYS.values():
            with engine_of(tokenizer, **settings) as engine:
                runs = [[one], [*others, one, asked("regex")], [one]]
                outputs = [engine.generate(["Once"] * len(run), run) for run in runs]
            found += [
                output.completions[0]
                for run in outputs
                for output in run
                if output.params.seed == 0
            ]
            assert outputs[1][-1].completions[0].finish_reason == "stop"
        assert len({(*c.token_ids, *c.logprobs, c.finish_reason) for c in found}) == 1
        assert len(found) == 12 and (found[0].error or "").startswith(said)
        assert (found[0].finish_reason == "abort") == bool(said)
        assert len(found[0].token_ids) > 0 and (len(found[0].token_ids) == 24) != bool(said)
