"""What users see of sequences: an EventStream while they grow, a Completion at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tinyspec.engine.tokenization import TextStream, decode
from tinyspec.outputs import Completion, StreamEvent
from tinyspec.scheduler.request import Request, Sequence


class EventStream(Iterator[StreamEvent]):
    """Events of some requests, each request's in the order in which its tokens are committed.

    next_event: returns the next event, running the engine if it must; None at the end.
    unsubscribe: aborts requests. hold_state: a context manager for callers that run no code of
    their own between events, which saves setting torch's state at each.

    Several streams and calls of ``generate`` may be under way in one engine. ``close`` (or leaving
    the ``with`` block, or deleting the stream) aborts what is unfinished.
    """

    def __init__(
        self,
        requests: list[Request],
        tokenizer: Any,
        next_event: Callable[[list[Request]], StreamEvent | None],
        unsubscribe: Callable[[list[Request]], None],
        hold_state: Callable[[], AbstractContextManager[None]],
    ):
        self.requests = requests
        self._next_event = next_event
        self._unsubscribe = unsubscribe
        self.hold_state = hold_state
        self._texts = {
            (request.request_id, sequence.index): TextStream(tokenizer)
            for request in requests
            for sequence in request.sequences
        }

    def __next__(self) -> StreamEvent:
        event = self._next_event(self.requests)
        if event is None:
            self.close()
            raise StopIteration
        text = self._texts[event.request_id, event.index]
        event.text = text.push(event.token_ids, event.finish_reason is not None)
        return event

    def close(self) -> None:
        """Abort what is unfinished and forget what was not read."""
        self._unsubscribe(self.requests)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def event_of(sequence: Sequence, committed: int) -> StreamEvent:
    """The event of a sequence's newest ``committed`` tokens."""
    end = sequence.length
    return StreamEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=sequence.ids(end - committed, end),
        logprobs=sequence.last_logprobs(committed) if sequence.params.logprobs else None,
        finish_reason=sequence.finish_reason,
    )


def completion_of(sequence: Sequence, tokenizer: Any) -> Completion:
    """A finished sequence as its user sees it."""
    token_ids = sequence.ids(sequence.request.num_prompt, sequence.length)
    return Completion(
        token_ids=token_ids,
        text=decode(tokenizer, token_ids),
        logprobs=sequence.logprobs if sequence.params.logprobs else None,
        top_logprobs=sequence.top_logprobs if sequence.params.top_logprobs else None,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        stats=sequence.stats,
    )
