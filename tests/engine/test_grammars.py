"""What may follow in a text is a function of the parameters and the tokens before, whatever was
drafted, whoever else asks, and however little of it llguidance still holds."""

import importlib
import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import LlamaForCausalLM

from tests.support.at_random import check_at_random
from tests.support.forms import ANY_FORM, has_form
from tests.support.mixes import Liar
from tests.support.tokenizers import KINDS, byte_level, tokenizer_of
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.batch import OF_TEXT
from tinyspec.structured import grammars
from tinyspec.structured.grammars import Grammars
from tinyspec.tools.demo import BUNDLED

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
SCHEMA = {
    **{"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False},
    **{"type": "object", "required": ["a", "b"]},
    "properties": {
        "a": {"type": "string", "pattern": "^.{0,9}(the|a).{9}$"},
        "b": {"type": "array", "items": {"enum": ["<think>", "the"]}, "maxItems": 3},
    },
}
# Of the issues of before: large automata, alike rows behind unlike beginnings, lexemes that no
# matcher can be rolled back in.
FORMS = {
    "letters": {"regex": r"([a-z]|\s){1,40}(e|t)([a-z]|\s){20}"},
    "words": {"regex": r"(([a-z]{1,9} ){1,9}e){1,9}"},
    "schema": {"json_schema": SCHEMA},
    "brackets": {"grammar": 'start: ("(" X ")" | "[" X "]")~3\nX: /[a-e]+/'},
    "most tokens": {"grammar": 'start: x "!"\nx[max_tokens=5]: /[a-zA-Z ]+/'},
    "forced": {
        "grammar": r"""start: "a" ("-" B)*
B: /((([^b]e ){6,15}|\.ab.)){3,9}/"""
    },
    "lazy": {"grammar": 'start: x "!"\nx[stop="q"]: /[a-zA-Z ]+/'},
}


def params_of(form, tokenizer, **given):
    eos = [tokenizer.eos_token_id]
    return SamplingParams(**form, eos_token_id=eos, deterministic=True, **given)


def told(grammar, tokens, committed, size):
    """What may follow, or why nothing does."""
    try:
        return tuple(np.flatnonzero(grammar.allowed(tokens, committed, size)).tolist())
    except RuntimeError as error:
        return str(error)


def walk(grammar, tokenizer, rng, most=40):
    """A text at random, and what might follow at each of its places."""
    tokens, found, size = [], [], len(tokenizer)
    while True:
        found.append(told(grammar, tokens, len(tokens), size))
        if isinstance(found[-1], str) or len(tokens) == most:
            return tokens, found
        token = rng.choice(found[-1])
        if token == tokenizer.eos_token_id:
            return tokens, found
        tokens.append(token)


def disturbed(grammar, tokens, size, rng, forget):
    """What may follow at each place, among drafts of all kinds."""
    found = []
    for n in range(len(tokens) + 1):
        known = tokens[:n]
        for _ in range(rng.randrange(3)):
            drafts = tokens[n : n + rng.randrange(4)] if rng.random() < 0.5 else []
            while len(drafts) < rng.randrange(8):
                at = told(grammar, known + drafts, n, size)
                guess = rng.random() < 0.8 and not isinstance(at, str)
                drafts.append(rng.choice(at) if guess else rng.randrange(size))
            for k in range(len(drafts) + 1):
                told(grammar, known + drafts[:k], n, size)
            grammar.beginning(known, drafts)
        if rng.random() < forget:
            grammar.readers.clear()
        found.append(told(grammar, known, n, size))
    return found


def differences(form, kind, seed, make=None):
    """Of how many texts a completion among drafts and neighbours is told otherwise than alone."""
    rng, tokenizer = random.Random(seed), tokenizer_of(kind)
    params, count = params_of(form, tokenizer), 0
    for _ in range(3):
        tokens, alone = walk(Grammars(tokenizer).of(params), tokenizer, rng)
        shared = (make or Grammars)(tokenizer)
        for neighbour in range(2):
            walk(shared.of(params), tokenizer, random.Random(neighbour))
        found = disturbed(shared.of(params), tokens, len(tokenizer), rng, 0.1)
        count += found != alone
    return count


@pytest.mark.parametrize("states", [100, 300, 250_000])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_function_of_the_committed_tokens(form, states, monkeypatch):
    monkeypatch.setattr(grammars, "MOST_STATES", states)
    assert differences(form, "markup", states) == 0


@pytest.mark.parametrize("states", range(3, 12))
@pytest.mark.parametrize("pattern", ['("){3,4}', "(ab){3,9}", "((the){1,9}){2,5}"])
def test_drafts_that_come_true(pattern, states, monkeypatch):
    """By a limit that a text is near, drafts of its own decide nothing, however they are cut."""
    tokenizer = tokenizer_of("markup")
    params, size = params_of({"regex": pattern}, tokenizer), len(tokenizer)
    tokens, _ = walk(Grammars(tokenizer).of(params), tokenizer, random.Random(1), most=20)
    monkeypatch.setattr(grammars, "MOST_STATES", states)
    try:
        one, other = Grammars(tokenizer).of(params), Grammars(tokenizer).of(params)
    except ValueError:
        return  # it is refused, whoever asks
    places = range(len(tokens) + 1)
    alone = [told(one, tokens[:n], n, size) for n in places]
    first = next((n for n in places if isinstance(alone[n], str)), len(tokens))
    rng, n = random.Random(states), 0
    while n <= first:
        drafts = other.beginning(tokens[:n], tokens[n : n + rng.randrange(8)])
        drafts = drafts[: rng.randrange(len(drafts) + 1)]
        for place in range(n, n + 1 + len(drafts)):
            if place <= first:
                assert told(other, tokens[:place], n, size) == alone[place]
        n += 1 + len(drafts)


def test_matchers_that_are_dropped():
    """Of three completions in turns one matcher is kept; none is when all have ended."""
    tokenizer, form = tokenizer_of("markup"), FORMS["letters"]
    params = params_of(form, tokenizer)
    texts = [walk(Grammars(tokenizer).of(params), tokenizer, random.Random(n)) for n in range(3)]
    shared = Grammars(tokenizer, kept=1)
    each = [shared.of(params) for _ in texts]
    for n in range(1 + max(len(tokens) for tokens, _ in texts)):
        for grammar, (tokens, alone) in zip(each, texts, strict=True):
            if n < len(alone):
                assert told(grammar, tokens[:n], n, len(tokenizer)) == alone[n]
                assert len(shared._readers) == 1
    del each, grammar
    assert not shared._readers


def test_committed_tokens_that_are_no_such_text():
    """An error, whoever took them; wrong drafts are nobody's, nor are end tokens behind a text."""
    tokenizer = tokenizer_of("markup")
    grammar = Grammars(tokenizer).of(params_of({"regex": "ab"}, tokenizer))
    a, b, end = *tokenizer("ab").input_ids, tokenizer.eos_token_id
    assert told(grammar, [a, b, end, end], 4, 400) == (end,) == told(grammar, [a, b], 2, 400)
    assert told(grammar, [a, a, b], 1, 400) == (end,)
    assert told(grammar, [a, a], 2, 400) == f"token {a} was taken and may not follow"
    assert told(grammar, [a, end], 2, 400) == f"token {end} was taken and may not follow"
    assert told(grammar, [a], 1, 400) == (b,)


class OneLexer(Grammars):
    """As before: matchers are copies of one."""

    def _compile(self, *given):
        return super()._compile(*given)().deep_copy


def test_controls(monkeypatch):
    """One lexer for all gives up for what others explored. Where llguidance does better, copies are
    for free."""
    monkeypatch.setattr(grammars, "MOST_STATES", 300)
    assert differences(FORMS["letters"], "markup", 1, OneLexer) > 0


class Silent:
    """In place of what tells that a lexer has given up."""

    def validate_tokens(self, tokens):
        return len(tokens)


def test_a_lexer_that_gives_up_where_text_is_forced(monkeypatch):
    """llguidance then tells a token that need not follow, and no error."""
    monkeypatch.setattr(grammars, "MOST_STATES", 84)
    seeds = (3, 12)
    assert not any(differences(FORMS["forced"], "markup", seed) for seed in seeds)
    made = grammars.Reader.__init__

    def unaware(reader, *given):
        made(reader, *given)
        reader._unread = Silent()

    monkeypatch.setattr(grammars.Reader, "__init__", unaware)
    assert any(differences(FORMS["forced"], "markup", seed) for seed in seeds), "control"


MARKED = [
    {"const": "</tool_call>"},
    {"const": " a <think> b"},
    {"enum": ["<|im_end|>", "the    the", "</s>"]},
    {"type": "object", "properties": {"<think>": {"const": "hé"}}, "required": ["<think>"]},
    {"const": "cafe\u0301 5 \u212b The"},
    {"type": "string", "maxLength": 9},
]


@pytest.mark.parametrize("schema", MARKED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_markup_in_a_text(kind, schema):
    """Texts that look like tokens that were added are spelled, and whole."""
    tokenizer = tokenizer_of(kind)
    schema = {"additionalProperties": False, **schema}
    form = {"json_schema": {**schema, "x-guidance": {"whitespace_flexible": False}}}
    grammar = Grammars(tokenizer).of(params_of(form, tokenizer))
    for seed in range(6):
        tokens, found = walk(grammar, tokenizer, random.Random(seed), most=80)
        again = Grammars(tokenizer).of(params_of(form, tokenizer))
        assert walk(again, tokenizer, random.Random(seed), most=80) == (tokens, found)
        assert not isinstance(found[-1], str) and tokenizer.eos_token_id in found[-1]
        value = json.loads(tokenizer.decode(tokens))
        jsonschema.validate(value, schema)
        assert not set(tokens) & set(tokenizer.all_special_ids)


def test_control_llguidances_own_spelling():
    """It offers what it does not read."""
    tokenizer = tokenizer_of("markup")
    known = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer)
    read = llguidance.LLMatcher.grammar_from_json_schema(MARKED[0])
    matcher = llguidance.LLMatcher(known, read)
    with pytest.raises(RuntimeError, match="is allowed and not read"):
        reader = grammars.Reader(matcher, [])
        for _ in range(30):
            mask = np.unpackbits(np.frombuffer(reader.next()[0], np.uint8), bitorder="little")
            reader.read([*reader.tokens, int(np.flatnonzero(mask)[0])])


def test_a_tokenizer_that_changes():
    """A known token that becomes special, and another way to spell, are another tokenizer."""
    tokenizer = byte_level(False)
    known = Grammars(tokenizer)
    params, size = params_of({"regex": "the"}, tokenizer), len(tokenizer)
    parts = [known.parts(params, size)]
    known_token = tokenizer.convert_ids_to_tokens(size // 2)
    tokenizer.add_special_tokens({"additional_special_tokens": [known_token]})
    parts.append(known.parts(params, size))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    parts.append(known.parts(params, size))
    assert len(tokenizer) == size
    assert len({part["spelling"] for part in parts}) == 3
    assert parts[0]["max_lexer_states"] == grammars.MOST_STATES
    # A batch that continues compares what engines have without these.
    ends = params.resolve(stop_strings=("the",))
    assert {*known.parts(ends, size)} == {*OF_TEXT}


def text_of(tokenizer, tokens):
    """With the space that some decoders strip at the beginning."""
    return tokenizer.decode([*tokenizer.convert_tokens_to_ids(["a"]), *tokens])[1:]


@pytest.mark.slow("random use", 20.0, cases=20)
def test_any_form(case_seed):
    """Many of them give up. Texts that end have it."""
    ended = Counter()

    def check(form):
        rng = random.Random(str(form))
        kind, states = rng.choice([*KINDS]), rng.choice([60, 300, 2000, 250_000])
        tokenizer = tokenizer_of(kind)
        given = {name: value for name, value in form.items() if name != "pair"}
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(grammars, "MOST_STATES", states)
            try:
                grammar = Grammars(tokenizer).of(params_of(given, tokenizer))
            except ValueError:  # it is too large, or no text has it
                ended["refused"] += 1
                return
            assert differences(given, kind, case_seed) == 0
            tokens, found = walk(grammar, tokenizer, rng)
        gave_up = isinstance(found[-1], str)
        ended["gave up" if gave_up else "went on"] += 1
        if not gave_up and tokenizer.eos_token_id in found[-1]:
            assert has_form(text_of(tokenizer, tokens), form), (kind, form, tokens)

    check_at_random(check, case_seed, 10, form=ANY_FORM)
    assert ended["went on"] > 1


WAYS = [
    {"verify": "always", "draft_window": 16},
    {"verify": "always", "draft_window": 3, "prefix_cache": False},
    {"drafter": "ngram"},
    {"verify": "always", "drafter": Liar(1), "draft_window": 7},
]


@pytest.mark.slow("random use", 20.0, cases=20)
def test_any_form_in_any_crowd(case_seed):
    """Alone and padded, and among all others by another way, in another order, after others."""

    def check(forms):
        rng = random.Random(str(forms))
        tokenizer, ended = tokenizer_of(rng.choice([*KINDS])), []
        style = {"max_new_tokens": 50, "logprobs": True, "temperature": 1.5}
        asked = []
        for form in forms:
            given = {name: value for name, value in form.items() if name != "pair"}
            asked += [(form, params_of(given, tokenizer, seed=n, **style)) for n in range(2)]

        def run(settings, crowds):
            config = EngineConfig(reference_rows=16, max_rows=64, **settings)
            found = {}
            with Engine(LlamaForCausalLM.from_pretrained(BUNDLED), tokenizer, config) as engine:
                for crowd in crowds:
                    try:
                        outputs = engine.generate([[5, 6, 7]] * len(crowd), [p for _, p in crowd])
                    except ValueError:  # of one that is refused
                        assert len(crowd) == 1
                        continue
                    for (form, params), output in zip(crowd, outputs, strict=True):
                        (one,) = output.completions
                        said = one.token_ids, one.logprobs, one.finish_reason, one.error
                        assert found.setdefault((str(form), params.seed), said) == said
                        ended.append((form, one))
            return found

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(grammars, "MOST_STATES", rng.choice([60, 300, 250_000]))
            alone = run({"verify": "padded"}, [[each] for each in asked])
            crowd = [each for each in asked if (str(each[0]), each[1].seed) in alone]
            again = rng.sample(crowd, len(crowd))
            assert not crowd or run(rng.choice(WAYS), [crowd, again, again[:1]]) == alone
        for form, one in ended:
            if one.finish_reason == "stop":
                assert has_form(text_of(tokenizer, one.token_ids[:-1]), form)

    check_at_random(
        check, case_seed, 2, forms=st.lists(ANY_FORM, min_size=5, max_size=5, unique_by=str)
    )
