"""transformers' manager of continuous batching, on the engine of a patched model.

Knows transformers' methods and what they promise; a worker does the rest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from tinyspec.drop_in.access import KEPT_AS, Access
from tinyspec.drop_in.rows import Batch
from tinyspec.drop_in.worker import FLUSH, HARD, Worker
from tinyspec.engine.interrupts import at_once

logger = logging.getLogger("tinyspec")


class Manager(ContinuousBatchingManager):
    """Requests in, outputs out, run by a thread between ``start`` and ``stop``.

    generation_config: of requests that do not say otherwise; None: the model's. Of ``config`` count
    max_queue_size (batches), return_logprobs and seed (a base, as one in a generation config); what
    else stands in it belongs to transformers' own engine.

    Methods are transformers'. What differs: ``add_request`` and ``add_requests`` take the settings
    that ``generate`` takes (lists: one value a request) and check them, ``get_result`` of one
    request waits for that one, and outputs have ``seed``. Any thread may call them.
    """

    batch_processor = None
    warmed_up = True

    def __init__(
        self,
        access: Access,
        generation_config: GenerationConfig | None = None,
        config: ContinuousBatchingConfig | None = None,
    ):
        self._access = access
        self.model: Any = access.model
        self.continuous_batching_config = config or ContinuousBatchingConfig()
        self.configure(generation_config)
        self._worker = Worker(access, self.continuous_batching_config)
        self._numbers = itertools.count()
        self._pausing: int | None = None

    def configure(self, generation_config: GenerationConfig | None) -> None:
        """The config of requests to come; None: the model's."""
        self.generation_config: Any = generation_config or self.model.generation_config
        self.num_return_sequences = self.generation_config.num_return_sequences or 1

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the manager of a model that tinyspec serves has no {name}")

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of a model has none."""
        return _nothing, ()

    def warmup(self) -> None:
        """Nothing is recorded beforehand."""

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._worker.running

    def start(self) -> None:
        """Start the thread."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
        else:
            self._worker.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread when all requests have finished, or with ``hard_stop`` after its step,
        which fails them. Raises RuntimeError inside ``pause``."""
        if self._worker.thread is None:
            logger.warning("Manager not started.")
            return
        if self._pausing == threading.get_ident():
            raise RuntimeError("stop inside of pause would wait for ever; leave that block first")
        self._worker.end(HARD if hard_stop else FLUSH, "the manager was stopped")
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            vars(self.model)[KEPT_AS] = self

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most ``timeout`` seconds."""
        if not self._worker.join(timeout):
            logger.warning("Generation thread did not exit after join timeout (%s).", timeout)

    def destroy(self) -> None:
        """Stop, if it runs."""
        if self.is_running():
            self.stop()

    def halt(self, why: str) -> None:
        """Fail what is unfinished and end the thread after its step; waits for nothing."""
        self._worker.end(HARD, why)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which the model is its own, for one thread at a time: what runs is finished
        before it, what is queued waits. Raises RuntimeError where the thread does not run."""
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        with self._access.locked(), at_once():
            self._pausing = threading.get_ident()
            try:
                yield
            finally:
                self._pausing = None

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **settings: Any,
    ) -> str | None:
        """Queue one prompt; its id. None, with a line in the log, where the manager is stopping.

        settings: as ``generate`` takes them. Raises what ``generate`` raises for them, ValueError
        for bad ids, NotImplementedError for what tinyspec does not serve, RuntimeError where a
        manager that is stopping is asked for what only tinyspec has, queue.Full.
        """
        prompt = self._access.token_ids("input_ids", input_ids)
        settings |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        ids = None if request_id is None else [request_id]
        told = {"streaming": streaming, "record_timestamps": record_timestamps}
        return next(iter(self._add([prompt], ids, settings, **told)), None)

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Queue prompts, whose rows are those of one call of ``generate``; as ``add_request``."""
        settings["max_new_tokens"] = max_new_tokens
        told = {"streaming": streaming, "record_timestamps": record_timestamps}
        return self._add(self._access.token_lists("inputs", inputs), None, settings, **told)

    def _add(
        self,
        prompts: list[list[int]],
        ids: list[str] | None,
        settings: dict[str, Any],
        **told: bool,
    ) -> list[str]:
        if not prompts:
            return []
        given = self.generation_config
        given = None if given is self.model.generation_config else given
        call = self._access.call(prompts, given, self.continuous_batching_config, settings)
        if self._worker.ending:
            why, asked = self._worker.why, call.tinyspec_only
            if asked is not None:
                raise RuntimeError(f"{asked} is not served: {why}; start it again")
            logger.warning("%s: %d requests are dropped", why, len(prompts))
            return []
        ids = ids or [f"req_{next(self._numbers)}" for _ in prompts]
        self._worker.add(Batch(call, prompts, ids, **told))
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request, of which nothing more is told; others than unfinished are left alone."""
        self._worker.cancel(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output, or the next of one request; None after ``timeout`` seconds, or where
        none will come: nothing runs, or the request is not unfinished."""
        return self._worker.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, to the end of the thread."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Outputs of one request as they come, to its end."""
        while (output := self.get_result(request_id)) is not None:
            yield output

    def register_result_handler(self, request_id: str, callback: Callable[..., Any]) -> None:
        """Call ``callback`` with the outputs of one request, in the event loop that runs now."""
        self._worker.mail.handle(request_id, callback)


def _nothing() -> None:
    return None
