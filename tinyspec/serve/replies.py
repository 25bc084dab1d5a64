"""What the endpoints for text answer: one object at the end, or parts while the text grows.

All are made of events: a finished output counts as one event of each completion.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.serve.reading import Reading
from tinyspec.text.decoding import INCOMPLETE, TextStream, bytes_of

# JSON has no -inf: what OpenAI's API gives for a token without probability.
LEAST_LOGPROB = -9999.0
# What completions say of a token.
OF_TOKEN = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
# What makes a chunk worth sending, where there is some of it.
NEWS = ("text", "delta", "logprobs", "finish_reason", "token_ids")
# What becomes of drafts, as OpenAI calls those of a "prediction".
DRAFTS = ("accepted", "rejected")
SHARED = {field.name for field in fields(StreamEvent)}


def events_of(outputs: Iterable[RequestOutput]) -> list[StreamEvent]:
    """One event of each completion, with all of it."""
    events = []
    for number, output in enumerate(outputs):
        for index, completion in enumerate(output.completions):
            place = {"prompt": number, "index": index}
            own = {**vars(output), **vars(completion.stats), **vars(completion), **place}
            events.append(StreamEvent(**{n: own[n] for n in own.keys() & SHARED}))
    return events


def sse(data: Any) -> str:
    """One event of a stream; ASCII, so that any string can be sent."""
    return f"data: {json.dumps(data)}\n\n"


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
    began: when it came. prompt_tops: of each prompt, the likeliest tokens from its second place on;
    prompt_told: what was said of one.
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
    prompt_told: list[Any] | None = None
    _cached: dict[int, int] = field(default_factory=dict)
    _drafts: Counter[str] = field(default_factory=Counter)
    _choices: dict[tuple[int, int], Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = self.body.request_id or uuid.uuid4().hex
        self.reply_id, self.created = f"{self.prefix}_{own}", int(time.time())

    def note(self, event: StreamEvent) -> tuple[Choice, dict[str, Any]]:
        """Count an event; what was said of its completion, and what is said at every endpoint."""
        self.fingerprint = event.fingerprint or self.fingerprint
        self.generated += len(event.token_ids)
        self._cached.setdefault(event.prompt, event.cached_prompt_tokens or 0)
        self._drafts += Counter(accepted=event.accepted, rejected=event.rolled_back)
        key = event.prompt, event.index
        if key not in self._choices:
            prompt = self.prompts[event.prompt]
            texts = TextStream(self.tokenizer, prompt=prompt)
            self._choices[key] = Choice(self.read(prompt=prompt), texts)
        own: dict[str, Any] = {"token_ids": event.token_ids} if self.body.return_token_ids else {}
        own |= {"index": event.prompt * self.body.completions + event.index}
        own |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
        if (known := event.prompt_logprobs) and getattr(self.body, "prompt_tops", None) is not None:
            self.prompt_told = own["prompt_logprobs"] = self._of_prompt(event.prompt, known)
        return self._choices[key], own

    def _of_prompt(self, number: int, known: list[float | None]) -> list[Any]:
        """Of each token of a prompt what vLLM says of it and of the likeliest in its place."""
        texts, most = TextStream(self.tokenizer, special=True), self.body.prompt_tops
        tops: list[Any] = [[], *((self.prompt_tops and self.prompt_tops[number]) or ())]
        found = list[Any]()
        for place, (token, logprob) in enumerate(zip(self.prompts[number], known, strict=True)):
            top: list[Any] = tops[place][:most] if most else []
            told: dict[int, Any] = {n: (value, r) for r, (n, value) in enumerate(top, start=1)}
            told[token] = logprob, told.get(token, (0, None))[1]
            row = {
                str(n): {"logprob": share(value), "rank": rank, "decoded_token": texts.peek(n)}
                for n, (value, rank) in told.items()
            }
            found.append(None if logprob is None else row)
            texts.push([token], last=False)
        return found

    def said(self, event: StreamEvent, whole: bool) -> dict[str, Any]:
        """What an event adds to its choice, or all of it."""
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        counts = [sum(map(len, self.prompts)), self.generated]
        found: dict[str, Any] = dict(zip(self.counted, counts, strict=True))
        details = {"cached_tokens": sum(self._cached.values())}
        drafts = {f"{name}_prediction_tokens": self._drafts[name] for name in DRAFTS}
        found |= {f"{self.counted[1]}_details": drafts, f"{self.counted[0]}_details": details}
        return {**found, "total_tokens": sum(counts)}

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
            yield self._chunk(choice)

    def failed(self, error: dict[str, Any]) -> str:
        """What is sent in place of the rest."""
        return sse({"error": error})

    def end(self) -> Iterator[str]:
        """What is sent behind the last event."""
        if self.body.stream_options.include_usage:
            yield self._chunk()
        yield "data: [DONE]\n\n"

    def _chunk(self, *choices: dict[str, Any]) -> str:
        asked = self.body.stream_options
        usage = self.usage if asked.continuous_usage_stats or not choices else None
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
                if (known := event.prompt_logprobs) and event.logprobs is not None:
                    rest = self.prompt_tops[event.prompt] if self.prompt_tops else None
                    tops = rest and [[], *(top[: self.body.top_logprobs] for top in rest)]
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
        own.pop("prompt_logprobs", None)
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
        if kind == self.kind and self.body.return_token_ids:
            head["prompt_token_ids"] = self.prompts[0]
        return {**head, "prompt_logprobs": self.prompt_told} if self.prompt_told else head

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
