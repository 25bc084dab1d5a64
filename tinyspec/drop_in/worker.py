"""The thread of a manager of continuous batching: has the model while there are requests.

It gives the model back when none is left, and when other threads want it what runs is finished
first. Knows rows and their outputs, and nothing of what is generated.
"""

from __future__ import annotations

import atexit
import logging
import queue
import time
from threading import Event, Lock, Thread, current_thread

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from tinyspec.drop_in.access import Access
from tinyspec.drop_in.mailbox import Mailbox
from tinyspec.drop_in.rows import Batch, Row
from tinyspec.drop_in.session import Session
from tinyspec.engine.turns import LOOK
from tinyspec.errors import refuse

logger = logging.getLogger("tinyspec")
# Seconds that a batch waits for room in a queue that is full, as in transformers.
PATIENCE = 10
# How it ends: not, when all is done, or after its step.
GO_ON, FLUSH, HARD = range(3)


class Worker:
    """Runs batches of one model. ``mail``: their outputs; ``why`` it ends, where it is to."""

    def __init__(self, access: Access, config: ContinuousBatchingConfig):
        self._access = access
        self.mail = Mailbox()
        self._queue: queue.Queue[Batch] = queue.Queue(config.max_queue_size)
        # By id, those of which the end was not told.
        self._rows: dict[str, Row] = {}
        self._lock, self._wake = Lock(), Event()
        self._ending, self.why = GO_ON, ""
        self.thread: Thread | None = None

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def ending(self) -> bool:
        """Whether it takes no more requests."""
        return self._ending != GO_ON

    def start(self) -> None:
        """Begin; with as many threads of torch as the calling one has."""
        self._ending, self.why = GO_ON, ""
        arguments = (torch.get_num_threads(),)
        self.thread = Thread(target=self._run, args=arguments, name="tinyspec", daemon=True)
        self.thread.start()
        atexit.register(self._end_with_interpreter)

    def end(self, how: int, why: str) -> None:
        """Let it end; waits for nothing."""
        self.why = self.why or why
        self._ending = max(self._ending, how)
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; whether it has ended."""
        if self.thread is not None and self.thread is not current_thread():
            self.thread.join(timeout)
            if not self.thread.is_alive():
                self.thread = None
        return self.thread is None

    def _end_with_interpreter(self) -> None:
        self.end(HARD, "the interpreter ends")
        self.join()

    def add(self, batch: Batch) -> None:
        """Queue ``batch``. Raises ValueError for an id that is taken, and queue.Full."""
        with self._lock:
            for row in batch.rows:
                if row.request_id in self._rows:
                    raise refuse("request_id", row.request_id, "an id of no unfinished request")
            self._rows |= {row.request_id: row for row in batch.rows}
        try:
            self._queue.put(batch, timeout=PATIENCE)
        except queue.Full:
            for row in batch.rows:
                self.cancel(row.request_id)
            raise
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Tell nothing more of a row."""
        with self._lock:
            row = self._rows.pop(request_id, None)
        if row is not None:
            row.cancelled = True

    def take(self, request_id: str | None, timeout: float | None) -> GenerationOutput | None:
        """As ``Mailbox.take``, while there may be more."""

        def expected() -> bool:
            return self.running and (request_id is None or request_id in self._rows)

        return self.mail.take(request_id, timeout, expected)

    def _run(self, threads: int) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        try:
            while self._more():
                try:
                    with self._access.resumed() as engine:
                        self._serve(Session(engine, self._access))
                except Exception as error:  # of no request: the engine's own, or the model changed
                    logger.exception("continuous batching failed")
                    self._fail(f"{type(error).__name__}: {error}")
                if self._access.wanted():
                    time.sleep(LOOK)  # in which another thread gets the model
        finally:
            self._fail(self.why or "the manager's thread ended")
            atexit.unregister(self._end_with_interpreter)

    def _more(self) -> bool:
        """Wait for batches; whether there are some to run."""
        while self._queue.empty() and self._ending == GO_ON:
            self._wake.wait()
            self._wake.clear()
        return self._ending != HARD and not self._queue.empty()

    def _serve(self, session: Session) -> None:
        """Run what is queued, and what comes meanwhile, to its end or to a hard one."""
        queued = self._queue.queue
        with self._queue.mutex:
            batches = list(queued)
        session.reserve(batches)
        self._begin(session)
        try:
            while session.rows and self._ending != HARD:
                self._tell(session.step())
                while queued and not self._access.wanted() and session.has_room(queued[0]):
                    self._begin(session)
        finally:
            session.abort()

    def _begin(self, session: Session) -> None:
        """Begin the next batch; what is wrong with its requests is told of its rows."""
        batch = self._queue.get_nowait()
        try:
            session.begin(batch)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._tell([(row, row.fail(why)) for row in batch.rows])

    def _tell(self, found: list[tuple[Row, GenerationOutput]]) -> None:
        """Leave outputs for those who wait; not of rows that were cancelled."""
        with self._lock:
            wanted = [(row, o) for row, o in found if self._rows.get(row.request_id) is row]
            self.mail.put(output for _, output in wanted)
            for row, _ in wanted:
                if row.ended:
                    del self._rows[row.request_id]

    def _fail(self, why: str) -> None:
        """End everything, what is queued included."""
        while not self._queue.empty():
            self._queue.get_nowait()
        with self._lock:
            rows = list(self._rows.values())
        self._tell([(row, row.fail(why)) for row in rows])
