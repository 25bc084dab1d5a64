"""Bodies at random that name the model which is served, so that they reach the engine: fields with
values that documents have, at the borders of their ranges and beyond, of other types, together.
Whatever comes is answered, or refused by the name of a field; streamed it is what it is whole, an
audit finds the same, and the server is as it was."""

import random

import pytest

from tests.serve.test_agents import STRICT
from tests.serve.test_refusals import BAD
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES, events
from tinyspec.runner.processors import NONE_LEFT

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LATER = {"type": "function", "function": {"name": "later", "parameters": {}}}
TURNS = [
    [*MESSAGES, {"role": "assistant", "content": "a", "reasoning_content": "the"}, *MESSAGES],
    [{"role": "system", "content": [{"type": "text", "text": "the"}]}, *MESSAGES],
    [{"role": "user", "content": "<tool_call> \U0001f600 \x00"}],
]
# What may be sent, and what may not be; each endpoint knows some of the fields.
GOOD = {
    "temperature": [0, 0.3, 1, 2, None],
    "top_p": [0, 0.5, 1],
    "top_k": [-1, 0, 1, 5, 2**31],
    "min_p": [0, 0.1, 1],
    "frequency_penalty": [-2, 0.5, 2],
    "presence_penalty": [-2, 0.5, 2],
    "repetition_penalty": [0.01, 1.1, 100],
    "seed": [-1, 0, 2**53],
    "max_tokens": [1, 2, 12],
    "max_completion_tokens": [3],
    "max_output_tokens": [1, 12],
    "min_tokens": [0, 1, 5],
    "stop": [[], " a", ["e", "the"]],
    "stop_token_ids": [[], [5, 6]],
    "ignore_eos": [True, False],
    "n": [1, 2],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "logprobs": [True, False, 0, 2],
    "top_logprobs": [0, 2],
    "prompt_logprobs": [0, 2],
    "echo": [True, False],
    "logit_bias": [{}, {"5": 100, "6": -100}],
    "bad_words": [[], ["a", "the end"]],
    "allowed_token_ids": [[5], [*range(20, 60)]],
    "include_stop_str_in_output": [True, False],
    "truncate_prompt_tokens": [-1, 1, 5],
    "priority": [-5, 5],
    "request_id": ["mine"],
    "return_token_ids": [True, False],
    "deterministic": [True, False],
    "response_format": [{"type": "text"}, {"type": "json_object"}, FORMAT],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json": SCHEMA}],
    "guided_grammar": ['start: "a" start?'],
    "tools": [[], STRICT, [LATER]],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "later"}},
    ],
    "parallel_tool_calls": [True, False],
    "messages": TURNS,
    "prompt": ["a", [5, 6], ["a", "b"], [[5], [6, 7]], "\U0001f600"],
    "input": ["a", TURNS[1]],
    "instructions": ["the"],
    "add_generation_prompt": [True, False],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "metadata": [{}, {"a": "b"}],
    "user": ["me"],
    "store": [False],
    "reasoning": [{}, {"effort": "medium"}],
}
BASE = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": PROMPT}, RESPONSES: {"input": PROMPT}}
LENGTHS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
# Values that test_refusals.py has, and others.
REFUSED = [(f, v) for p, f, v in BAD if p in BASE and f != "stream" and "\\ud8" not in repr(v)]
ODD = {
    "temperature": [1e300],
    "top_k": [1.5],
    "structured_outputs": [{"regex": "("}, {"regex": "(a{1000}){1000}"}, {"json": 5}],
    "guided_grammar": ["start", "", "x ::= a", 'root ::= "\\\\', 5],
    "tools": [[{}], [{"type": "function"}], 5],
    "tool_choice": ["maybe", {"type": "function", "function": {"name": "none"}}],
    "messages": [[{}], 5, [{"role": "user", "content": 5}]],
    "prompt": [5, {}],
    "input": [5, [{"type": "x"}]],
}
REFUSED += [(field, value) for field, values in ODD.items() for value in values]


def body_of(rng):
    """An endpoint and a body for it, in one of six with something that is not served."""
    path = rng.choice(list(BASE))
    body = {"model": MODEL, LENGTHS[path]: 12, "seed": 5, **BASE[path]}
    for name in rng.sample(list(GOOD), rng.randint(0, 7)):
        body[name] = rng.choice(GOOD[name])
    if rng.random() < 1 / 6:
        name, body[name] = rng.choice(REFUSED)
    return path, body


def said(answer):
    """What it tells of each completion."""
    if "output" in answer:
        return [
            (item["type"], item.get("content"), item.get("arguments")) for item in answer["output"]
        ]
    found = {}
    for choice in answer["choices"]:
        message = choice.get("message", choice)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        text = message.get("text", message.get("content")) or ""
        thought = message.get("reasoning_content", "")
        found[choice["index"]] = (text, thought, calls, choice["finish_reason"])
    return found


def streamed(told):
    """The same of a stream."""
    if told[0].get("type"):
        return said(told[-1]["response"])
    found = {}
    for choice in (choice for chunk in told for choice in chunk["choices"]):
        text, thought, calls, _ = found.get(choice["index"], ("", "", [], None))
        delta = choice.get("delta", choice)
        text += delta.get("text", delta.get("content")) or ""
        thought += delta.get("reasoning_content", "")
        calls = calls + [call["function"] for call in delta.get("tool_calls") or ()]
        found[choice["index"]] = (text, thought, calls, choice["finish_reason"])
    return found


def check(server, seed, count):
    """How many bodies were answered and refused."""
    rng, answered, refused = random.Random(seed), 0, 0
    for _ in range(count):
        path, body = body_of(rng)
        response = server.post_raw(path, body)
        if response.status_code != 200:
            assert response.status_code == 400, (path, body, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"], (path, body)
            named = error["param"] or "body" in error["message"] or error["message"] == NONE_LEFT
            assert named, (path, body, error)
            if "stream_options" not in body:  # which nothing but a stream has
                again = server.post_raw(path, body | {"stream": True})
                assert again.status_code == 400 or "error" in events(again)[-1], (path, body)
            refused += 1
            continue
        answered += 1
        whole, request = response.json(), body | {"return_token_ids": True}
        if body.get("prompt_logprobs") is None:
            told = events(server.post_raw(path, body | {"stream": True}))
            if body.get("deterministic", True):
                assert streamed(told) == said(whole), (path, body)
        if "stream_options" not in body:
            audited = {"request": request, "response": server.post_raw(path, request).json()}
            verdict = server.post_raw("/v1/audit", audited).json()
            expected = "same" if body.get("deterministic", True) else "not comparable"
            assert verdict["verdict"] == expected, (path, body, verdict)
    server.settled()
    pool = server.engine.pool
    assert pool.num_free == pool.num_pages or server.engine.config.prefix_cache
    return answered, refused


def test_bodies_at_random(thinking):
    answered, refused = check(thinking, "bodies", 80)
    assert answered > 15 and refused > 15


@pytest.mark.slow("random use", 60, cases=4)
def test_many_bodies_at_random(thinking, case_seed):
    check(thinking, case_seed, 150)
