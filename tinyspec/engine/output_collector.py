"""Where finished outputs and streamed events wait for whoever asked for them.

Knows request ids and plain data; runs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tinyspec.outputs import RequestOutput, StreamEvent


class OutputCollector:
    """Outputs that a call waits for by id, events of streams, and all else for ``step``."""

    def __init__(self) -> None:
        self._finished: list[RequestOutput] = []
        self._awaited: dict[str, RequestOutput | None] = {}
        self._events: dict[str, deque[StreamEvent]] = {}
        self._quiet: set[str] = set()

    def __bool__(self) -> bool:
        """Whether ``take_finished`` has anything to give."""
        return bool(self._finished)

    def wait_for(
        self, request_ids: Iterable[str], events: bool = False, quiet: bool = False
    ) -> None:
        """Keep the outputs of these for ``take``, and with ``events`` what they stream; ``quiet``:
        of that only what is aborted."""
        together: deque[StreamEvent] = deque()
        for request_id in request_ids:
            self._awaited[request_id] = None
            if events:
                self._events[request_id] = together
            if quiet:
                self._quiet.add(request_id)

    def wants(self, request_id: str, aborted: bool) -> bool:
        """Whether a stream waits for an event of this request."""
        return request_id in self._events and (aborted or request_id not in self._quiet)

    def is_awaited(self, request_id: str) -> bool:
        return request_id in self._awaited

    def put(self, output: RequestOutput) -> None:
        """A request finished."""
        if output.request_id in self._awaited:
            self._awaited[output.request_id] = output
        else:
            self._finished.append(output)

    def put_events(self, events: Iterable[StreamEvent]) -> None:
        """Tokens were committed; events that no stream waits for are dropped."""
        for event in events:
            if event.request_id in self._events:
                self._events[event.request_id].append(event)

    def take(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The outputs of these, as far as there are any; nobody waits for them any longer."""
        taken = []
        for request_id in request_ids:
            self._events.pop(request_id, None)
            self._quiet.discard(request_id)
            output = self._awaited.pop(request_id, None)
            if output is not None:
                taken.append(output)
        return taken

    def take_finished(self) -> list[RequestOutput]:
        """What finished since the last call and nobody in particular waits for."""
        finished, self._finished = self._finished, []
        return finished

    def next_event(self, request_id: str) -> StreamEvent | None:
        """The first event waiting for this one or any that is awaited together with it."""
        waiting = self._events.get(request_id)
        return waiting.popleft() if waiting else None
