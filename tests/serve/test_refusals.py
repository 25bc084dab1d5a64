"""What is not served, or not allowed, is a 400 in OpenAI's shape that names the field."""

import json
import time

import httpx
import openai
import pytest

from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES

TOOL = {"type": "function", "function": {"name": "look"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
ENDLESS = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
OF_TEXT = [
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", 1e-9),
    ("top_p", -0.1),
    ("seed", 1.5),
    ("seed", 2**63),
    ("stream", "yes"),
    ("store", True),
    ("service_tier", "flex"),
    ("metadata", {"a": 1}),
    ("deterministic", 1),
    ("repetition_penalty", 0),
    ("frequency_penalty", 2.5),
    ("stop_token_ids", [896]),
    ("foo", 1),
    ("stream_options", {"include_obfuscation": False}),
]
OF_TOKENS = [
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", 4000),
    ("stop", ["a"] * 5),
    ("stop", ["a" * 1025]),
    ("stop", ""),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"896": 1}),
    ("logit_bias", {"5": 101}),
    ("stream_options", {"include_usage": 1}),
    ("best_of", 2),
    ("suffix", "x"),
]
BAD = [
    *((path, *bad) for path in (CHAT, COMPLETIONS, RESPONSES) for bad in OF_TEXT),
    *((path, *bad) for path in (CHAT, COMPLETIONS) for bad in OF_TOKENS),
    *((COMPLETIONS, "prompt", value) for value in ([], [[]], [896], [-1], "\ud800", ["a", 1])),
    (COMPLETIONS, "prompt", "a " * 3000),
    (COMPLETIONS, "logprobs", 6),
    (CHAT, "messages", []),
    (CHAT, "messages", [{"role": "wizard", "content": "x"}]),
    (CHAT, "messages", [{"role": "user", "content": [IMAGE]}]),
    (CHAT, "messages", [{"role": "user", "content": "a " * 3000}]),
    (CHAT, "messages", [{"role": "user", "content": "\ud800"}]),
    (CHAT, "top_logprobs", 3),
    (CHAT, "max_completion_tokens", 0),
    (CHAT, "response_format", {"type": "json_schema"}),
    (CHAT, "response_format", ENDLESS),
    (CHAT, "chat_template_kwargs", {"chat_template": "{{ messages }}"}),
    (CHAT, "tools", [TOOL]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "functions", [TOOL["function"]]),
    (CHAT, "audio", {}),
    (RESPONSES, "input", [{"role": "user", "content": [IMAGE]}]),
    (RESPONSES, "input", []),
    (RESPONSES, "input", "a " * 3000),
    (RESPONSES, "previous_response_id", "resp_1"),
    (RESPONSES, "max_output_tokens", 0),
    (RESPONSES, "background", True),
    (RESPONSES, "tools", [{"type": "web_search"}]),
    (RESPONSES, "top_logprobs", 1),
    (RESPONSES, "stream_options", {"include_usage": True}),
    (RESPONSES, "input", [{"role": "user", "content": "x", "name": "Ann"}]),
    (RESPONSES, "tool_choice", "required"),
    ("/detokenize", "tokens", [896]),
    ("/tokenize", "prompt", None),
    ("/v1/audit", "response", {"object": "nothing"}),
]
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
    named = {"tools", field} if field == "tool_choice" else {field}
    assert (error["param"] in named and field in error["message"]) or "tools" in named
    assert served.engine.stats().committed == committed, "nothing ran"


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '"x"', "[" * 10**5, '{"a": NaN}', "\x80"]
)
def test_malformed(served, content):
    found = httpx.post(f"{served.url}{CHAT}", content=content.encode("latin-1"), headers=JSON)
    assert found.status_code == 400 and found.json()["error"]["message"]


MANY = 2 * 10**5


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (COMPLETIONS, {"prompt": [None] * MANY}),
        (COMPLETIONS, {str(number): 1 for number in range(MANY)}),
        (COMPLETIONS, {"metadata": {str(number): 1 for number in range(MANY)}}),
        (CHAT, {"messages": [{}] * MANY}),
        (CHAT, {"messages": [{"role": "user"}] * MANY}),
        (CHAT, {"tools": [{"function": {str(number): 1 for number in range(MANY)}}]}),
    ],
    ids=["prompt", "fields", "metadata", "bad messages", "messages", "tools"],
)
def test_millions_of_faults(served, path, own):
    """They are not all gathered: others would wait meanwhile."""
    content = json.dumps({"model": MODEL, **NEEDED[path], **own})
    began = time.process_time()
    found = httpx.post(f"{served.url}{path}", content=content, headers=JSON)
    assert found.status_code == 400, found.text
    assert time.process_time() - began < 1.0


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
