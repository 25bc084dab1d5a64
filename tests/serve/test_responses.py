"""The Responses API: its client, and the checks of openresponses' compliance suite that concern
text, restated."""

import json

import openai
import pytest
from openai.types.responses import Response

from tests.support.serving import MODEL, RESPONSES

REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty", "usage"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "max_output_tokens"),
    *("max_tool_calls", "store", "background", "service_tier", "metadata", "user"),
    *("safety_identifier", "prompt_cache_key"),
}
ORDER = [
    *("response.created", "response.in_progress", "response.output_item.added"),
    *("response.content_part.added", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done", "response.completed"),
]


def message(role, content):
    return {"type": "message", "role": role, "content": content}


INPUTS = {
    "basic": [message("user", "Say hello in exactly 3 words.")],
    "system": [message("system", "You are a pirate."), message("user", "Say hello.")],
    "turns": [
        *(message("user", "My name is Alice."), message("assistant", "Hello Alice!")),
        message("user", "What is my name?"),
    ],
    "parts": [{"role": "user", "content": [{"type": "input_text", "text": "Count to 5."}]}],
    "text": "Tell me a story.",
}
SEEDED = {"model": MODEL, "extra_body": {"seed": 1, "deterministic": True}}


def checked(response):
    """A whole response, with output; as the resource's schema wants it."""
    assert response.keys() >= REQUIRED
    known = {**response["usage"]["input_tokens_details"], "cache_write_tokens": 0}
    usage = {**response["usage"], "input_tokens_details": known}
    Response.model_validate({**response, "usage": usage})
    assert response["status"] == "completed" and response["completed_at"] is not None
    (item,) = response["output"]
    (part,) = item["content"]
    assert item["status"] == "completed" and part["text"] and part["annotations"] == []
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    return part["text"]


@pytest.mark.parametrize("kind", list(INPUTS))
def test_compliance(served, kind):
    """The resource, whole and streamed: events in order, numbered, that build it."""
    asked = {"input": INPUTS[kind], "seed": 1, "deterministic": True, "tool_choice": "auto"}
    text = checked(served.post(RESPONSES, **asked).json())
    lines = served.post(RESPONSES, **asked, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    named = [line.split("\n") for line in lines[:-2]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    assert list(dict.fromkeys(event["type"] for event in events)) == ORDER
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    assert "".join(event.get("delta", "") for event in events) == text == events[-4]["text"]
    assert checked(events[-1]["response"]) == text
    items = {event["item_id"] for event in events if "item_id" in event}
    assert items == {events[-1]["response"]["output"][0]["id"]}


def test_the_client(client):
    first = client.responses.create(**SEEDED, input="Tell me a story.", instructions="Be brief.")
    assert first.output_text and first.system_fingerprint and first.store is False
    turns = [{"role": "user", "content": "Tell me a story."}, *first.output]
    again = client.responses.create(**SEEDED, input=[*turns, {"role": "user", "content": "More."}])
    assert again.usage.input_tokens > first.usage.total_tokens
    with client.responses.stream(**SEEDED, input="Tell me a story.") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().status == "completed"
    cut = client.responses.create(**SEEDED, input="Tell me a story.", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 3
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
        client.responses.create(**SEEDED, input="x", tools=[tool])
