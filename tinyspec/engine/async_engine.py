"""AsyncEngine: an Engine whose calls are awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyspec.config import EngineConfig
from tinyspec.engine.async_worker import AsyncWorker, Call
from tinyspec.engine.engine import Engine, Params
from tinyspec.engine.lock import OneProcess
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scalars import plain

# Seconds that a finalizer waits for the thread: it runs at any line, also where its own thread
# holds what the other one needs to end.
FINALIZERS_WAIT = 1.0


class AsyncEngine(OneProcess):
    """Generates for any number of asyncio tasks, whose requests share the passes of one Engine.

    Passes run in a thread of their own, and so does the user's code in requests. Cancelling a task
    aborts its requests. model, tokenizer, config: as for ``Engine``, or an Engine as ``model``,
    which others may use as well, and which stays open. max_requests: calls begin, in order, while
    fewer requests than this are unfinished; the others wait. An asynchronous context manager.

    engine: the Engine, for its other methods, which wait for no event loop but for a pass.

    Raises as ``Engine``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        max_requests: int = 1024,
    ):
        max_requests = plain(max_requests)
        if not isinstance(max_requests, int) or max_requests < 1:
            raise refuse("max_requests", max_requests, "an integer of at least 1")
        given = isinstance(model, Engine)
        if given and (tokenizer, config) != (None, None):
            raise refuse("tokenizer, config", (tokenizer, config), "None with an Engine")
        self.engine: Engine = model if given else Engine(model, tokenizer, config)
        self.lock = self.engine.lock
        self._worker = AsyncWorker(self.engine, max_requests, closes=not given)
        weakref.finalize(self, self._worker.stop, FINALIZERS_WAIT).atexit = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        config: EngineConfig | None = None,
        *,
        max_requests: int = 1024,
        **given: Any,
    ) -> AsyncEngine:
        """As ``Engine.from_pretrained``; returns when the model is loaded."""
        engine = Engine.from_pretrained(name_or_path, dtype, device, config, **given)
        served = cls(engine, max_requests=max_requests)
        served._worker.closes = True
        return served

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the thread, and close the engine unless it was given; unfinished calls raise
        ValueError."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.stop)

    async def generate(self, prompts: Any, params: Params = None) -> list[RequestOutput]:
        """Outputs for ``prompts``, in their order; arguments and errors as ``Engine.generate``."""
        call = self._call(prompts, params, streams=False)
        try:
            return await self._answer(call)
        finally:
            self._worker.end(call)

    async def stream(self, prompts: Any, params: Params = None) -> AsyncIterator[StreamEvent]:
        """Committed tokens of ``prompts`` as they come; arguments and errors as ``generate``, at
        the first event.

        An event has all tokens of its completion since the one before: who reads slowly gets fewer
        events, keeps nobody waiting, and nothing piles up. Leaving the loop aborts what is left.
        """
        call = self._call(prompts, params, streams=True)
        try:
            while events := await self._answer(call):
                for event in events:
                    yield event
        finally:
            self._worker.end(call)

    def _call(self, prompts: Any, params: Params, streams: bool) -> Call:
        future = asyncio.get_running_loop().create_future()
        return Call(partial(self.engine.prepare, prompts, params), streams, future)

    async def _answer(self, call: Call) -> Any:
        if call.future.done():
            call.future = asyncio.get_running_loop().create_future()
        self._worker.tell(call)
        return await call.future
