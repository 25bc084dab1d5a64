"""What leaves the engine: JSON that loses no bit, text that is whole however it is cut, stops."""

import json
import random
import struct
import threading
from dataclasses import fields, replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.script import Recites
from tests.support.tiny import VOCAB, config_of, tiny
from tests.support.tokenizers import byte_level, tokenizer_of
from tinyspec import Engine, EngineConfig, SamplingParams, audit
from tinyspec.determinism.fingerprint_parts import differences, text_digest
from tinyspec.engine.results import output_of
from tinyspec.outputs import Completion, CompletionStats, RequestOutput, StreamEvent
from tinyspec.text.decoding import TextStream

TEXT = "The quick brown 🦊 jumps over 13 lazy 🐕‍🦺, naïvely — 東京タワー. THE END\n\n  two  spaces"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(False)


@pytest.fixture(scope="module")
def engine(tokenizer):
    """A model that babbles in the tokenizer's vocabulary."""
    config = config_of("llama")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    settings = {"reference_rows": 16, "max_rows": 32, "draft_window": 5, "verify": "always"}
    with Engine(model, tokenizer, EngineConfig(**settings)) as engine:
        yield engine


def fp32(rng):
    """Any float that fp32 has, subnormal and infinite ones too."""
    while True:
        value = struct.unpack("f", struct.pack("I", rng.getrandbits(32)))[0]
        if value == value:
            return rng.choice((value, value, -0.0, -float("inf"), 1e-45))


@pytest.mark.parametrize("seed", range(4))
def test_json_loses_no_bit(seed):
    rng = random.Random(seed)

    def completion():
        count = rng.randint(0, 9)
        return Completion(
            token_ids=[rng.randrange(1000) for _ in range(count)],
            text=rng.choice((None, "", TEXT, "\ud83d\x00\u2028")),
            logprobs=rng.choice((None, [fp32(rng) for _ in range(count)])),
            top_logprobs=rng.choice((None, [[(rng.randrange(9), fp32(rng))] * 2] * count)),
            finish_reason=rng.choice(("stop", "length", "abort")),
            error=rng.choice((None, 'it "failed"\n')),
            stats=CompletionStats(*(rng.randrange(99) for _ in fields(CompletionStats))),
            stop_reason=rng.choice((None, 5, TEXT)),
        )

    params = SamplingParams(
        temperature=rng.random(), seed=rng.getrandbits(64), stop_strings=(TEXT,), top_p=1 / 3
    )
    output = RequestOutput(
        request_id="request-1",
        prompt_token_ids=[1, 2],
        params=rng.choice((params, SamplingParams(eos_token_id=(3, 4)))),
        completions=[completion() for _ in range(rng.randint(1, 3))],
        fingerprint=rng.choice((None, "abc")),
        prompt_logprobs=rng.choice((None, [None, fp32(rng)])),
        fingerprint_parts=rng.choice(
            (None, {"threads": 2, "device": TEXT, "on": True, "cuda": None})
        ),
    )
    line = output.to_json()
    assert "\n" not in line
    again = RequestOutput.from_json(line)
    assert again == output and repr(again) == repr(output), "0.0 and -0.0 differ in their texts"
    assert repr(again) != repr(replace(output, prompt_token_ids=[1, 3]))
    older = json.loads(line)
    for each in older["completions"]:
        del each["stop_reason"]
    completions = [replace(each, stop_reason=None) for each in output.completions]
    assert RequestOutput.from_json(json.dumps(older)) == replace(output, completions=completions)


def test_json_names_processors(engine):
    """A processor may hold anything: it goes into the line by name and is not copied."""

    class Locked(Recites):
        lock = None

    processor = Locked([5], 1)
    processor.lock = threading.Lock()
    params = SamplingParams(max_new_tokens=2, logits_processors=[processor])
    output = engine.generate([[5]], params)[0]
    assert json.loads(output.to_json())["params"]["logits_processors"] == [Locked.__qualname__]


WORDS = {"request_id": "request", "prompt_token_ids": "prompt", "params": "parameters"}
WORDS["token_ids"] = "tokens"


@pytest.mark.parametrize(
    "kind", [SamplingParams, EngineConfig, RequestOutput, Completion, CompletionStats, StreamEvent]
)
def test_every_field_is_explained(kind):
    for field in fields(kind):
        named = field.name in kind.__doc__
        assert named or WORDS.get(field.name, "\0") in kind.__doc__.lower(), field.name


BABBLE = SamplingParams(
    max_new_tokens=40,
    temperature=1.5,
    seed=4,
    num_return_sequences=2,
    deterministic=True,
    logprobs=True,
)


def test_a_stream_holds_what_outputs_hold(engine):
    """Piece by piece, random bytes and broken characters included; a server sends what the output
    tells of the request with the first piece. Deterministic ones are those of another call."""
    given = [[5, 6, 7] * 100, [8], [9, 10] * 9]
    wanted = [
        BABBLE,
        replace(BABBLE, deterministic=False),
        replace(BABBLE, seed=9, top_logprobs=2, prompt_logprobs=True),
    ]
    before = engine.generate(given, wanted)
    stream = engine.stream(given, wanted)
    events = list(stream)
    outputs = [output_of(request, engine.tokenizer) for request in stream.requests]
    for one, other in zip(before, outputs, strict=True):
        same = all(
            (a.token_ids, a.logprobs, a.text) == (b.token_ids, b.logprobs, b.text)
            for a, b in zip(one.completions, other.completions, strict=True)
        )
        assert same or not one.params.deterministic
    for request, output in zip(stream.requests, outputs, strict=True):
        for sequence, whole in zip(request.sequences, output.completions, strict=True):
            place = request.request_id, sequence.index
            own = [event for event in events if (event.request_id, event.index) == place]
            rest = [None] * (len(own) - 1)
            assert [token for event in own for token in event.token_ids] == whole.token_ids
            assert [value for event in own for value in event.logprobs] == whole.logprobs
            assert "".join(event.text for event in own) == whole.text
            tops = [event.top_logprobs for event in own]
            if output.params.top_logprobs:
                assert [top for each in tops for top in each] == whole.top_logprobs
                assert len(whole.top_logprobs[0]) == 2
            else:
                assert tops == [None, *rest]
            assert [event.finish_reason for event in own] == [*rest, whole.finish_reason]
            assert [event.prompt_logprobs for event in own] == [output.prompt_logprobs, *rest]
            told = {(e.fingerprint, e.num_prompt_tokens, e.cached_prompt_tokens) for e in own}
            cached = sequence.stats.cached_prompt_tokens
            assert told == {(output.fingerprint, len(output.prompt_token_ids), cached)}
    first = stream.requests[0].sequences[0]
    assert first.stats.cached_prompt_tokens == 256, "the prompt's full pages"
    assert outputs[0].fingerprint and outputs[2].prompt_logprobs
    assert any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)


@pytest.mark.parametrize("step", [1, 5])
def test_what_never_becomes_a_character(step):
    """Bytes without an end are told after some of them, and each is decoded a few times."""
    tokenizer = byte_level(False)
    valid = tokenizer("a\N{GRINNING FACE}" * 3)["input_ids"]
    half = tokenizer("\N{GRINNING FACE}")["input_ids"][:2]
    ids, decoded = [*valid, *half * 300, *valid[1:], *half[:1] * 14, *valid[1:], *valid], []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **given: decoded.append(len(ids)) or decode(ids, **given)
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[n : n + step], False) for n in range(0, len(ids), step)]
    assert "".join(pieces) == decode(ids, skip_special_tokens=True)
    assert sum(map(bool, pieces)) > 20 and max(decoded) < 100


def test_the_end_tells_what_was_held_back():
    """Also where it comes without a token: the beginning of a stop string, half a character."""
    tokenizer = byte_level(False)
    half = tokenizer("\N{GRINNING FACE}")["input_ids"][:2]
    for told, held, given in (("the q", " q", ()), ("the", tokenizer.decode(half), half)):
        stream = TextStream(
            tokenizer, SamplingParams(stop_strings=" quick", include_stop_str=False)
        )
        begun = stream.push(tokenizer(told)["input_ids"], False) + stream.push(given, False)
        assert begun == "the" and stream.push([], True) == held


@pytest.mark.parametrize("hidden", [1, 200])
def test_a_space_behind_tokens_that_are_not_shown(hidden):
    """No piece is decoded as if it were the beginning of the text, which has no space there."""
    tokenizer = tokenizer_of("pieces")
    space, a, b, the = tokenizer.convert_tokens_to_ids(["▁", "▁a", "b", "▁the"])
    ids = [space, a, b, *[1] * hidden, a, *[1] * hidden, the, a]
    stream = TextStream(tokenizer)
    pieces = [stream.push([token], False) for token in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole == " ab a the a"
    assert tokenizer.decode(ids[3:], skip_special_tokens=True)[0] != " ", "control: it is lost"


def test_without_a_tokenizer():
    assert TextStream(None).push([1, 2], True) is None
    with Engine(tiny()) as engine:
        events = list(engine.stream([[1, 2]], SamplingParams(max_new_tokens=3)))
        assert [event.text for event in events] == [None] * 3
        output = engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0]
        assert output.completions[0].text is None and output.completions[0].logprobs is None


def streamed(engine, prompt, params):
    """The text of every completion, put together from the events of one stream."""
    found = {}
    for event in engine.stream([prompt] * len(params), params):
        place = event.prompt, event.index
        found[place] = found.get(place, "") + event.text
    return [text for _, text in sorted(found.items())]


STOPS = ("k brow", "🦊", "\n\n ", "e", "absent", "spaces, which it holds back to the end")


def test_stop_strings_end_a_request(engine, tokenizer):
    """With the token that completes one, wherever the tokens are cut."""
    ids = tokenizer(TEXT)["input_ids"]
    start = tokenizer("🦊 k brow")["input_ids"][:3]
    params = SamplingParams(
        max_new_tokens=len(ids),
        deterministic=True,
        ignore_eos=True,
        logits_processors=[Recites(ids, 3)],
    )
    wanted, expected = [], []
    for stop in (*STOPS, "🦊"):
        shown = replace(params, stop_strings=("never", stop), deterministic=len(wanted) < 12)
        wanted += [shown, replace(shown, include_stop_str=False, num_return_sequences=2)]
        found = stop if stop in TEXT else None
        count = next((n for n in range(len(ids)) if stop in tokenizer.decode(ids[:n])), len(ids))
        text, reason = tokenizer.decode(ids[:count]), "stop" if found else "length"
        expected.append((ids[:count], text, reason, found))
        expected += [(ids[:count], text.partition(stop)[0], reason, found)] * 2
    outputs = engine.generate([start] * len(wanted), wanted)
    completions = [c for output in outputs for c in output.completions]
    found = [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in completions]
    assert found == expected
    assert all(c.stats.drafted > 0 for c in completions[: 3 * len(STOPS)])
    assert streamed(engine, start, wanted) == [text for _, text, *_ in expected]


@pytest.mark.parametrize("stop", ["k brow", "🦊", "e", " "])
def test_stop_strings_behind_the_least_new_tokens(engine, tokenizer, stop):
    """As of vLLM's min_tokens: one that ends within these does not count, one that begins in them
    and ends behind does."""
    ids = tokenizer(TEXT)["input_ids"]
    start = tokenizer("🦊 k brow")["input_ids"][:3]
    params = SamplingParams(
        max_new_tokens=len(ids),
        ignore_eos=True,
        stop_strings=("never", stop),
        include_stop_str=False,
        logits_processors=[Recites(ids, 3)],
    )
    asked, expected = [], []
    for least in range(0, len(ids) + 1, 7):
        early = len(tokenizer.decode(ids[:least]).rstrip("\ufffd"))
        count, text = len(ids), TEXT
        for n in range(least + 1, len(ids) + 1):
            place = tokenizer.decode(ids[:n]).find(stop, max(0, early + 1 - len(stop)))
            if place >= 0:
                count, text = n, TEXT[:place]
                break
        asked.append(replace(params, min_new_tokens=least, deterministic=least % 2 == 0))
        expected.append((count, text))
    completions = [o.completions[0] for o in engine.generate([start] * len(asked), asked)]
    assert [(len(c.token_ids), c.text) for c in completions] == expected
    assert streamed(engine, start, asked) == [text for _, text in expected]
    assert expected[0][1] in expected[-1][1] and expected[0] != expected[-1], "control"


REASONS = [
    ({"eos_token_id": 7}, None),
    ({"stop_token_ids": 7}, 7),
    ({"eos_token_id": 7, "stop_token_ids": (8, 7)}, None),
    ({"eos_token_id": 7, "ignore_eos": True, "stop_token_ids": 7}, 7),
    ({"stop_strings": ("3", "123", "23")}, "123"),
    ({"stop_strings": ("3", "2")}, "2"),
    ({"stop_strings": "23", "stop_token_ids": 7}, 7),
    ({"stopping_criteria": [lambda ids, scores: ids[0, -1] == 7]}, None),
]


def test_stop_reasons():
    """Of the letters of one token the string that would come first, and of two such the longer."""
    recites = {"max_new_tokens": 5, "logits_processors": [Recites([5, 6, 7], 1)]}
    params = [SamplingParams(deterministic=r == 7, **recites, **more) for more, r in REASONS]
    tokenizer, config = Spelled(["0"] * 7 + ["123"] * VOCAB), EngineConfig(reference_rows=16)
    with Engine(tiny(), tokenizer, config) as engine:
        outputs = engine.generate([[1]] * len(params), params)
        streams = [list(engine.stream([[1]], each)) for each in params]
    for output, (*others, last), (_, reason) in zip(outputs, streams, REASONS, strict=True):
        (completion,) = output.completions
        assert {event.stop_reason for event in others} <= {None}
        for ended in (completion, last):
            assert (ended.finish_reason, ended.stop_reason) == ("stop", reason)
        assert completion.token_ids == [5, 6, 7]


def words(shift=0, decoder=None, **settings):
    """A tokenizer of one word a token; shift: another token for every word."""
    vocab = {f"word{n:03}": (n + shift) % VOCAB for n in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="word000"))
    tokenizer.decoder = decoder or decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def test_the_tokenizer_of_stop_strings_is_in_the_fingerprint():
    """Where tokens depend on it, and nowhere else; audit knows its own and names another."""
    params = SamplingParams(max_new_tokens=20, deterministic=True, ignore_eos=True)
    config = EngineConfig(reference_rows=16, max_rows=32)
    engines = [Engine(tiny(), words(shift), config) for shift in (0, 0, 1)]
    own, again, other = engines
    ids = own.generate([[1, 2, 3]], params)[0].completions[0].token_ids
    stop = own.tokenizer.decode([next(t for t in ids[5:] if t not in ids[:5])])
    stops = replace(params, stop_strings=(stop,))
    first, second, third = (e.generate([[1, 2, 3]], stops)[0] for e in engines)
    assert first.completions[0].token_ids == second.completions[0].token_ids
    assert first.completions[0].token_ids != third.completions[0].token_ids
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert differences(first.fingerprint_parts, third.fingerprint_parts) == ["tokenizer"]
    assert audit(again, [first]), str(audit(again, [first]))
    (entry,) = audit(other, [first]).entries
    assert entry.verdict == "not comparable" and entry.reason.endswith(": tokenizer")
    for free in (params, replace(stops, deterministic=False)):
        outputs = [engine.generate([[1, 2, 3]], free)[0] for engine in engines]
        assert {output.fingerprint for output in outputs} == {own.fingerprint}
    own.tokenizer.add_tokens(["more"])
    assert own.generate([[1, 2, 3]], stops)[0].fingerprint != first.fingerprint


class Spelled:
    """Not a library's: nothing but a decode."""

    def __init__(self, letters):
        self.letters = letters

    def decode(self, ids, **_):
        return "".join(self.letters[token] for token in ids)


def swapped_bytes(first, second):
    """A byte-level tokenizer with another byte behind two of its tokens."""
    data = json.loads(byte_level(False).backend_tokenizer.to_str())
    vocab = data["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token=END
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda n: words(shift=n),
        lambda n: words(decoder=decoders.Replace("d1", "d2") if n else None),
        lambda n: words(clean_up_tokenization_spaces=bool(n)),
        lambda n: Spelled("abc" if n else "abd"),  # of ids beyond, it raises
        lambda n: swapped_bytes("Ł", "ł" if n else "Ł"),  # alone, neither is a character
    ],
    ids=["vocabulary", "decoder", "settings", "decode alone", "bytes"],
)
def test_tokenizers_that_decode_otherwise_have_other_digests(make):
    digests = [text_digest(make(n), VOCAB) for n in (0, 0, 1, 1)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_a_tokenizer_that_was_used_keeps_its_digest():
    used = byte_level(False)
    used.pad_token = END
    before = text_digest(used, 300)
    used(["a", "the fox"], padding="max_length", max_length=9, truncation=True)
    assert text_digest(used, 300) == before


def test_special_tokens_in_stop_strings(engine, tokenizer):
    """What is not shown is counted in text: of special tokens it has nothing."""
    end = tokenizer.eos_token
    ids = [*tokenizer("so be it")["input_ids"], tokenizer.eos_token_id]
    stops = {
        end: "so be it",
        f"it{end}": "so be ",
        f"t{end[:2]}": "so be i",
        f"{end}so": "so be it",
        f"{end[-2:]}so b": "so be it",
        f"be it{end}so be": "so ",
        f"it{end}x": "so be itso be itso be i",  # its last token is the first of "it"
    }
    params = [
        SamplingParams(
            max_new_tokens=3 * len(ids) - 2,
            ignore_eos=True,
            deterministic=True,
            stop_strings=stop,
            include_stop_str=False,
            logits_processors=[Recites(ids, 1)],
        )
        for stop in stops
    ]
    outputs = engine.generate([[9]] * len(stops), params)
    texts = streamed(engine, [9], params)
    assert texts == [output.completions[0].text for output in outputs]
    assert texts[:-1] == list(stops.values())[:-1]
