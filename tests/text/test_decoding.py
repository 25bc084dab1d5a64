"""Text is what tokens add to that of those before them: with tokenizers whose decoder strips a
space at the start of a text (Llama-2, Phi-3, early Mistral), and inside characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.script import Recites
from tests.support.serving import MODEL, running, speaking
from tests.support.tokenizers import KINDS, tokenizer_of
from tinyspec import SamplingParams
from tinyspec.text.decoding import INCOMPLETE, TextStream, bytes_of, decode, decode_behind, text_of

SMILE = "\N{GRINNING FACE}"
STRIPPING = ("pieces", "metaspace")
PLAIN = SamplingParams()


def spelled(tokenizer, text):
    """Its tokens as they stand within a text: none of them is a space put in front."""
    whole, mark = tokenizer("a" + text, add_special_tokens=False).input_ids, "a"
    front = tokenizer(mark, add_special_tokens=False).input_ids
    assert whole[: len(front)] == front
    return whole[len(front) :]


@pytest.fixture(scope="module", params=STRIPPING)
def engine(request):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with speaking(tokenizer_of(request.param), template) as engine:
        yield engine


def says(engine, prompt, token_ids, **more):
    """A prompt's token ids, and parameters under which ``token_ids`` follow it."""
    ids = engine.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    given = {"deterministic": True, "max_new_tokens": len(token_ids), "ignore_eos": True, **more}
    return ids, SamplingParams(logits_processors=[Recites(token_ids, len(ids))], **given)


def streamed(engine, ids, params):
    return "".join(event.text for event in engine.stream([ids], params))


@pytest.mark.parametrize("text", [" the a", "the a", f" {SMILE} a", f"{SMILE}", " "])
def test_the_space_at_the_border(engine, text):
    """Alone, streamed, and in an audit; decoded by themselves tokens lose it."""
    token_ids = spelled(engine.tokenizer, text)
    ids, params = says(engine, "the a", token_ids)
    (output,) = engine.generate([ids], params)
    (completion,) = output.completions
    assert completion.token_ids == token_ids and completion.text == text
    assert streamed(engine, ids, params) == text
    if text.startswith(" "):
        assert decode(engine.tokenizer, token_ids) == text[1:], "control"


@pytest.mark.parametrize("stop", [" the", "a", f"{SMILE} a", "e a"])
def test_a_stop_string_at_the_border(engine, stop):
    """It may begin with the space, and is found, and cut, where the text has it."""
    text = f" the a{SMILE} a the a"
    token_ids = spelled(engine.tokenizer, text)
    for shown in (True, False):
        ids, params = says(
            engine, "a", token_ids, stop_strings=["never", stop], include_stop_str=shown
        )
        (output,) = engine.generate([ids], params)
        (completion,) = output.completions
        place = text.index(stop)
        assert completion.stop_reason == stop
        assert completion.text == text[: place + len(stop) * shown] == streamed(engine, ids, params)
        assert {"text", "tokenizer"} <= output.fingerprint_parts.keys()
    ids, params = says(engine, "a", token_ids)
    (output,) = engine.generate([ids], params)
    assert "text" not in output.fingerprint_parts


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_begins(engine, cut):
    """Completed it is text as a whole; where it stays broken it is none."""
    before, smile = spelled(engine.tokenizer, " a"), spelled(engine.tokenizer, SMILE)
    prompt, rest = [1, *before, *smile[:cut]], smile[cut:]
    for token_ids, text in (
        (rest + before, f"{SMILE} a"),
        (before, " a"),
        (before + smile, f" a{SMILE}"),
    ):
        ids, params = says(engine, prompt, token_ids)
        (output,) = engine.generate([ids], params)
        assert output.completions[0].text == text == streamed(engine, ids, params)


def tokens_of(kind):
    """Ids of a tokenizer without special ones."""
    tokenizer = tokenizer_of(kind)
    return st.sampled_from(sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids}))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_tokens(kind, data):
    """Pieces of any size join to the text, which behind the prompt's is that of both."""
    tokenizer = tokenizer_of(kind)
    some = st.lists(tokens_of(kind), max_size=12)
    prompt, token_ids = data.draw(some), data.draw(some)
    text = text_of(tokenizer, prompt, token_ids, PLAIN)
    stream, pieces = TextStream(tokenizer, PLAIN, prompt), []
    for token in token_ids:
        pieces.append(stream.push([token], last=False))
    assert "".join(pieces) + stream.push([], last=True) == text
    before, whole = decode(tokenizer, prompt), decode(tokenizer, prompt + token_ids)
    if INCOMPLETE not in whole:
        assert before.rstrip(INCOMPLETE) + text == whole
        assert decode_behind(tokenizer, prompt, token_ids) == text


@pytest.mark.parametrize("kind", ["markup", "special markup", *STRIPPING])
def test_bytes_of_part_of_a_character(kind):
    tokenizer = tokenizer_of(kind)
    smile = spelled(tokenizer, SMILE)
    assert b"".join(bytes_of(tokenizer, token) for token in smile) == SMILE.encode()


# Over HTTP


@pytest.fixture
def client(engine):
    with running(engine) as served:
        yield served.client()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_begins_with_its_space(client, engine, stream):
    (the,) = spelled(engine.tokenizer, " the")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    asked |= {"logit_bias": {str(the): 100}, "logprobs": True}
    if stream:
        parts = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == " the the"
    else:
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.message.content == " the the"
        assert [one.token for one in choice.logprobs.content] == [" the"] * 2


def test_split_characters_have_their_bytes(client, engine):
    """Each in its own token, as OpenAI has it: together they are the character's."""
    smile = spelled(engine.tokenizer, SMILE)
    prompt, rest = [1, *smile[:2]], [str(token) for token in smile[2:]]
    found = b""
    for token in rest:
        (choice,) = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            max_tokens=1,
            logit_bias={token: 100},
            logprobs=True,
        ).choices
        (one,) = choice.logprobs.content
        found += bytes(one.bytes)
    assert bytes(bytes_of(engine.tokenizer, n)[0] for n in prompt[1:]) + found == SMILE.encode()


# Inputs that a review found


@pytest.mark.parametrize("kind", STRIPPING)
@pytest.mark.parametrize("prompt", [[1], [5, 2, 1, 2, 1]])
@pytest.mark.parametrize("stop", ["the", "a", "he a"])
def test_a_stop_string_behind_special_tokens(kind, prompt, stop):
    """The text has no space there that the decoder with special tokens has: nothing of it shows."""
    tokenizer = tokenizer_of(kind)
    token_ids = spelled(tokenizer, " the a the")
    params = SamplingParams(stop_strings=[stop], include_stop_str=False)
    end = next(n for n in range(len(token_ids) + 1) if stop in decode(tokenizer, token_ids[:n]))
    whole = text_of(tokenizer, prompt, token_ids[:end], PLAIN)
    assert text_of(tokenizer, prompt, token_ids[:end], params) == whole[: whole.index(stop)]


def test_bytes_that_are_no_character():
    """However tokens are grouped; what ends a character of the prompt's takes none with it."""
    tokenizer = tokenizer_of("pieces")
    (the,) = spelled(tokenizer, " the")

    def ids(*values):
        return [3 + value for value in values]

    for prompt, token_ids in (
        ([1, the], ids(0x40, 0xC2, 0x39)),
        ([1, the], [*ids(0x0A, 0xC2, 0x80, 0x80), the]),
        ([1, the, *ids(0xF0, 0x9F)], [*ids(0x98, 0x80, 0x0A), the]),
    ):
        found = set()
        for size in (1, 2, 3, 9):
            stream = TextStream(tokenizer, PLAIN, prompt)
            parts = [token_ids[n : n + size] for n in range(0, len(token_ids), size)]
            pieces = [stream.push(part, last=part is parts[-1]) for part in parts]
            found.add("".join(pieces))
        assert found == {text_of(tokenizer, prompt, token_ids, PLAIN)}
    assert found == {f"{SMILE}\n the"}
    assert text_of(tokenizer, [1, the], ids(0x40, 0xC2, 0x39), PLAIN).startswith("@")
