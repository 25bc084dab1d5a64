"""Fields as clients of OpenAI's API and of vLLM send them: what means nothing, and what vLLM
has."""

import json
import re

import httpx
import openai
import pytest

from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES, running
from tinyspec.serve.protocol import DEFAULTS

OWN = {"deterministic": True, "return_token_ids": True, "seed": 3}
ASKED = {
    CHAT: {"messages": MESSAGES, "max_tokens": 8},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 8},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 8},
}
# Of the tables of OpenAI's and vLLM's documents, beside those that are named by a field here.
ALSO = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "stop_token_ids": [], "ignore_eos": False}
ALSO |= {"service_tier": "auto", "priority": 0, "min_tokens": 0, "top_p": 1.0, "user": None}
ONLY = {
    CHAT: {"response_format": {"type": "text"}, "add_generation_prompt": True, "bad_words": []},
    COMPLETIONS: {"response_format": {"type": "text"}, "echo": False, "add_special_tokens": True},
    RESPONSES: {"store": True, "include": [], "tools": [], "truncation": "disabled"},
}
ONLY[CHAT] |= {
    "add_special_tokens": False,
    "continue_final_message": False,
    "prompt_logprobs": None,
}


def tokens(response):
    assert response.status_code == 200, response.text
    found = response.json()
    return found.get("choices", [found])[0]["token_ids"]


@pytest.mark.parametrize("path", ASKED)
def test_what_means_nothing(served, path):
    """Values that documents call defaults change nothing, one by one and together; other values of
    these fields are refused, and what is allowed is told."""
    asked = {**OWN, **ASKED[path]}
    expected = tokens(served.post(path, **asked))
    assert tokens(served.post(path, **asked | {"seed": 4})) != expected, "control"
    every = {name: value for name, values in DEFAULTS.items() for value in values}
    assert tokens(served.post(path, **asked, **every | ALSO | ONLY[path])) == expected
    for name, values in DEFAULTS.items():
        for value in values:
            assert tokens(served.post(path, **asked, **{name: value})) == expected, name
        refused = served.post(path, **asked | {name: "another"})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == name
        if name != "echo":
            shown = str(values[0]).replace("'", "")
            assert error["message"].startswith(f"{name}: another is not served, {shown}")


def test_messages_of_before(served):
    """As clients send them back: what they have besides text, calls without arguments, and parts of
    chunks."""
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": ""}}
    call["function"]["parsed_arguments"] = {}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
        "annotations": [],
        "parsed": {},
    }
    said |= {"reasoning_content": "Hm.", "refusal": None, "audio": None, "function_call": None}
    turns = [*MESSAGES, said, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert len(tokens(served.post(CHAT, **OWN, messages=turns, max_tokens=2))) == 2


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
FORMS = {
    "json": (SCHEMA, r'\{"a": (true|false)\}'),
    "json as text": (json.dumps(SCHEMA), r'\{"a": (true|false)\}'),
    "regex": (r"[ab]{3}c", "[ab]{3}c"),
    "choice": (['"yes\\', "n\u00f6\n"], '"yes\\\\|n\u00f6\n'),
    "grammar": ('root ::= x+\nx ::= [ab] "c"', "([ab]c)+"),
    "grammar in Lark": ('start: "b" /a{2}/', "baa"),
}


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_text_is_to_be_like(served, kind):
    """In vLLM's ways, of now and before, at each endpoint."""
    given, pattern = FORMS[kind]
    way, found = kind.split()[0], set()
    for own in ({"structured_outputs": {way: given}}, {f"guided_{way}": given}):
        for path, asked in ASKED.items():
            most = "max_output_tokens" if path == RESPONSES else "max_tokens"
            response = served.post(path, **asked | OWN | {most: 40} | own)
            assert response.status_code == 200, response.text
            text = str(response.json().get("output", response.json().get("choices")))
            found.add((path, re.sub(r"'id': '\w+'", "", text)))
            choice = response.json().get("choices", [{}])[0]
            if path == COMPLETIONS and choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["text"])
            if path == CHAT and choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["message"]["content"])
    assert len(found) == len(ASKED), "both names say the same"


def test_one_form_at_a_time(served):
    asked = {**ASKED[CHAT], "guided_regex": "a"}
    both = served.post(CHAT, **asked, response_format={"type": "json_object"})
    assert both.status_code == 400 and "left out beside" in both.json()["error"]["message"]


def test_words_that_are_not_said(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "seed": 3}
    own = {"deterministic": True, "ignore_eos": True}
    words = [" a", "cat", "the"]
    said = client.completions.create(**asked, extra_body=own).choices[0].text
    assert any(f" {word.strip()} " in said for word in words), "control"
    other = client.completions.create(**asked, extra_body={**own, "bad_words": words})
    assert not any(f" {word.strip()} " in other.choices[0].text for word in words)


def test_log_probabilities_of_prompts(served):
    """In vLLM's form: those of echo, the likeliest with ranks; whole answers have them."""
    asked = {"prompt": [PROMPT, "The cat"], "max_tokens": 2, "seed": 3, **OWN}
    echoed = served.post(COMPLETIONS, **asked, echo=True, logprobs=2).json()["choices"]
    choices = served.post(COMPLETIONS, **asked, prompt_logprobs=2).json()["choices"]
    both = served.post(COMPLETIONS, **asked, prompt_logprobs=4, echo=True, logprobs=2).json()
    assert [choice["logprobs"] for choice in both["choices"]] == [c["logprobs"] for c in echoed]
    for choice, told in zip(choices, echoed, strict=True):
        first, *rest = choice["prompt_logprobs"]
        prompt, values = choice["prompt_token_ids"], told["logprobs"]["token_logprobs"]
        assert first is None and len(rest) == len(prompt) - 1 > 0 and choice["logprobs"] is None
        for row, token, value in zip(rest, prompt[1:], values[1:], strict=False):
            assert row[str(token)]["logprob"] == value
            ranked = {each["rank"]: each["logprob"] for each in row.values() if each["rank"]}
            assert ranked.keys() == {1, 2} and ranked[1] >= ranked[2]
            assert len(row) - 2 == (row[str(token)]["rank"] is None)
        rows = zip(rest, prompt[1:], strict=True)
        names = [row[str(token)]["decoded_token"] for row, token in rows]
        assert (PROMPT + "The cat").count("".join(names)) == 1
    shared = {**ASKED[CHAT], **OWN, "max_tokens": 2}
    chat = served.post(CHAT, **shared, prompt_logprobs=0).json()
    alone = [next(iter(row)) for row in chat["prompt_logprobs"][1:]]
    assert alone == [str(token) for token in chat["prompt_token_ids"][1:]]
    audited = {"request": {"model": MODEL, **shared, "prompt_logprobs": 0}, "response": chat}
    assert served.post_raw("/v1/audit", audited).json()["verdict"] == "same"
    value = chat["prompt_logprobs"][1][alone[0]]
    value["logprob"] -= 1e-6
    assert served.post_raw("/v1/audit", audited).json()["verdict"] == "differs", "control"
    streamed = served.post(CHAT, **shared, prompt_logprobs=0, stream=True)
    assert streamed.status_code == 400 and "prompt_logprobs" in streamed.json()["error"]["param"]


def test_tokens_that_may_be_said(served):
    asked = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, **OWN}
    free = served.post(COMPLETIONS, **asked).json()["choices"][0]["token_ids"]
    few = sorted({*free})[:3]
    held = served.post(COMPLETIONS, **asked, allowed_token_ids=few).json()["choices"][0]
    assert {*held["token_ids"]} <= {*few} and not {*free} <= {*few}
    for own in ({"guided_regex": "[0-9]+"}, {"bad_words": ["a"], "guided_regex": "a+"}):
        few = {"allowed_token_ids": few} if len(own) == 1 else {}
        none = served.post(COMPLETIONS, **asked, **own, **few)
        assert none.status_code == 400 and "no token may follow" in none.json()["error"]["message"]
    wrong = served.post(COMPLETIONS, **asked, allowed_token_ids=[])
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "allowed_token_ids"


def test_the_end_of_a_long_prompt(served):
    """As much of it as leaves room for the answer; what may be one of several kinds is named."""
    most = served.engine.config.max_model_len
    long = {"prompt": f"{PROMPT} " * (most // 3), "max_tokens": 5, **OWN}
    found = served.post(COMPLETIONS, **long, truncate_prompt_tokens=-1).json()
    assert found["usage"]["prompt_tokens"] == most - 5
    for wrong in (0, -2, "x"):
        error = served.post(COMPLETIONS, **long, truncate_prompt_tokens=wrong).json()["error"]
        assert error["param"] == "truncate_prompt_tokens" and error["code"][:7] == "invalid"
        assert f"{json.dumps(wrong)} is not allowed" in error["message"] or wrong == "x"


def test_small_fields(served):
    """The id of a response, the end of a prompt, a stop string that is shown, a message that is
    continued."""
    asked = {**OWN, **ASKED[COMPLETIONS]}
    first = served.post(COMPLETIONS, **asked, request_id="mine").json()
    assert first["id"] == "cmpl_mine"
    prompt = first["choices"][0]["prompt_token_ids"]
    short = served.post(COMPLETIONS, **asked, truncate_prompt_tokens=2, echo=True).json()
    assert short["choices"][0]["prompt_token_ids"] == prompt[-2:]
    assert not short["choices"][0]["text"].startswith(PROMPT)
    text = first["choices"][0]["text"]
    stop = {"stop": (word := text.split()[1])}
    shown = served.post(COMPLETIONS, **asked, **stop, include_stop_str_in_output=True).json()
    assert shown["choices"][0]["text"] == text[: text.index(word) + len(word)]
    assert word not in served.post(COMPLETIONS, **asked, **stop).json()["choices"][0]["text"]

    turns = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    chats = [
        served.post(CHAT, **OWN, messages=turns, max_tokens=1, **own).json()["prompt_token_ids"]
        for own in ({"continue_final_message": True}, {"add_generation_prompt": False}, {})
    ]
    goes_on, ends, begins = chats
    assert goes_on == ends[: len(goes_on)] and ends == begins[: len(ends)]
    assert len(goes_on) < len(ends) < len(begins)
    shared = {"messages": turns, "continue_final_message": True}
    assert served.post("/tokenize", **shared).json()["tokens"] == goes_on
    both = served.post(CHAT, **shared, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(served, client, stream):
    """With no token to generate nothing is said but the prompt, with its log-probabilities: those
    that a longer answer has."""
    asked = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "seed": 3}
    whole = client.completions.create(**asked, max_tokens=3, extra_body=OWN)
    found = client.completions.create(**asked, max_tokens=0, stream=stream, extra_body=OWN)
    (alone,) = [chunk.choices[0] for chunk in found] if stream else found.choices
    assert alone.text == PROMPT and alone.finish_reason == "length" and alone.token_ids == []
    count = len(alone.prompt_token_ids)
    assert alone.logprobs.token_logprobs == whole.choices[0].logprobs.token_logprobs[:count]
    assert alone.logprobs.top_logprobs == whole.choices[0].logprobs.top_logprobs[:count]
    if not stream:
        assert found.usage.completion_tokens == 0
        request = {**asked, **OWN, "max_tokens": 0}
        audited = {"request": request, "response": found.model_dump()}
        assert served.post_raw("/v1/audit", audited).json()["verdict"] == "same"


def test_a_browser(bundled):
    """A page of an origin that is allowed may ask, with a key; its preflight has none."""
    page, other = "http://page.example", "http://other.example"
    asks = {"Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization, content-type"}
    name = "access-control-allow-origin"
    with running(bundled, api_key="secret", origins=[page]) as server:
        url = f"{server.url}/v1/models"
        for origin, status in ((page, 200), (other, 400)):
            found = httpx.options(url, headers={"Origin": origin, **asks})
            assert found.status_code == status
            assert (found.headers.get(name) == page) == (status == 200)
        for key, status in (("bearer secret", 200), ("", 401)):
            found = httpx.get(url, headers={"Origin": page, "Authorization": key})
            assert found.status_code == status and found.headers[name] == page
    with running(bundled) as server:
        found = httpx.get(f"{server.url}/v1/models", headers={"Origin": page})
        assert name not in found.headers, "control"


def test_an_operator(bundled):
    with running(bundled, api_key="secret") as server:
        for ask in (httpx.get, httpx.head, httpx.post):
            assert ask(f"{server.url}/ping").status_code == 200
        assert httpx.head(f"{server.url}/health").status_code == 200
        for path in ("/load", "/version"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/load", headers=headers).json() == {"server_load": 0}
        version = httpx.get(f"{server.url}/version", headers=headers).json()["version"]
        assert re.match(r"\d+\.\d+", version)
        document = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
        assert document["info"]["version"] == version
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        for stream in (False, True):
            answer = {**asked, "stream": stream}
            httpx.post(f"{server.url}{COMPLETIONS}", headers=headers, json=answer)
        told = httpx.get(f"{server.url}/metrics", headers=headers).text
        for name, count in (("queue", 2), ("prefill", 1)):
            label = f'vllm:request_{name}_time_seconds_count{{model_name="{MODEL}"}}'
            assert f"{label} {count}.0\n" in told
        (card,) = server.client(openai.OpenAI, api_key="secret").models.list().data
        assert (card.root, card.parent, card.permission) == (MODEL, None, [])
    with running(bundled, base="its base") as server:
        (card,) = server.client().models.list().data
        assert (card.id, card.parent) == (MODEL, "its base")
