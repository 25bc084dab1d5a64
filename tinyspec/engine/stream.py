"""A stream of events: tokens of some requests, as they are committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from tinyspec.engine.request_tracker import RequestTracker
from tinyspec.engine.results import event_of, thoughts_of
from tinyspec.engine.tokenization import TextStream
from tinyspec.outputs import StreamEvent
from tinyspec.scheduler.request import Request, Sequence


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
        self._tokenizer = tokenizer
        self._engine = engine  # which is not collected before the stream
        self._tracker = tracker
        self._events: deque[StreamEvent] = deque()
        sequences = [sequence for request in requests for sequence in request.sequences]
        self._texts = {sequence: TextStream(tokenizer) for sequence in sequences}
        # How many thoughts of a prompt were told.
        self._thoughts = {r.sequences[0]: 0 for r in requests if r.thoughts is not None}
        # Those of which there is more to tell, and how many of their tokens were told.
        self._open = {sequence: sequence.request.num_prompt for sequence in sequences}

    def __next__(self) -> StreamEvent:
        while not self._events:
            with self._tracker.lock("stream", self._ready):
                self._look()  # first of all, as others may have run the engine
                if not self._events:
                    if not self._open:
                        raise StopIteration
                    self._tracker.advance()
                    self._look()
        return self._events.popleft()

    def _ready(self) -> bool:
        """Whether there is something to tell."""
        return not self._open or any(
            sequence.length > told or sequence.finished or self._new_thoughts(sequence)
            for sequence, told in self._open.items()
        )

    def _new_thoughts(self, sequence: Sequence) -> int:
        """How many were made since the last were told; none by other completions than the first."""
        if sequence not in self._thoughts:
            return 0
        thoughts = sequence.request.thoughts
        assert thoughts is not None
        # Those of before the model changed are made again.
        told = self._thoughts[sequence] = min(self._thoughts[sequence], len(thoughts.found))
        return len(thoughts.found) - told

    def _look(self) -> None:
        """An event of each sequence that has got tokens or thoughts since the last call, or has
        ended."""
        unfinished = self._open
        for sequence, told in list(unfinished.items()):
            unfinished[sequence] = length = sequence.length
            thoughts = self._new_thoughts(sequence)
            if length > told or sequence.finished or thoughts:
                event = event_of(sequence, length - told)
                if thoughts:
                    first = self._thoughts[sequence]
                    event.thoughts = thoughts_of(sequence.request, self._tokenizer, first)
                    self._thoughts[sequence] += thoughts
                event.text = self._texts[sequence].push(event.token_ids, sequence.finished)
                self._events.append(event)
            if sequence.finished:
                del unfinished[sequence]

    def new_events(self) -> list[StreamEvent] | None:
        """What there is now, without running the engine: None where there is nothing yet, an empty
        list where nothing will come."""
        with self._tracker.lock("stream"):
            self._look()
        events = list(self._events)
        self._events.clear()
        return None if not events and self._open else events

    def close(self) -> None:
        """Abort what is unfinished and forget what was not read."""
        self._tracker.cancel(self.requests)
        self._open = {}  # another thread may be going through what there was
        self._events.clear()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._tracker.drop(self.requests)
