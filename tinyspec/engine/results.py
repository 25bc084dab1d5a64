"""What users see of requests: outputs at their end, and streams of events while they grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from tinyspec.engine.request_tracker import RequestTracker
from tinyspec.outputs import Completion, RequestOutput, StreamEvent, Thought
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.text.decoding import TextStream, decode, text_of


def output_of(request: Request, tokenizer: Any) -> RequestOutput:
    """A finished request."""
    known = request.fingerprint
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        params=request.params,
        completions=[_completion_of(sequence, tokenizer) for sequence in request.sequences],
        fingerprint=known and known.digest,
        prompt_logprobs=[*request.prompt_logprobs] or None,
        fingerprint_parts=known and dict(known.parts),
        thoughts=thoughts_of(request, tokenizer),
    )


def scores_of(outputs: list[RequestOutput]) -> list[list[float]]:
    """Log-probabilities of requests that score. Raises RuntimeError for one that was aborted."""
    completions = [output.completions[0] for output in outputs]
    for completion in completions:
        if completion.error is not None:
            raise RuntimeError(f"no score: {completion.error}")
    return [completion.logprobs or [] for completion in completions]


def thoughts_of(request: Request, tokenizer: Any, first: int = 0) -> list[Thought] | None:
    """Those made so far, from chunk ``first`` on; None where the prompt is not thought about."""
    if request.thoughts is None:
        return None
    found = [made.thought for made in request.thoughts.found[first:]]
    return [replace(made, text=tokenizer and decode(tokenizer, made.token_ids)) for made in found]


def _completion_of(sequence: Sequence, tokenizer: Any) -> Completion:
    token_ids, request = sequence.generated, sequence.request
    return Completion(
        token_ids=token_ids,
        text=text_of(tokenizer, request.prompt_ids, token_ids, sequence.params),
        logprobs=sequence.logprobs if sequence.params.logprobs else None,
        top_logprobs=[*sequence.top_logprobs] if sequence.params.top_logprobs else None,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        stats=replace(sequence.stats),
        stop_reason=sequence.stop_reason,
    )


@dataclass
class _Told:
    """What was told of a sequence: how many tokens, and thoughts of its prompt, which has that
    number in its call."""

    text: TextStream
    tokens: int
    prompt: int
    thoughts: int = 0


class EventStream(Iterator[StreamEvent]):
    """Events of some requests that ``tracker`` has begun, each sequence's in order; runs the engine
    where there is none yet.

    Several streams and calls of ``generate`` may be under way in one engine, in one thread or many;
    each stream is read by one thread at a time. ``close`` (or leaving the ``with`` block, or
    deleting the stream) aborts what is unfinished.
    """

    def __init__(
        self, requests: list[Request], tokenizer: Any, tracker: RequestTracker, engine: object
    ):
        self.requests = requests
        self._tokenizer, self._tracker = tokenizer, tracker
        self._engine = engine  # which is not collected before the stream
        self._events: deque[StreamEvent] = deque()
        # Sequences of which there is more to tell.
        self._open: dict[Sequence, _Told] = {}
        for prompt, request in enumerate(requests):
            for sequence in request.sequences:
                text = TextStream(tokenizer, sequence.params, request.prompt_ids)
                self._open[sequence] = _Told(text, request.num_prompt, prompt)

    def __next__(self) -> StreamEvent:
        while True:
            with suppress(IndexError):
                return self._events.popleft()
            self._tracker.drive("stream", self._ready, self._look)
            if not (self._events or self._open):
                raise StopIteration

    def _ready(self) -> bool:
        """Whether there is something to tell."""
        return not self._open or any(starmap(self._news, list(self._open.items())))

    def _news(self, sequence: Sequence, told: _Told) -> bool:
        """Whether it has got tokens, or thoughts, of which its first completion tells, since they
        were told, or has ended."""
        if (thoughts := sequence.request.thoughts) is not None:
            # Those of before the model changed are made again.
            told.thoughts = min(told.thoughts, len(thoughts.found))
            if sequence.index == 0 and told.thoughts < len(thoughts.found):
                return True
        return sequence.length > told.tokens or sequence.finished

    def _look(self) -> None:
        """An event of each sequence of which there is something to tell."""
        for sequence, told in list(self._open.items()):
            if not self._news(sequence, told):
                continue
            request, count = sequence.request, sequence.length - told.tokens
            token_ids = sequence.ids(told.tokens, sequence.length)
            tops = sequence.top_logprobs if sequence.params.top_logprobs else None
            stats, none_told = sequence.stats, told.tokens == request.num_prompt
            first = none_told and (count > 0 or sequence.finished)
            event = StreamEvent(
                request_id=request.request_id,
                prompt=told.prompt,
                index=sequence.index,
                token_ids=token_ids,
                text=told.text.push(token_ids, sequence.finished),
                logprobs=sequence.last_logprobs(count) if sequence.params.logprobs else None,
                top_logprobs=None if tops is None else tops[told.tokens - request.num_prompt :],
                finish_reason=sequence.finish_reason,
                error=sequence.error,
                stop_reason=sequence.stop_reason,
                fingerprint=request.fingerprint and request.fingerprint.digest,
                prompt_logprobs=(request.prompt_logprobs or None) if first else None,
                num_prompt_tokens=request.num_prompt,
                cached_prompt_tokens=stats.cached_prompt_tokens,
                queue_seconds=stats.queue_seconds,
            )
            if sequence.finished:
                event.accepted, event.rolled_back = stats.accepted, stats.rolled_back
            told.tokens += count
            if sequence.index == 0:
                event.thoughts = thoughts_of(request, self._tokenizer, told.thoughts) or None
                told.thoughts += len(event.thoughts or ())
            self._events.append(event)
            if sequence.finished:
                self._open.pop(sequence, None)  # another thread may have closed the stream

    def new_events(self) -> list[StreamEvent] | None:
        """What there is now, in a turn and without running the engine: None where there is nothing
        yet, an empty list where nothing will come."""
        self._look()
        events = list(self._events)
        self._events.clear()
        return None if not events and self._open else events

    def close(self) -> None:
        """Abort what is unfinished and forget what was not read."""
        self._open = {}  # another thread may be going through what there was
        self._tracker.cancel(self.requests)
        self._events.clear()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._tracker.drop(self.requests)
