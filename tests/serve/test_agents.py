"""Tools as agents send them: ``strict`` and ``parallel_tool_calls: false`` with ``tool_choice:
"auto"``, allowed tools, a response format beside them, models that think, calls that are cut."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import openai
import pytest

from tests.serve.test_tools import CLOCK, WEATHER
from tests.support.script import saying
from tests.support.serving import MESSAGES, MODEL, TEMPLATES, THINKING, running, speaking
from tests.support.tokenizers import tokenizer_of
from tinyspec import SamplingParams
from tinyspec.serve.reading import Reading, Thought
from tinyspec.serve.tools import HERMES, LLAMA

STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (WEATHER, CLOCK)]
BY_NAME = {tool["function"]["name"]: tool["function"]["parameters"] for tool in STRICT}
# As openai-agents, pydantic-ai, inspect-ai, LlamaIndex and LangChain send them.
ASKED = {"model": MODEL, "messages": MESSAGES, "tools": STRICT, "tool_choice": "auto", "seed": 3}
ONE = {"parallel_tool_calls": False}
GOOD = '{"name": "get_time", "%s": {"zone": "CET"}}'
WRONG = '{"name": "get_time", "%s": {"zone": "MARS", "hour": 3}}'
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
ANSWER |= {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
KINDS = {"hermes": "special markup", "llama": "markup"}


@pytest.fixture(scope="module", params=KINDS)
def server(request):
    engine = speaking(tokenizer_of(KINDS[request.param]), TEMPLATES[request.param])
    with engine, running(engine, deterministic=True) as found:
        found.form = LLAMA if request.param == "llama" else HERMES
        yield found


def call(form, inner):
    return f"{form.before}{inner % form.arguments}{form.behind}"


def both(client, **asked):
    """The message and its reason, which streamed are those of the whole answer."""
    asked = {"max_tokens": 120, **asked}
    (whole,) = client.chat.completions.create(**asked).choices
    message = whole.message
    said = {"content": message.content or "", "thought": getattr(message, "reasoning_content", "")}
    said["calls"] = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    streamed = {"content": "", "thought": "", "calls": []}
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        streamed["content"] += choice.delta.content or ""
        streamed["thought"] += getattr(choice.delta, "reasoning_content", "")
        streamed["calls"] += [
            (c.function.name, c.function.arguments) for c in choice.delta.tool_calls or ()
        ]
    assert streamed == said and choice.finish_reason == whole.finish_reason
    return said, whole.finish_reason


def sound(calls):
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), BY_NAME[name])
    return [name for name, _ in calls]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("inner", [GOOD, WRONG])
def test_a_call_that_begins_follows_its_schema(server, monkeypatch, inner, parallel):
    client = saying(server, monkeypatch, call(server.form, inner))
    said, reason = both(client, **ASKED, parallel_tool_calls=parallel)
    assert sound(said["calls"]) == ["get_time"] and reason == "tool_calls"
    assert said["content"] == "" or (parallel and inner == WRONG)
    if inner == GOOD:
        assert said["calls"] == [("get_time", '{"zone": "CET"}')]
    else:  # control: without strict the model has its way
        plain = {**ASKED, "tools": [WEATHER, CLOCK]}
        with pytest.raises(jsonschema.ValidationError):
            sound(both(client, **plain)[0]["calls"])


def test_text_is_free(server, monkeypatch):
    """Also under strict, and where a call could have come."""
    client = saying(server, monkeypatch, "the think a b { the")
    said, reason = both(client, **ASKED | ONE)
    assert said == {"content": "the think a b { the", "thought": "", "calls": []}
    assert reason == "stop"


def test_one_call_or_several(server, monkeypatch):
    """With text before, where the format has tokens for its markup; nothing follows the one."""
    if server.form is LLAMA:
        return
    text = f"the\n{call(HERMES, GOOD)}\n{call(HERMES, WRONG)} a"
    client = saying(server, monkeypatch, text)
    for parallel, count in ((True, 2), (False, 1)):
        said, reason = both(client, **ASKED, parallel_tool_calls=parallel)
        assert sound(said["calls"]) == ["get_time"] * count
        assert said["content"].startswith("the") and reason == "tool_calls"


def test_allowed_tools(server, monkeypatch):
    """The others are none that is called; or one of these must be."""
    named = [{"type": "function", "function": {"name": "get_weather"}}]
    client = saying(server, monkeypatch, call(server.form, GOOD))
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        said, _ = both(client, **ASKED | {"tool_choice": choice})
        assert sound(said["calls"]) == ["get_weather"]
    client = saying(server, monkeypatch, "the think")
    said, _ = both(client, **ASKED | {"tool_choice": choice})
    assert sound(said["calls"]) == ["get_weather"]
    flat = {"type": "allowed_tools", **choice["allowed_tools"]}
    flat["tools"] = [{"type": "function", "name": "get_weather"}]
    tools = [{"type": "function", **tool["function"]} for tool in STRICT]
    asked = {"model": MODEL, "input": "x", "tools": tools, "tool_choice": flat}
    found = client.responses.create(**asked, max_output_tokens=120)
    assert [item.name for item in found.output] == ["get_weather"]
    assert len(found.tool_choice.tools) == 1


@pytest.mark.parametrize("count", range(4, 40, 5))
def test_a_forced_call_that_is_cut(server, monkeypatch, count):
    """Is a call, with as much of its arguments as there is, and no markup as text."""
    tokenizer, text = server.engine.tokenizer, call(server.form, GOOD)
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    cut = tokenizer.decode(token_ids[:count])
    said, reason = both(
        saying(server, monkeypatch, text),
        **ASKED | {"tool_choice": "required", "max_tokens": count},
    )
    assert reason == ("length" if count <= len(token_ids) else "tool_calls")
    assert said["content"] == ""
    _, known, arguments = cut.partition(f'", "{server.form.arguments}": ')
    assert (len(said["calls"]) == 1) == bool(known)
    for name, found in said["calls"]:
        assert name == "get_time" and found == arguments[: len('{"zone": "CET"}')]


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_or_an_answer(server, monkeypatch, strict):
    """With a response format the model chooses, and either has its form."""
    asked = ASKED | {"response_format": FORMAT, "tools": STRICT if strict else [WEATHER, CLOCK]}
    client = saying(server, monkeypatch, call(server.form, GOOD))
    assert both(client, **asked)[0]["calls"] == [("get_time", '{"zone": "CET"}')]
    for text in ('{"ok": true}', '{"ok": 3, "no": 1}'):
        said, reason = both(saying(server, monkeypatch, text), **asked)
        jsonschema.validate(json.loads(said["content"]), ANSWER)
        assert said["calls"] == [] and reason == "stop"


# Models that think


# Forms that are no schema, what follows them, and what a model that says "the b/a" says then.
OTHERS = {
    "regex": r"(a/)?b\/a",
    "choice": ["b/a", "the"],
    "grammar": 'start: (x | y) "/a"\nx: /b+/\ny: "}"',
}


@pytest.mark.parametrize("what", ["strict", "one", "format", "forced", "plain", *OTHERS])
def test_what_is_asked_for_begins_behind_the_thought(thinking, monkeypatch, what):
    """A thought is any tokens, calls spelled and called among them; it is told by itself."""
    thought = f'a {call(HERMES, WRONG)} {{"ok": 3}}'
    answer = {"format": '{"ok": 3}', "plain": "the a"} | dict.fromkeys(OTHERS, "b/a")
    answer = answer.get(what, call(HERMES, WRONG))
    client = saying(thinking, monkeypatch, f"<think>{thought}</think>\n\n{answer}")
    asked = {
        "strict": ASKED,
        "one": ASKED | ONE,
        "format": {"model": MODEL, "messages": MESSAGES, "response_format": FORMAT, "seed": 2},
        "forced": ASKED | {"tool_choice": "required"},
        "plain": {"model": MODEL, "messages": MESSAGES},
    }
    for way, form in OTHERS.items():
        asked[way] = asked["plain"] | {"extra_body": {"structured_outputs": {way: form}}}
    asked = asked[what]
    said, _ = both(client, **asked, max_tokens=300)
    assert said["thought"] == thought
    if what == "format":
        jsonschema.validate(json.loads(said["content"]), ANSWER)
    elif what in OTHERS:
        assert said["content"] == "b/a" and not said["calls"]
    elif what == "plain":
        assert said["content"] == "the a" and not said["calls"]
    else:
        assert sound(said["calls"]) == ["get_time"]
        assert said["content"] == "" or what == "strict"  # where more may follow


def test_a_thought_that_the_prompt_begins():
    """As DeepSeek's templates do; one that was ended is none, and without tokens there is none."""
    tokenizer = tokenizer_of("markup")
    tokenizer.chat_template = THINKING
    thought, (begin, end) = (
        Thought.of(tokenizer),
        tokenizer.convert_tokens_to_ids(["<think>", "</think>"]),
    )
    assert (thought.begin, thought.end) == (begin, end)
    assert not thought.is_open([begin, 5])
    (line,) = tokenizer("\n", add_special_tokens=False).input_ids
    assert thought.is_open([1, begin, line]) and not thought.is_open([1, begin, end, line])
    assert thought.rule([begin]).count(str(begin)) == 0 < thought.rule([]).count(str(begin))
    tokenizer.chat_template = TEMPLATES["hermes"]
    assert Thought.of(tokenizer) is None


def test_responses_tell_thoughts(thinking, monkeypatch):
    """As an item of its own in front of the message, streamed as whole, and sent back."""
    client = saying(thinking, monkeypatch, "<think>a the</think>\n\nthe a")
    asked = {"model": MODEL, "max_output_tokens": 60, "extra_body": {"return_token_ids": True}}
    found = client.responses.create(**asked, input="x")
    thought, message = found.output
    assert (thought.type, thought.content[0].text, thought.status) == (
        *("reasoning", "a the", "completed"),
    )
    assert (message.type, message.content[0].text, message.status) == (
        *("message", "the a", "completed"),
    )
    counted = len(thinking.engine.tokenizer("a the", add_special_tokens=False).input_ids)
    assert found.usage.output_tokens_details.reasoning_tokens == counted
    with client.responses.stream(**asked, input="x") as stream:
        deltas = [(e.type.split(".")[1], e.delta) for e in stream if e.type.endswith(".delta")]
        told = stream.get_final_response().output
    assert [(item.type, item.content[0].text) for item in told] == [
        (item.type, item.content[0].text) for item in found.output
    ]
    pieces = {kind: "".join(d for k, d in deltas if k == kind) for kind, _ in deltas}
    assert pieces == {"reasoning_text": "a the", "output_text": "the a"}

    turns = [{"role": "user", "content": "x"}, thought, message, {"role": "user", "content": "y"}]
    again = client.responses.create(**asked, input=turns)
    other = client.responses.create(**asked, input=[*turns[:1], *turns[2:]])
    spoken = client.chat.completions.create(
        model=MODEL,
        messages=[
            *({"role": "user", "content": "x"},),
            {"role": "assistant", "content": "the a", "reasoning_content": "a the"},
            *({"role": "user", "content": "y"},),
        ],
        extra_body={"return_token_ids": True},
    )
    assert again.prompt_token_ids == spoken.prompt_token_ids
    assert other.prompt_token_ids == again.prompt_token_ids, "this template shows no thoughts"

    # Cut within the thought there is no message but an empty one.
    cut = client.responses.create(**asked | {"max_output_tokens": 2}, input="x")
    assert [item.type for item in cut.output] == ["reasoning", "message"]
    assert cut.output[0].content[0].text and not cut.output_text and cut.status == "incomplete"


def test_forms_beside_tools(server, monkeypatch):
    """A call, or what fits a form that is no schema; Llama's format knows no letter to tell by."""
    for text in ("b/a", call(server.form, GOOD)):
        client = saying(server, monkeypatch, text)
        for way, form in OTHERS.items():
            asked = ASKED | {"extra_body": {"structured_outputs": {way: form}}}
            if server.form is LLAMA:
                with pytest.raises(openai.BadRequestError, match="beside tools of Llama"):
                    both(client, **asked)
                continue
            said, _ = both(client, **asked)
            assert (said["content"] == "b/a") == (text == "b/a") == (not said["calls"])


# Calls by their first letter


def test_a_format_without_tokens_chooses_at_the_first_letter():
    """Under strict: text in which markup is spelled later is no call."""
    for form in (HERMES, LLAMA):
        exact = replace(form, first=True, known=True)
        text = call(form, GOOD)
        assert len(Reading(exact, {"get_time"}).push(text, last=True)[1]) == 1
        for front in ("a ", " ", "\n"):
            assert Reading(exact, {"get_time"}).push(front + text, last=True) == (front + text, [])
            assert Reading(form, {"get_time"}).push(front + text, last=True)[1], "control"


def test_refusals_name_the_field(server):
    for change in ({"parallel_tool_calls": 3}, {"tool_choice": "maybe"}):
        with pytest.raises(openai.BadRequestError) as raised:
            server.client().chat.completions.create(**ASKED | change)
        assert next(iter(change)) in raised.value.body["message"]


def test_references_hold_where_schemas_are_put_together():
    """A call, or an answer, by one schema: each part's references are to its own definitions."""

    def of(kind):
        given = {"$defs": {"X": kind}, "type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}}
        return {**given, "required": ["x"], "additionalProperties": False}

    functions = [{"name": name, "strict": True, "parameters": of({"const": name})} for name in "fg"]
    schema = LLAMA.or_call({"json_schema": of({"enum": [2, 3]})}, functions)["json_schema"]
    good = [{"x": 3}, *({"name": n, "parameters": {"x": n}} for n in "fg")]
    wrong = [{"x": "f"}, {"name": "f", "parameters": {"x": "g"}}, {"name": "h", "parameters": {}}]
    check = jsonschema.Draft202012Validator(schema)
    assert all(map(check.is_valid, good)) and not any(map(check.is_valid, wrong))
    engine = speaking(tokenizer_of("markup"), TEMPLATES["llama"])
    with engine:
        params = SamplingParams(json_schema=schema, max_new_tokens=60, seed=1, temperature=1.0)
        texts = [
            o.completions[0].text for o in engine.generate([[n] for n in range(5, 15)], params)
        ]
        assert all(map(check.is_valid, map(json.loads, texts)))


# What a review found


def test_a_message_that_speaks_of_thoughts(thinking, monkeypatch):
    """Is no thought that the prompt begins: the answer is content."""
    client = saying(thinking, monkeypatch, "the a b")
    messages = [{"role": "user", "content": "what does <think> mean?"}]
    asked = {"model": MODEL, "messages": messages}
    assert both(client, **asked)[0] == {"content": "the a b", "thought": "", "calls": []}
    client = saying(thinking, monkeypatch, '{"ok": true}')
    said, _ = both(client, **asked, response_format=FORMAT)
    assert said == {"content": '{"ok": true}', "thought": "", "calls": []}


@pytest.mark.parametrize("count", range(1, 14, 3))
def test_an_answer_that_is_cut_beside_tools(server, monkeypatch, count):
    """Is content, as far as it goes; one that begins as a call does, too."""
    named = {"name": {"type": "string"}, "ok": {"type": "boolean"}}
    form = {"type": "object", "properties": named, "required": ["name"]}
    form |= {"additionalProperties": False}
    asked = ASKED | {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}
    asked["response_format"]["json_schema"]["schema"] = form
    text = '{"name": "zone", "ok": true}'
    cut = server.engine.tokenizer(text, add_special_tokens=False).input_ids[:count]
    said, _ = both(saying(server, monkeypatch, text), **asked | {"max_tokens": count})
    assert said["calls"] == []
    assert said["content"] == server.engine.tokenizer.decode(cut)


def test_an_answer_that_any_call_fits(server, monkeypatch):
    """Llama's calls are objects, too: beside strict tools it would let wrong ones through."""
    asked = ASKED | {"response_format": {"type": "json_object"}}
    client = saying(server, monkeypatch, call(server.form, WRONG))
    if server.form is LLAMA:
        with pytest.raises(openai.BadRequestError, match="additionalProperties"):
            client.chat.completions.create(**asked)
    else:
        sound(both(client, **asked)[0]["calls"])


@pytest.mark.parametrize("odd", [{"uniqueItems": True}, {"not": {}}, {"pattern": "(?=a)b"}])
def test_one_call_of_lax_tools(server, monkeypatch, odd):
    """``parallel_tool_calls: false`` asks for one, of whatever arguments: schemas that llguidance
    does not read are the model's affair, unless they are strict."""
    function = {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": odd}}}
    lax = {"type": "function", "function": function}
    client = saying(server, monkeypatch, call(server.form, WRONG) * 2)
    said, _ = both(client, **ASKED | ONE | {"tools": [lax]})
    assert said["calls"] == [("get_time", '{"zone": "MARS", "hour": 3}')]
    strict = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED | ONE | {"tools": [strict]})
