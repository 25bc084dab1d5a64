"""Calls of functions: forced by a grammar, and found in text that comes in any pieces."""

import json
from itertools import pairwise
from typing import Literal

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from transformers import AutoTokenizer

from tests.support.budget import first
from tests.support.serving import MESSAGES, MODEL, TEMPLATES, running, speaking
from tests.support.tokenizers import tokenizer_of
from tinyspec import SamplingParams, StreamEvent
from tinyspec.serve.reading import Reading
from tinyspec.serve.tools import HERMES, LLAMA
from tinyspec.tools.demo import BUNDLED


def tool(name, **properties):
    given = {"type": "object", "properties": properties, "required": list(properties)}
    parameters = {**given, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Rome"]}, warm={"type": "boolean"})
CLOCK = tool("get_time", zone={"enum": ["UTC", "CET"]})
ASKED = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, CLOCK], "seed": 2}


# With markup that is spelled, and with tokens for it.
SERVERS = {"hermes": None, "llama": None, "hermes, special": "special markup"}
SERVERS |= {"hermes, Qwen's": "markup", "llama, Qwen's": "markup", "hermes, Llama-2's": "pieces"}


@pytest.fixture(scope="module", params=first(3, SERVERS, 6))
def server(request):
    kind = SERVERS[request.param]
    tokenizer = tokenizer_of(kind) if kind else AutoTokenizer.from_pretrained(BUNDLED)
    engine = speaking(tokenizer, TEMPLATES[request.param.partition(",")[0]])
    with engine, running(engine, deterministic=True) as found:
        yield found


@pytest.fixture
def client(server):
    return server.client()


def test_a_conversation_with_calls(client):
    """The answer to a call is part of the next prompt, with arguments as an object."""
    asked = {**ASKED, "tool_choice": "required"}
    message = client.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
    turns = [*MESSAGES, message, result]
    found = client.chat.completions.create(**ASKED | {"messages": turns}, max_tokens=5)
    assert found.usage.prompt_tokens > 0 and found.choices[0].message.content
    without = client.chat.completions.create(**ASKED, tool_choice="none", max_tokens=1)
    assert without.usage.prompt_tokens < found.usage.prompt_tokens


def flat(tool):
    """As responses have it, and agents send it."""
    return {"type": "function", **tool["function"]}


def without_ids(items):
    own = {"id", "call_id", "parsed_arguments"}
    return [item.model_dump(exclude={*own, "content"}) for item in items]


@pytest.mark.parametrize("choice", ["required", "get_time", "auto"])
def test_responses(server, client, choice):
    """The calls of a chat, whole and streamed; and the answer to a call makes a chat's prompt."""
    named = {"type": "function", "function": {"name": "get_time"}}
    own = {"seed": 2, "return_token_ids": True}
    tools = [{**tool, "function": {**tool["function"], "strict": False}} for tool in ASKED["tools"]]
    asked = {"model": MODEL, "tools": [*map(flat, tools)], "extra_body": own}
    asked["tool_choice"] = {"type": "function", "name": choice} if choice in str(named) else choice
    asked |= {"max_output_tokens": 60 if choice == "auto" else None}
    found = client.responses.create(**asked, input=MESSAGES)
    chat = {
        **ASKED,
        "tools": tools,
        "tool_choice": named if choice == "get_time" else choice,
        "extra_body": own,
    }
    whole = client.chat.completions.create(**chat, max_tokens=asked["max_output_tokens"])
    told = whole.choices[0].message
    assert found.token_ids == whole.choices[0].token_ids
    calls = [item for item in found.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [
        (call.function.name, call.function.arguments) for call in told.tool_calls or ()
    ]
    assert choice != "get_time" or calls[0].name == choice
    assert found.output_text == (told.content or "") and bool(calls) == (choice != "auto")
    assert found.tools[0].name == "get_weather" and len(found.output) == 1
    request = {**asked, **own, "input": MESSAGES}
    del request["extra_body"]
    audited = {"request": request, "response": found.model_dump(by_alias=True)}
    assert server.post_raw("/v1/audit", audited).json()["verdict"] == "same"

    events = list(client.responses.create(**asked, input=MESSAGES, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert without_ids(events[-1].response.output) == without_ids(found.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    for call in (item for item in done if item.type == "function_call"):
        deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(e.delta for e in deltas if e.item_id == call.id) == call.arguments
    if found.status == "completed":
        with client.responses.stream(**asked, input=MESSAGES) as stream:
            final = [event for event in stream][-1].response
        assert without_ids(final.output) == without_ids(found.output)
        assert final.output_text == found.output_text == events[-1].response.output_text

    for call in calls:
        assert call.status == found.status == "completed"
    if choice == "get_time":  # cut within its arguments
        cut = client.responses.create(**asked | {"max_output_tokens": 8}, input=MESSAGES)
        assert cut.status == "incomplete" and {item.status for item in cut.output} == {"incomplete"}

    if calls:
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "21"}
        turns = [*MESSAGES, *found.output, result]
        asked |= {"tool_choice": "auto", "max_output_tokens": 1}
        again = client.responses.create(**asked, input=turns)
        chat["tool_choice"], answer = (
            "auto",
            {"role": "tool", "tool_call_id": told.tool_calls[0].id},
        )
        turns = [*MESSAGES, told, {**answer, "content": "21"}]
        same = client.chat.completions.create(**chat | {"messages": turns}, max_tokens=1)
        assert again.prompt_token_ids == same.prompt_token_ids


def test_the_client_parses_them(client):
    class Zone(BaseModel):
        name: Literal["UTC", "CET"]

    class get_time(BaseModel):
        here: Zone
        there: Zone

    tool = openai.pydantic_function_tool(get_time)
    assert "$ref" in json.dumps(tool)
    parsed = client.chat.completions.parse(**ASKED | {"tools": [tool]}, tool_choice="required")
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, get_time)


OTHER = {"type": "function", "function": {"name": "other"}}
AMONG = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OTHER]}}
REFUSED = [
    *({"tool_choice": choice} for choice in (OTHER, AMONG)),
    {"tool_choice": "required", "response_format": {"type": "json_object"}},
    {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"tools": [], "tool_choice": "required"},
]


def test_refused(client):
    for change in REFUSED:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{**ASKED, **change})
        assert raised.value.param in {*change, "tool_choice"}


NAMES = {"f", "g"}
CALLS = ['{"name": "f", "%s": {}}', '{"name": "g", "%s": {"a": [1, "}</tool_call>"]}}']
NO_CALLS = ['{"name": "h", "%s": {}}', '{"name": "f", "%s": 3}', '{"name": "f"}', "{", "[]", "f()"]


def split(form, pieces):
    text, found, calls = Reading(form, NAMES), "", []
    for number, piece in enumerate(pieces, start=1):
        content, more = text.push(piece, last=number == len(pieces))
        found, calls = found + content, calls + more
    return found, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@given(st.data())
def test_pieces(data):
    """However a text is cut, content and calls are those of the whole text; what is no call of a
    given function stays."""
    form = data.draw(st.sampled_from([HERMES, LLAMA]))
    good = [one.replace("%s", form.arguments) for one in CALLS]
    parts = [one.replace("%s", form.arguments) for one in CALLS + NO_CALLS]
    chosen = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3))
    if form is HERMES:
        parts = [f"<tool_call>\n{part}\n</tool_call>" for part in chosen]
        text = data.draw(st.sampled_from(["", "Let me see. <", "<tool", "\n\n", "See. "]))
        text += "".join(parts) + data.draw(st.sampled_from(["", "\n"]))
    else:
        text = data.draw(st.sampled_from(["", "Look: "])) + chosen[0]
        text += (behind := data.draw(st.sampled_from(["", " 1", "\n"])))
        chosen = chosen[:1]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = split(form, [text])
    assert split(form, pieces) == whole
    assert [name for name, _ in whole[1]] == [json.loads(c)["name"] for c in chosen if c in good]
    if not whole[1]:
        assert whole[0] == text
    elif form is LLAMA:
        assert whole[0] == (text.removesuffix(chosen[0] + behind) + behind).rstrip()


def told(tokenizer, form, tokens, cuts):
    """What is told of ``tokens`` that come in the pieces between ``cuts``."""
    params = SamplingParams(stop_strings=["STOP", "e></t"], include_stop_str=False)
    text, content, calls = Reading(form.of(tokenizer), NAMES, tokenizer, params), "", []
    for a, b in pairwise([0, *cuts, len(tokens)]):
        last = b == len(tokens)
        piece = tokenizer.decode(tokens[a:b], skip_special_tokens=True)
        event = StreamEvent("r", 0, token_ids=tokens[a:b], text=piece)
        event.finish_reason = "stop" if last else None
        _, more, found = text.told(event)
        content, calls = content + more, calls + found
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("kind", ["markup", "special markup"])
def test_markup_by_its_tokens(kind):
    """Calls stand between the tokens, in a text that need not show them; what is spelled, and what
    is no call, is text; strings that end it are no part."""
    tokenizer, call = tokenizer_of(kind), '{"name": "f", "arguments": {"a": "%s"}}'

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    shown = "<tool_call>" if kind == "markup" else ""
    spelled = tokenizer_of("markup").backend_tokenizer.model.tokenize  # of no added token
    some = [
        n for part in ("<", "tool", "_", "call", ">") for n in map(lambda t: t.id, spelled(part))
    ]
    cases = {
        ("Look: \n", begin, f"\n{call % 'b'}\n", end, "\n"): ("Look:", [("f", '{"a": "b"}')]),
        ("a", begin, call % "</b>", end, begin, call % "c", end): (
            "a",
            [("f", '{"a": "</b>"}'), ("f", '{"a": "c"}')],
        ),
        ("a ", begin, "\nb"): (f"a {shown}\nb", []),
        (*some, call % "b"): (f"<tool_call>{call % 'b'}", []),
        ("a", begin, call % "b", begin, end): None,
        ("a", begin, call % "b", end, " STOP"): ("a", [("f", '{"a": "b"}')]),
    }
    for parts, expected in cases.items():
        tokens = [n for part in parts for n in (ids(part) if isinstance(part, str) else [part])]
        whole = told(tokenizer, HERMES, tokens, [])
        assert expected is None or whole == expected, parts
        for cut in range(1, len(tokens)):
            assert told(tokenizer, HERMES, tokens, [cut]) == whole
