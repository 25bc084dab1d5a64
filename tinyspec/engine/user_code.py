"""Whether code of the user's may have run between two passes, and so may have changed the model.

Not seen are threads that Python's ``threading`` does not know, signal handlers and finalizers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tinyspec.scheduler.request import Request

# Threads of libraries that touch no model.
HARMLESS = ("TMonitor",)  # tqdm's


class UserCode:
    """Who calls the engine, and which requests call the user back.

    Between two passes the caller runs code of its own, unless it has said by ``shut_out`` that it
    does not.
    """

    def __init__(self) -> None:
        self._callbacks: set[str] = set()
        self._shut_out = False
        self._returned = True
        self._threads = False

    def add(self, request: Request) -> None:
        """A request begins."""
        params = request.params
        if params.logits_processors or params.stopping_criteria or request.lock_step is not None:
            self._callbacks.add(request.request_id)

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        self._callbacks.discard(request_id)

    @contextmanager
    def shut_out(self) -> Iterator[None]:
        """A block in which the caller runs no code between passes, but before the first."""
        outer, self._shut_out = self._shut_out, True
        self._returned = True
        try:
            yield
        finally:
            self._shut_out = outer

    def ran(self) -> bool:
        """Whether some may have run since the last call."""
        returned, self._returned = self._returned or not self._shut_out, False
        before, self._threads = self._threads, other_threads()  # one may have ended meanwhile
        return returned or bool(self._callbacks) or self._threads or before


def other_threads() -> bool:
    """Whether there is another Python thread that may run code of the user's."""
    if threading.active_count() == 1:
        return False
    own = threading.get_ident()
    return any(
        thread.ident != own and type(thread).__name__ not in HARMLESS
        for thread in threading.enumerate()
    )
