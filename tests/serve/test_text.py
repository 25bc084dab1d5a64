"""Chat, completions, responses and the small endpoints, asked by the ``openai`` client."""

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types.responses import Response
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tinyspec
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES
from tinyspec import AsyncEngine, SamplingParams
from tinyspec.serve.guard import Failure
from tinyspec.text.decoding import TextStream
from tinyspec.tools.demo import BUNDLED

OWN = {"deterministic": True, "return_token_ids": True}
SEEDED = {"model": MODEL, "seed": 3, "max_tokens": 12, "extra_body": OWN}
# The same for an engine.
PARAMS = SamplingParams(
    max_new_tokens=12, temperature=1.0, seed=3, deterministic=True, logprobs=True
)


def joined(chunks, index=0):
    """Text, tokens and log-probabilities of a choice, put together from chunks."""
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    text = "".join(c.text if hasattr(c, "text") else c.delta.content or "" for c in choices)
    return text, [token for c in choices for token in c.token_ids], choices[-1].finish_reason


def test_every_way_gives_the_same_bits(served, client, bundled):
    """HTTP, streamed and not, alone and among others; AsyncEngine; Engine; patched generate."""
    (output,) = bundled.generate([PROMPT], PARAMS)
    expected = output.completions[0]

    async def awaited():
        async with AsyncEngine(bundled) as shared:
            return (await shared.generate([PROMPT], PARAMS))[0].completions[0]

    assert asyncio.run(awaited()).logprobs == expected.logprobs
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=bundled.model.dtype)
    tinyspec.patch(model, deterministic=True)
    ids = tokenizer(PROMPT, return_tensors="pt")
    patched = model.generate(**ids, max_new_tokens=12, do_sample=True, top_k=0, seed=[3])
    assert patched[0, ids["input_ids"].shape[1] :].tolist() == expected.token_ids

    asked = {**SEEDED, "prompt": PROMPT, "logprobs": 0}

    async def crowd():
        async with served.client(openai.AsyncOpenAI) as many:
            others = [many.completions.create(**asked | {"seed": n}) for n in range(6)]
            one, *rest = await asyncio.gather(many.completions.create(**asked), *others)
            assert [c.choices[0].token_ids for c in rest].count(expected.token_ids) == 1
            assert len({tuple(c.choices[0].token_ids) for c in rest}) > 1, "control"
            return one

    for found in (client.completions.create(**asked), asyncio.run(crowd())):
        (choice,) = found.choices
        assert choice.token_ids == expected.token_ids and choice.text == expected.text
        assert choice.logprobs.token_logprobs == expected.logprobs
        assert found.system_fingerprint == output.fingerprint
    chunks = list(client.completions.create(**SEEDED, prompt=PROMPT, stream=True))
    assert joined(chunks) == (expected.text, expected.token_ids, "length")
    assert {chunk.system_fingerprint for chunk in chunks} == {output.fingerprint}


def test_chat(client, bundled):
    asked = {**SEEDED, "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    params = replace(PARAMS, num_return_sequences=2, top_logprobs=2)
    (output,) = bundled.generate([MESSAGES], params)
    assert whole.prompt_token_ids == output.prompt_token_ids
    for choice, expected in zip(whole.choices, output.completions, strict=True):
        assert choice.message.content == expected.text
        assert choice.message.role == "assistant"
        found = choice.logprobs.content
        assert [token.logprob for token in found] == expected.logprobs
        tops = [[top.logprob for top in token.top_logprobs] for token in found]
        assert tops == [[logprob for _, logprob in top] for top in expected.top_logprobs]
        assert bytes(found[0].bytes).decode() == found[0].token
    assert whole.usage.completion_tokens == sum(len(c.token_ids) for c in output.completions)
    assert whole.usage.prompt_tokens == len(output.prompt_token_ids)

    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].usage is None
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        told = (choice.message.content, choice.token_ids, choice.finish_reason)
        assert joined(chunks, choice.index) == told
    options["continuous_usage_stats"] = True
    found = client.chat.completions.create(**asked, stream=True, stream_options=options)
    *counts, total = [chunk.usage.completion_tokens for chunk in found]
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert counts[-1] == total == whole.usage.completion_tokens


def test_completions(client):
    """Prompts in every form, echo with log-probabilities, stops, and what is said of them."""
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    (first,) = client.completions.create(**asked, prompt=PROMPT, extra_body=OWN).choices
    ids = first.prompt_token_ids
    for prompt in ([PROMPT, "One day"], [ids, [5, 6]]):
        found = client.completions.create(**asked, prompt=prompt, n=2).choices
        assert [choice.index for choice in found] == [0, 1, 2, 3]
        assert found[0].text == found[1].text != found[2].text
    whole = client.completions.create(**asked, prompt=ids, echo=True, logprobs=1)
    (choice,) = whole.choices
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT) and len(logprobs.tokens) == len(ids) + 4
    assert logprobs.token_logprobs[0] is None and max(logprobs.token_logprobs[1:]) <= 0
    for place, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[place:].startswith(token)
    asked_again = {**asked, "prompt": [[5, 6], ids], "echo": True, "logprobs": 1, "stream": True}
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked_again)]
    parts = [part for part in parts if part.index == 1]
    assert "".join(part.text for part in parts) == choice.text
    assert [n for part in parts for n in part.logprobs.text_offset] == logprobs.text_offset
    smile = client.completions.create(**asked, prompt="Hi \U0001f600 \xe9", echo=True, logprobs=1)
    (choice,) = smile.choices
    assert choice.text.startswith("Hi \U0001f600 \xe9")
    assert "".join(choice.logprobs.tokens) == choice.text.rstrip("\ufffd")
    story = client.completions.create(**asked | {"max_tokens": 60}, prompt="Once", stop=" named")
    (choice,) = story.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", " named")
    assert choice.text and " named" not in choice.text
    least = {"min_tokens": 40}
    story = client.completions.create(
        **asked | {"max_tokens": 60}, prompt="Once", stop=" named", extra_body=least
    )
    assert story.choices[0].text.startswith(f"{choice.text} named")


def test_the_likeliest_tokens_of_a_prompt(client, bundled):
    """As lm-eval asks for them, to know whether a continuation is what the model would say: those
    that generation has."""
    greedy = SamplingParams(max_new_tokens=8, deterministic=True, top_logprobs=2, logprobs=True)
    (output,) = bundled.generate([PROMPT], greedy)
    said, prompt = output.completions[0], output.prompt_token_ids
    other = [*prompt, 5, 6, 7]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 1, "extra_body": OWN}
    found = client.completions.create(
        **asked, prompt=[prompt + said.token_ids, other, [5]], echo=True, logprobs=2
    )
    whole, forced, short = (choice.logprobs for choice in found.choices)
    assert whole.token_logprobs[len(prompt) : -1] == said.logprobs
    tops = [sorted(share for _, share in top) for top in said.top_logprobs]
    assert [sorted(top.values()) for top in whole.top_logprobs[len(prompt) : -1]] == tops

    def likeliest(logprobs):
        places = zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        return [share == max(top.values()) for share, top in list(places)[len(prompt) : -1]]

    assert all(likeliest(whole)) and not any(likeliest(forced)), "the latter is the control"
    assert short.top_logprobs[0] is None and len(short.tokens) == 2


def test_a_seed_that_was_drawn_repeats(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "extra_body": OWN}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked, seed=first.seed)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert client.completions.create(**asked).seed != first.seed


def test_small_endpoints(served, client):
    (card,) = client.models.list().data
    assert card.id == MODEL == client.models.retrieve(MODEL).id
    assert card.max_model_len == served.engine.config.max_model_len
    assert httpx.get(f"{served.url}/health").status_code == 200
    tokens = served.post("/tokenize", prompt=PROMPT).json()["tokens"]
    assert served.post("/detokenize", tokens=tokens).json() == {"prompt": PROMPT}
    chat = served.post("/tokenize", messages=MESSAGES).json()
    asked = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    assert served.post(CHAT, **asked).json()["prompt_token_ids"] == chat["tokens"]
    assert chat["count"] == len(chat["tokens"])


ASKED = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 1}),
    "stream": (CHAT, {"messages": MESSAGES, "max_tokens": 1, "stream": True}),
    "refused": (CHAT, {"messages": []}),
    "no model": (COMPLETIONS, {"prompt": PROMPT, "model": "another"}),
    "health": ("/health", None),
    "metrics": ("/metrics", None),
    "no page": ("/v1/models/another", None),
}


@pytest.mark.parametrize("kind", ASKED)
def test_the_document_names_the_answer(served, kind):
    """Its status and content type, and what an error looks like."""
    path, body = ASKED[kind]
    document = httpx.get(f"{served.url}/openapi.json").json()
    answer = httpx.get(served.url + path) if body is None else served.post(path, **body)
    (operation,) = document["paths"][path.replace("/another", "/{name}")].values()
    status = "200" if answer.status_code == 200 else f"{answer.status_code // 100}XX"
    described = operation["responses"][status].get("content", {})
    given = answer.headers.get("content-type", "").partition(";")[0]
    assert given in described if answer.content else not described
    if status == "4XX":
        assert described[given]["schema"] == {"$ref": "#/components/schemas/Failure"}
        assert Failure.model_validate(answer.json()).error.message


def test_metrics(served):
    def numbers():
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = numbers()
    asked = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "deterministic": True}
    served.post(COMPLETIONS, **asked)
    served.post(COMPLETIONS, **asked, stream=True)
    after = numbers()
    label = f'{{model_name="{MODEL}"}}'
    grown = {name.removesuffix(label): after[name] - before.get(name, 0) for name in after}
    assert grown.pop("tinyspec:canonical_passes_total") > 0
    for name, count in {
        **{"vllm:generation_tokens_total": 10, "vllm:prompt_tokens_total": 2 * 7},
        **{"vllm:prefix_cache_queries_total": 2 * 7},
        **{"vllm:e2e_request_latency_seconds_count": 2, "vllm:num_requests_running": 0},
        "vllm:time_to_first_token_seconds_count": 1,
        f'vllm:request_success_total{{finished_reason="length",model_name="{MODEL}"}}': 2,
    }.items():
        assert grown[name] == count, name
    assert after[f"vllm:num_requests_running{label}"] == 0


# The Responses API: its client, and what of the compliance suite of openresponses concerns text.

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
ONE = {"model": MODEL, "extra_body": {"seed": 1, "deterministic": True}}


def checked(response):
    """A whole response, with output; as the resource's schema wants it."""
    assert response.keys() >= REQUIRED
    known = {**response["usage"]["input_tokens_details"], "cache_write_tokens": 0}
    usage = {**response["usage"], "input_tokens_details": known}
    Response.model_validate({**response, "usage": usage})
    assert response["status"] == "completed" and response["completed_at"] is not None
    assert response["store"] is False
    (item,) = response["output"]
    (part,) = item["content"]
    assert item["status"] == "completed" and part["text"] and part["annotations"] == []
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    return part["text"]


@pytest.mark.parametrize("kind", list(INPUTS))
def test_compliance_of_responses(served, kind):
    """The resource, whole and streamed: events in order, numbered, that build it."""
    asked = {"input": INPUTS[kind], "seed": 1, "deterministic": True, "tool_choice": "auto"}
    # Of which nothing is kept.
    asked |= {"store": True, "include": ["reasoning.encrypted_content"], "reasoning": {}}
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


def test_texts_of_tokens_join_to_the_text():
    """Where a token's text depends on the one before it: a space that only the first loses, and
    characters of several tokens."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581b"]
    bpe = models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True)
    space = decoders.Replace("\u2581", " ")
    fast = Tokenizer(bpe)
    fast.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    smile = [2 + byte for byte in "\U0001f600".encode()]
    tokens = [258, 258, 259, 260, *smile, *smile, 260, 1, 260]
    for special, text in ((False, " a b\U0001f600\U0001f600 b b"), (True, None)):
        texts = TextStream(tokenizer, special=special)
        found = "".join(texts.push([token], last=False) for token in tokens)
        assert found == tokenizer.decode(tokens, skip_special_tokens=not special) == (text or found)
        assert found != "".join(tokenizer.decode([token]) for token in tokens), "control"
