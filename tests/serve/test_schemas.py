"""Schemas: one answer whoever else asks; patterns that a mask could take seconds for are refused by
name."""

import asyncio

import openai
import pytest
from hypothesis import strategies as st

from tests.support.at_random import check_at_random
from tests.support.forms import SCHEMAS, has_form
from tests.support.serving import CHAT, MESSAGES, MODEL
from tinyspec.serve.schemas import repeated
from tinyspec.serve.tools import HERMES
from tinyspec.structured import grammars


@pytest.mark.parametrize(
    "pattern, product",
    [
        ("a{3}", 0),
        ("(a{2,3}b){4}", 12),
        (r"\{5\}(a{3,}){2}", 6),
        ("[({]{3}(a|[]{9}]){2}", 0),
        ("a{2}{3}", 6),
        ("((((.{1,9}){1,9}e){1,9}){1,9}x){1,9}", 9**5),
        ("(a{0}b{3})(c{9})", 0),
        (")(a{x}{", 0),
        ("((.{0, 6}a)?b*){1,60}", 360),
        ("[" * 1000, 0),  # in one step
    ],
)
def test_counts_within_counts(pattern, product):
    assert repeated(pattern) == product


def bodies(pattern):
    """What a pattern may stand in."""
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield CHAT, {"messages": MESSAGES, "response_format": form}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    yield "/v1/responses", {"input": "x", "text": text}


@pytest.mark.parametrize("pattern", ["(.{0,50}(the|a).{0,50}){1,120}", "a" * 1001])
def test_refused(served, pattern):
    for (path, body), (_, small) in zip(bodies(pattern), bodies("ab?"), strict=True):
        body["max_output_tokens" if "input" in body else "max_tokens"] = 2
        answer = served.post(path, **body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400, message
        assert "pattern" in message and "at most" in message
        assert served.post(path, **{**body, **small}).status_code == 200
    served.settled()
    tool = {"name": "f", "parameters": {"type": "object", "patternProperties": {pattern: {}}}}
    with pytest.raises(ValueError, match=r"pattern.*at most"):
        HERMES.rules([tool], None, None)


@pytest.mark.slow("random use", 40.0, cases=4)
def test_one_answer_in_any_crowd(served, case_seed, monkeypatch):
    """Of 12 requests for three schemas, of which some give up, alone, together and again."""

    async def answers(asked, together):
        async def answer(client, form, seed):
            wanted = {"name": "x", "schema": form["json_schema"]}
            given = {"type": "json_schema", "json_schema": wanted}
            own = {"deterministic": True, "return_token_ids": True}
            try:
                asked = {"model": MODEL, "messages": MESSAGES, "response_format": given}
                asked |= {"seed": seed, "max_tokens": 60, "extra_body": own}
                found = await client.chat.completions.create(**asked)
            except openai.BadRequestError as error:
                return error.code or str(error.body)
            (choice,) = found.choices
            assert choice.finish_reason != "stop" or has_form(choice.message.content, form)
            return choice.token_ids, choice.finish_reason

        async with served.client(openai.AsyncOpenAI) as client:
            if together:
                return await asyncio.gather(*(answer(client, *each) for each in asked))
            return [await answer(client, *each) for each in asked]

    def check(forms):
        asked = [(form, seed) for form in forms for seed in range(4)]
        for states in (100, 250_000):
            monkeypatch.setattr(grammars, "MOST_STATES", states)
            # What compiled within another total is kept.
            served.engine._inputs._grammars._compiled.cache_clear()
            alone = asyncio.run(answers(asked, False))
            assert asyncio.run(answers(asked, True)) == alone
            assert asyncio.run(answers(asked[::-1], True)) == alone[::-1]

    check_at_random(check, case_seed, 2, forms=st.lists(SCHEMAS, min_size=3, max_size=3))
