"""What is not served, or not allowed, is a 400 in OpenAI's shape that names the field."""

import json
import re
import time

import httpx
import openai
import pytest

from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES

TOOL = {"type": "function", "function": {"name": "look"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
ENDLESS = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
LONG = "a " * 3000
OF_TEXT = {
    "temperature": (2.1, "1", 1e-9),
    **{"top_p": (-0.1,), "seed": (1.5, 2**63), "stream": ("yes",), "foo": (1,)},
    **{"service_tier": ("flex",), "metadata": ({"a": 1},), "deterministic": (1,)},
    **{"repetition_penalty": (0,), "frequency_penalty": (2.5,), "stop_token_ids": ([896],)},
    "stream_options": ({"include_obfuscation": False},),
}
OF_TOKENS = {
    **{"n": (0, 129), "max_tokens": (0, 4000), "best_of": (2,), "suffix": ("x",)},
    **{"store": (True,), "allowed_token_ids": ([],), "bad_words": ([""],), "top_k": (-2,)},
    "structured_outputs": ({}, {"regex": "["}, {"regex": "a", "choice": ["a"]}, {"choice": [1]}),
    **{"guided_json": ("{",), "guided_grammar": ("start: x", "root ::= ((", "(\n" * 10**5)},
    **{"guided_regex": (5, "a" * 1001), "request_id": ("",), "truncate_prompt_tokens": (0,)},
    "stop": (["a"] * 5, ["a" * 1025], ""),
    "logit_bias": ({"a": 1}, {"896": 1}, {"5": 101}),
    "stream_options": ({"include_usage": 1},),
}
OWN = {
    COMPLETIONS: {
        "prompt": ([], [[]], [896], [-1], "\ud800", ["a", 1], LONG),
        "logprobs": (6,),
    },
    CHAT: {
        "messages": (
            [],
            [{"role": "wizard", "content": "x"}],
            *([{"role": "user", "content": content}] for content in ([IMAGE], LONG, "\ud800")),
        ),
        **{"top_logprobs": (3,), "max_completion_tokens": (0,), "audio": ({},)},
        "response_format": ({"type": "json_schema"}, ENDLESS),
        "chat_template_kwargs": ({"chat_template": "{{ messages }}"},),
        **{"tools": ([TOOL],), "tool_choice": ("required",), "functions": ([TOOL["function"]],)},
    },
    RESPONSES: {
        "input": (
            *([], LONG, [{"role": "user", "content": [IMAGE]}]),
            [{"role": "user", "content": "x", "name": "Ann"}],
        ),
        **{"previous_response_id": ("resp_1",), "max_output_tokens": (0,), "background": (True,)},
        **{"tools": ([{"type": "web_search"}],), "tool_choice": ("required",)},
        **{"include": (["message.output_text.logprobs"], ["x"]), "reasoning": ({"effort": "low"},)},
        **{"top_logprobs": (1,), "stream_options": ({"include_usage": True},)},
    },
    "/detokenize": {"tokens": ([896],)},
    "/tokenize": {"prompt": (None,)},
    "/v1/audit": {"response": ({"object": "nothing"},)},
}
TABLES = [*OWN.items(), (CHAT, OF_TEXT), (CHAT, OF_TOKENS), (COMPLETIONS, OF_TEXT)]
TABLES += [(COMPLETIONS, OF_TOKENS), (RESPONSES, {**OF_TEXT, "store": (1,)})]
BAD = [(p, f, value) for p, table in TABLES for f, values in table.items() for value in values]
NEEDED = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": PROMPT},
    RESPONSES: {"input": PROMPT},
    "/v1/audit": {"request": {}},
}


@pytest.mark.parametrize(("path", "field", "value"), BAD, ids=repr)
def test_refused(served, path, field, value):
    body = {"model": MODEL, **NEEDED.get(path, {}), field: value}
    if path == "/v1/audit":
        del body["model"]
    committed = served.engine.stats().committed
    found = httpx.post(f"{served.url}{path}", content=json.dumps(body), headers=JSON)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    if field == "tool_choice":
        assert error["param"] in ("tools", field)
    else:
        assert error["param"] == field and field in error["message"]
    assert served.engine.stats().committed == committed, "nothing ran"


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '"x"', "[" * 10**5, '{"a": NaN}', "\x80"]
)
def test_malformed(served, content):
    found = httpx.post(f"{served.url}{CHAT}", content=content.encode("latin-1"), headers=JSON)
    assert found.status_code == 400 and found.json()["error"]["message"]


MANY = 2 * 10**5


FIELDS = {str(number): 1 for number in range(MANY)}
FAULTS = {
    "prompt": (COMPLETIONS, {"prompt": [None] * MANY}),
    "fields": (COMPLETIONS, FIELDS),
    "metadata": (COMPLETIONS, {"metadata": FIELDS}),
    "bad messages": (CHAT, {"messages": [{}] * MANY}),
    "messages": (CHAT, {"messages": [{"role": "user"}] * MANY}),
    "tools": (CHAT, {"tools": [{"function": FIELDS}]}),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_millions_of_faults(served, kind):
    """They are not all gathered, which takes a minute: others would wait meanwhile."""
    path, own = FAULTS[kind]
    content = json.dumps({"model": MODEL, **NEEDED[path], **own})
    clock = time.pthread_getcpuclockid(served.thread.ident)
    began = time.clock_gettime(clock)
    found = httpx.post(f"{served.url}{path}", content=content, headers=JSON)
    assert found.status_code == 400, found.text
    took = time.clock_gettime(clock) - began
    began = time.thread_time()
    json.loads(content)
    reading = time.thread_time() - began
    assert reading / 4 < took < max(1.0, 8 * reading)


def chat(**own):
    return CHAT, {"messages": MESSAGES, **own}


def said(**own):
    return chat(messages=[*MESSAGES, {"role": "user", **own}])


# By code, which programs read: a body, and the message with its param, for who wrote the request.
TOO_LONG = r"This model's maximum context length is 2048 tokens\. "
AT, NO, NOT = r"messages\.1\.content", "is not allowed", "is not served"
TOKENS = rf"max_completion_tokens=4000 {NO}: at most \d+ after \d+ prompt tokens"
TEXT, XML, FORM = {"type": "text", "text": "a"}, {"type": "xml"}, {"type": "json_schema"}
TOLD = {
    "unsupported_value": (
        (
            said(content=[TEXT, IMAGE]),
            rf"{AT}\.1: image_url {NOT}, text, input_text or output_text is$",
        ),
        (said(role="wizard", content="x"), rf"messages\.1\.role: wizard {NOT}, dev"),
        (
            chat(response_format=XML),
            rf"response_format: xml {NOT}, text or json_object or json_schema",
        ),
        (chat(tool_choice={"type": "x"}), f"tool_choice: x {NOT}, function"),
        ((RESPONSES, {"input": [{"type": "x"}]}), rf"input\.0: x {NOT}, message"),
    ),
    "invalid_type": (
        (said(content=5), f"{AT}: 5 {NO}: it should be a valid string or a valid list$"),
        (said(content=[5]), rf"{AT}\.0: 5 {NO}: it should be a valid object$"),
        ((COMPLETIONS, {"prompt": ["a", 1]}), rf"prompt\.1: 1 {NO}"),
    ),
    "missing_required_parameter": (
        (said(content=[{"type": "text"}]), rf"{AT}\.0\.text: Field required$"),
        (chat(response_format=FORM), r"response_format\.json_schema: Field required$"),
    ),
    "invalid_value": (
        (said(content="abc \ud800"), r"messages='.ud800' is not"),
        (chat(stop=["a"] * 5), "stop: List should have at most 4"),
        (chat(temperature=3), f"temperature: 3 {NO}: it should be less than or equal to 2$"),
    ),
    "unsupported_parameter": ((chat(foo=1), "foo: this field is not served$"),),
    "context_length_exceeded": (
        ((COMPLETIONS, {"prompt": LONG}), f"{TOO_LONG}prompt='3001 tokens' {NO}"),
        ((COMPLETIONS, {"prompt": LONG * 100}), f"{TOO_LONG}prompt='600000 characters' {NO}"),
        (chat(max_completion_tokens=4000), TOO_LONG + TOKENS),
    ),
}


@pytest.mark.parametrize("code", TOLD)
def test_what_is_told(served, code):
    """The place, what stands there and what may; no names of types that a client cannot know."""
    for (path, own), message in TOLD[code]:
        content = json.dumps({"model": MODEL, **own})
        found = httpx.post(f"{served.url}{path}", content=content, headers=JSON)
        error = found.json()["error"]
        assert found.status_code == 400 and re.match(message, error["message"]), error
        assert error["code"] == code
        assert re.search(rf"\b{error['param']}\b", message) and error["param"] in own
        assert not re.search(r"list\[|instance|Input|Text|\bstr\b|function-", error["message"])


@pytest.mark.parametrize("kind", [None, "text/plain"])
def test_the_content_type_is_told(served, kind):
    headers = {"Content-Type": kind} if kind else {}
    content = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 1})
    found = httpx.post(f"{served.url}{CHAT}", content=content, headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith(
        f"Content-Type: '{kind or ''}' is not served"
    )
    assert httpx.post(f"{served.url}{CHAT}", content=content, headers=JSON).status_code == 200


def test_null_is_as_if_it_were_not_there(served):
    nothing = dict.fromkeys(("temperature", "n", "tools", "response_format", "stop", "seed"))
    assert served.post(CHAT, messages=MESSAGES, max_tokens=2, **nothing).status_code == 200


def test_two_names_of_one_field(served):
    """Some clients give both; that they differ is refused."""
    asked = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    for other, status in ((2, 200), (3, 400), ([], 400)):
        assert served.post(CHAT, **asked, max_completion_tokens=other).status_code == status


def test_other_statuses(served, client):
    with pytest.raises(openai.NotFoundError, match="storyteller") as raised:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert raised.value.code == "model_not_found" and raised.value.param == "model"
    for path, status in (("/v1/nothing", 404), (CHAT, 405)):
        found = httpx.get(f"{served.url}{path}")
        assert found.status_code == status and found.json()["error"]["code"] is None
