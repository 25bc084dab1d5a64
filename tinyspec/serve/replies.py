"""What the endpoints for text answer: one object at the end, or parts while the text grows.

All are made of events: a finished output counts as one event of each completion.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.serve.protocol import FORMS
from tinyspec.serve.reading import Reading
from tinyspec.text.decoding import INCOMPLETE, bytes_of
from tinyspec.text.stream import TextStream

# JSON has no -inf: what OpenAI's API gives for a token without probability.
LEAST_LOGPROB = -9999.0
# What completions say of a token.
OF_TOKEN = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
# What of the request its response does not repeat, and what all responses here have.
NOT_REPEATED = {"input", "stream", "stream_options", *FORMS}
NOTHING = dict.fromkeys(("max_tool_calls", "previous_response_id", "reasoning"))
UNKNOWN = dict.fromkeys(("parameters", "strict"))
THOUGHT = {"output_tokens_details": {"reasoning_tokens": 0}}
# What makes a chunk worth sending, where there is some of it.
NEWS = ("text", "delta", "logprobs", "finish_reason", "token_ids")
SHARED = {field.name for field in fields(StreamEvent)}


def events_of(outputs: Iterable[RequestOutput]) -> list[StreamEvent]:
    """One event of each completion, with all of it."""
    events = []
    for number, output in enumerate(outputs):
        for index, completion in enumerate(output.completions):
            place = {"prompt": number, "index": index}
            cached = {"cached_prompt_tokens": completion.stats.cached_prompt_tokens}
            own = {**vars(output), **vars(completion), **place, **cached}
            events.append(StreamEvent(**{n: own[n] for n in own.keys() & SHARED}))
    return events


def sse(data: Any) -> str:
    """One event of a stream; ASCII, so that any string can be sent."""
    return f"data: {json.dumps(data)}\n\n"


def flat(tool: Any) -> Any:
    """A tool, or the choice of one, as responses have it."""
    return tool if isinstance(tool, str) else {"type": "function", **tool["function"]}


def share(logprob: float | None) -> float | None:
    """A log-probability as JSON has it."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


@dataclass
class Choice:
    """What was said of one completion: its text as far as it may be a call, its tokens', and where
    the next of these begins."""

    text: Reading
    texts: TextStream
    begun: bool = False
    place: int = 0


@dataclass
class Reply:
    """What is said of one request.

    prompts: token ids. fingerprint: the engine's, until an output has one.
    seed: as drawn, where the request has none. read: makes what finds thoughts and calls.
    began: when it came. prompt_tops: of each prompt, the likeliest tokens from its second place on.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    counted: ClassVar[tuple[str, str]] = ("prompt_tokens", "completion_tokens")
    body: Any
    prompts: list[list[int]]
    tokenizer: Any
    fingerprint: str
    read: Callable[..., Reading]
    seed: int | None
    began: float
    generated: int = 0
    prompt_tops: list[Any] = field(default_factory=list)
    _cached: dict[int, int] = field(default_factory=dict)
    _choices: dict[tuple[int, int], Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = self.body.request_id or uuid.uuid4().hex
        self.reply_id, self.created = f"{self.prefix}_{own}", int(time.time())

    def note(self, event: StreamEvent) -> tuple[Choice, dict[str, Any]]:
        """Count an event; what was said of its completion, and what is said at every endpoint."""
        self.fingerprint = event.fingerprint or self.fingerprint
        self.generated += len(event.token_ids)
        self._cached.setdefault(event.prompt, event.cached_prompt_tokens or 0)
        key = event.prompt, event.index
        if key not in self._choices:
            prompt = self.prompts[event.prompt]
            texts = TextStream(self.tokenizer, prompt=prompt)
            self._choices[key] = Choice(self.read(prompt=prompt), texts)
        own: dict[str, Any] = {"token_ids": event.token_ids} if self.body.return_token_ids else {}
        own |= {"index": event.prompt * self.body.completions + event.index}
        own |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
        return self._choices[key], own

    def said(self, event: StreamEvent, whole: bool) -> dict[str, Any]:
        """What an event adds to its choice, or all of it."""
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        counts = [sum(map(len, self.prompts)), self.generated]
        found = dict(zip(self.counted, counts, strict=True))
        details = {"cached_tokens": sum(self._cached.values())}
        return {**found, "total_tokens": sum(counts), f"{self.counted[0]}_details": details}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.reply_id, "object": kind, "created": self.created}
        head |= {"model": self.body.model, "system_fingerprint": self.fingerprint}
        return head if self.seed is None else {**head, "seed": self.seed}

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self.said(event, whole=True) for event in events]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        """What is sent of an event."""
        choice = self.said(event, whole=False)
        if any(choice.get(name) for name in NEWS):
            yield self._chunk([choice], None)

    def failed(self, error: dict[str, Any]) -> str:
        """What is sent in place of the rest."""
        return sse({"error": error})

    def end(self) -> Iterator[str]:
        """What is sent behind the last event."""
        if self.body.stream_options.include_usage:
            yield self._chunk([], self.usage)
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        asked = self.body.stream_options
        if asked.continuous_usage_stats:
            usage = self.usage
        counts = {"usage": usage} if usage or asked.include_usage else {}
        return sse({**self._head(self.chunk_kind), "choices": choices, **counts})


class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def said(self, event: StreamEvent, whole: bool) -> dict[str, Any]:
        if not self.body.max_new_tokens:
            event = replace(event, token_ids=[], text="", top_logprobs=None, stop_reason=None)
            event = replace(event, logprobs=event.logprobs and [], finish_reason="length")
        choice, own = self.note(event)
        own |= {"text": event.text or "", "logprobs": None}
        rows: list[tuple[Any, ...]] = []
        if not choice.begun:
            choice.begun, prompt = True, self.prompts[event.prompt]
            if self.body.return_token_ids:
                own["prompt_token_ids"] = prompt
            if self.body.echo:
                sent, decoded = self.body.prompts()[event.prompt], self.tokenizer.decode(prompt)
                cut_off = self.body.truncate_prompt_tokens or not isinstance(sent, str)
                echo = decoded if cut_off else sent
                # What the tokenizer puts in front is no part of what was sent.
                cut = len(decoded) - len(echo) if decoded.endswith(echo) else 0
                own["text"] = echo + own["text"]
                if (known := event.prompt_logprobs) is not None:
                    rest = self.prompt_tops[event.prompt] if self.prompt_tops else None
                    tops = rest and [[], *rest]
                    texts = TextStream(self.tokenizer, special=True)
                    rows += self._rows(choice, texts, (prompt, known, tops), cut)
                choice.place = len(echo)
        if event.logprobs is not None:
            told = event.token_ids, event.logprobs, event.top_logprobs
            rows += self._rows(choice, choice.texts, told)
            own["logprobs"] = {name: [row[n] for row in rows] for n, name in enumerate(OF_TOKEN)}
        return own

    def _rows(
        self, choice: Choice, texts: TextStream, told: tuple[Any, ...], cut: int = 0
    ) -> Iterator[tuple[Any, ...]]:
        """Of each token what ``OF_TOKEN`` names. told: tokens, log-probabilities, likeliest tokens.
        cut: characters that are left out first."""
        tokens, logprobs, tops = told
        for token, logprob, top in zip(tokens, logprobs, tops or [[]] * len(tokens), strict=True):
            # Of tokens with one text the chosen one, then the likeliest.
            others = {texts.peek(n): share(value) for n, value in reversed(top) if n != token}
            whole = texts.push([token], last=False) or ""
            text, place = whole[cut:], choice.place
            cut -= len(whole) - len(text)
            choice.place += len(text)
            best = None if logprob is None else {**others, text: share(logprob)}
            yield place, share(logprob), text, best


class ChatReply(Reply):
    """Of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def said(self, event: StreamEvent, whole: bool) -> dict[str, Any]:
        choice, own = self.note(event)
        thought, content, calls = choice.text.told(event)
        message: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
        message |= {"reasoning_content": thought} if thought else {}
        if content or not choice.begun:
            message["content"] = content or (None if calls else "")
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            message["tool_calls"] = calls if whole else numbered
        choice.begun = True
        own |= {"message" if whole else "delta": message, "logprobs": None}
        if self.body.logprobs:
            own["logprobs"] = {"content": self._logprobs(event, choice.texts)}
        if calls and event.finish_reason == "stop":
            own["finish_reason"] = "tool_calls"
        return own

    def _head(self, kind: str) -> dict[str, Any]:
        head = super()._head(kind)
        ids = self.body.return_token_ids and kind == self.kind
        return {**head, "prompt_token_ids": self.prompts[0]} if ids else head

    def _logprobs(self, event: StreamEvent, texts: TextStream) -> list[dict[str, Any]]:
        """Of each token of an event."""

        def named(token: int, logprob: float) -> dict[str, Any]:
            text = texts.peek(token) or self.tokenizer.decode([token])
            # Part of a character has bytes that the text does not tell.
            raw = bytes_of(self.tokenizer, token) if INCOMPLETE in text else text.encode()
            told = raw if raw is None else [*raw]
            return {"token": text, "logprob": share(logprob), "bytes": told}

        tops, found = event.top_logprobs or [[]] * len(event.token_ids), []
        for token, logprob, top in zip(event.token_ids, event.logprobs or (), tops, strict=True):
            best = [named(*pair) for pair in top]
            found.append({**named(token, logprob), "top_logprobs": best})
            texts.push([token], last=False)
        return found


class ResponsesReply(Reply):
    """Of ``/v1/responses``: one message, where there is text or no call, then the calls; and the
    events by which they grow. An answer that is not streamed is what these would have built."""

    kind, prefix = "response", "resp"
    counted = ("input_tokens", "output_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text, self._tokens, self._number = "", list[int](), 0
        self._opened, self._calls = False, list[dict[str, Any]]()
        self._status, self._message = "in_progress", f"msg_{self.reply_id}"
        self._error: dict[str, Any] | None = None

    def _event(self, name: str, **data: Any) -> str:
        data = {"type": f"response.{name}", "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {data['type']}\n{sse(data)}"

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, content: list[Any]) -> dict[str, Any]:
        about = {"type": "message", "role": "assistant", "id": self._message}
        return {**about, "status": self._status, "content": content}

    def _response(self) -> dict[str, Any]:
        """The response as it is now."""
        ended = self._status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        ids = {"token_ids": self._tokens, "prompt_token_ids": self.prompts[0]}
        return {
            **NOTHING,
            **self.body.model_dump(exclude=NOT_REPEATED, by_alias=True),
            "tools": [{**UNKNOWN, **flat(tool)} for tool in self.body.tools],
            "tool_choice": flat(self.body.tool_choice),
            **(ids if self.body.return_token_ids else {}),
            **self._head(self.kind),
            "error": self._error,
            "created_at": self.created,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status,
            "incomplete_details": cut,
            "output": ([self._item([self._part])] * self._opened + self._calls) * ended,
            "usage": {**self.usage, **THOUGHT} if ended else None,
        }

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        for event in events:
            for _ in self.chunks(event):
                pass
        return self._response()

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        (choice, _), place = self.note(event), {"output_index": 0}
        _, text, calls = choice.text.told(event)
        ended, part = event.finish_reason, {**place, "content_index": 0, "item_id": self._message}
        if not choice.begun:
            choice.begun = True
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())
        self._tokens += event.token_ids
        for call in calls:
            about = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
            self._calls.append({**about, **call["function"]})
        if not self._opened and (text or (ended and not self._calls)):
            self._opened = True
            yield self._event("output_item.added", **place, item=self._item([]))
            yield self._event("content_part.added", **part, part=self._part)
        if text:
            self._text += text
            yield self._event("output_text.delta", **part, delta=text, logprobs=[])
        if not ended:
            return
        self._status = "completed" if ended == "stop" else "incomplete"
        if self._opened:
            yield self._event("output_text.done", **part, text=self._text, logprobs=[])
            yield self._event("content_part.done", **part, part=self._part)
            yield self._event("output_item.done", output_index=0, item=self._item([self._part]))
        for number, call in enumerate(self._calls, int(self._opened)):
            of, text = {"item_id": call["id"], "output_index": number}, call["arguments"]
            begun = {**call, "arguments": "", "status": "in_progress"}
            call["status"] = self._status if call is self._calls[-1] else "completed"
            yield self._event("output_item.added", output_index=number, item=begun)
            yield self._event("function_call_arguments.delta", **of, delta=text)
            yield self._event("function_call_arguments.done", **of, arguments=text)
            yield self._event("output_item.done", output_index=number, item=call)

    def end(self) -> Iterator[str]:
        yield self._event(self._status, response=self._response())
        yield "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        self._status, self._error = "failed", {**error, "code": "server_error"}
        return self._event("failed", response=self._response())
