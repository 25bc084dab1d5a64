"""What completions and chat answer: one object at the end, or chunks while the text grows.

Both are made of events: a finished output counts as one event of each completion.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.serve.tools import ToolFormat, ToolText

# JSON has no -inf: what OpenAI's API gives for a token without probability.
LEAST_LOGPROB = -9999.0
# What makes a chunk worth sending, where there is some of it.
NEWS = ("text", "delta", "logprobs", "finish_reason", "token_ids")
SHARED = {field.name for field in fields(StreamEvent)}


def events_of(outputs: Iterable[RequestOutput]) -> list[StreamEvent]:
    """One event of each completion, with all of it."""
    return [
        StreamEvent(
            request_id=output.request_id,
            prompt=number,
            index=index,
            fingerprint=output.fingerprint,
            prompt_logprobs=output.prompt_logprobs,
            cached_prompt_tokens=completion.stats.cached_prompt_tokens,
            **{name: value for name, value in vars(completion).items() if name in SHARED},
        )
        for number, output in enumerate(outputs)
        for index, completion in enumerate(output.completions)
    ]


def sse(data: Any) -> str:
    """One event of a stream; ASCII, so that any string can be sent."""
    return f"data: {json.dumps(data)}\n\n"


def share(logprob: float | None) -> float | None:
    """A log-probability as JSON has it."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


@dataclass
class Choice:
    """What was said of one completion: characters, and its text as far as it may be a call."""

    text: ToolText
    told: int = 0
    begun: bool = False


@dataclass
class Reply:
    """What is said of one request.

    prompts: token ids. text_of: the text of a token. fingerprint: the engine's, until an output has
    one. seed: as drawn, where the request has none. format: of the calls that are looked for.
    prompt_tops: of each prompt, the likeliest tokens from its second place on, for an echo.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    body: Any
    prompts: list[list[int]]
    text_of: Callable[[int], str]
    fingerprint: str
    format: ToolFormat | None = None
    seed: int | None = None
    generated: int = 0
    prompt_tops: list[Any] = field(default_factory=list)
    _cached: dict[int, int] = field(default_factory=dict)
    _choices: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reply_id, self.created = f"{self.prefix}_{uuid.uuid4().hex}", int(time.time())

    def note(self, event: StreamEvent) -> Choice:
        """Count an event; what was said of its completion."""
        self.fingerprint = event.fingerprint or self.fingerprint
        self.generated += len(event.token_ids)
        self._cached.setdefault(event.prompt, event.cached_prompt_tokens or 0)
        index = event.prompt * self.body.completions + event.index
        if index not in self._choices:
            names = {tool["function"]["name"] for tool in getattr(self.body, "tools", ())}
            self._choices[index] = Choice(ToolText(self.format, names))
        return self._choices[index]

    def _said(self, event: StreamEvent, whole: bool) -> dict[str, Any]:
        """What an event adds to its choice, or all of it."""
        choice = {
            "index": event.prompt * self.body.completions + event.index,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        tokens = {"token_ids": event.token_ids} if self.body.return_token_ids else {}
        return {**tokens, **choice, **self.said(event, self.note(event), whole)}

    def said(self, event: StreamEvent, choice: Choice, whole: bool) -> dict[str, Any]:
        """The same, of what endpoints differ in."""
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.reply_id, "object": kind, "created": self.created}
        head |= {"model": self.body.model, "system_fingerprint": self.fingerprint}
        return head if self.seed is None else {**head, "seed": self.seed}

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._said(event, whole=True) for event in events]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        """What is sent of an event."""
        choice = self._said(event, whole=False)
        if any(choice.get(name) for name in NEWS):
            yield self._chunk([choice], None)

    def end(self) -> Iterator[str]:
        """What is sent behind the last event."""
        if self.body.stream_options.include_usage:
            yield self._chunk([], self.usage)
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        options = self.body.stream_options
        if options.continuous_usage_stats:
            usage = self.usage
        counts = {"usage": usage} if options.include_usage else {}
        return sse({**self._head(self.chunk_kind), "choices": choices, **counts})


class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def said(self, event: StreamEvent, choice: Choice, whole: bool) -> dict[str, Any]:
        text, tokens, logprobs = event.text or "", event.token_ids, event.logprobs
        tops: list[Any] = event.top_logprobs or [[]] * len(tokens)
        own: dict[str, Any] = {"text": text, "logprobs": None}
        if not choice.begun:
            prompt, choice.begun = self.prompts[event.prompt], True
            if self.body.return_token_ids:
                own["prompt_token_ids"] = prompt
            if self.body.echo:
                own["text"] = "".join(map(self.text_of, prompt)) + text
                known = self.prompt_tops[event.prompt] if self.prompt_tops else []
                known = known or [[]] * (len(prompt) - 1)
                tokens, tops = prompt + tokens, [[], *known, *tops]
                logprobs = logprobs and [*(event.prompt_logprobs or ()), *logprobs]
        if logprobs is not None:
            own["logprobs"] = self._logprobs(
                choice, list(map(self.text_of, tokens)), logprobs, tops
            )
        return own

    def _logprobs(
        self, choice: Choice, texts: list[str], logprobs: list[Any], tops: list[Any]
    ) -> dict[str, Any]:
        offsets, best = [], []
        for text, logprob, top in zip(texts, logprobs, tops, strict=True):
            offsets.append(choice.told)
            choice.told += len(text)
            # Of tokens with one text the chosen one, then the likeliest.
            named = [(text, logprob), *((self.text_of(token), value) for token, value in top)]
            best.append({name: share(value) for name, value in reversed(named)})
        return {
            "text_offset": offsets,
            "token_logprobs": list(map(share, logprobs)),
            "tokens": texts,
            "top_logprobs": [None if None in shares.values() else shares for shares in best],
        }


class ChatReply(Reply):
    """Of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def said(self, event: StreamEvent, choice: Choice, whole: bool) -> dict[str, Any]:
        content, calls = choice.text.push(event.text or "", event.finish_reason is not None)
        message: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
        if content or not choice.begun:
            message["content"] = content or (None if calls else "")
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            message["tool_calls"] = calls if whole else numbered
        choice.begun = True
        own: dict[str, Any] = {"message" if whole else "delta": message, "logprobs": None}
        if self.body.logprobs:
            own["logprobs"] = {"content": self._logprobs(event)}
        if calls and event.finish_reason == "stop":
            own["finish_reason"] = "tool_calls"
        return own

    def _head(self, kind: str) -> dict[str, Any]:
        head = super()._head(kind)
        ids = self.body.return_token_ids and kind == self.kind
        return {**head, "prompt_token_ids": self.prompts[0]} if ids else head

    def _logprobs(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Of each token of an event."""

        def named(token: int, logprob: float) -> dict[str, Any]:
            text = self.text_of(token)
            # Part of a character has bytes that the text does not tell.
            known = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": share(logprob), "bytes": known}

        tops = event.top_logprobs or [[]] * len(event.token_ids)
        return [
            {**named(token, logprob), "top_logprobs": [named(*pair) for pair in top]}
            for token, logprob, top in zip(event.token_ids, event.logprobs or (), tops, strict=True)
        ]
