"""The ``generate`` of one patched model, and the engine behind it.

The model is its own self whenever no call is running; only then are the engine's modules in. Knows
when calls run, and of their arguments nothing.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.drop_in.call import OURS, Call
from tinyspec.engine.drafter import make_drafter
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.scheduler.passes import EngineStats
from tinyspec.scheduler.request import Request

logger = logging.getLogger("tinyspec")


class PatchedGenerate:
    """``model.generate`` of a patched model.

    synonym: as ``custom_generate`` it means this one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        synonym: Callable[..., Any] | None = None,
    ):
        self._model = model
        self._synonym = synonym
        self._config = config or EngineConfig()
        self._before = vars(model).get("generate")
        self._original: Callable[..., Any] = getattr(model, "generate")  # noqa: B009
        self._lock = threading.RLock()
        self._runs_in: int | None = None
        self._told: set[str] = set()
        self._closed = self._elsewhere_now = False
        self._drafter = make_drafter(self._config.drafter, model)
        self._engine: Engine | None = Engine(model, config=self._config, grows=True)
        self._engine.suspend()
        self.__doc__ = self._original.__doc__
        self.__name__ = "generate"
        self.__signature__ = _signature(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return own_generate, (self._model, self._before)

    def close(self) -> None:
        """Close the engine and give the model its own ``generate`` back."""
        with self._by_itself():
            if self._model.__dict__.get("generate") is self:
                del self._model.__dict__["generate"]
                if self._before is not None:
                    self._model.__dict__["generate"] = self._before
            self._drop()
            self._closed = True

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def release(self) -> None:
        """Give the page pool's memory back; the next call takes it again."""
        with self._at_work() as engine:
            engine.release()

    def stats(self) -> EngineStats:
        """Sums over all passes so far."""
        return EngineStats() if self._engine is None else self._engine.stats()

    def weights_changed(self) -> None:
        """Say that weights were written in a way that leaves no trace (through ``.data``)."""
        with self._at_work() as engine:
            engine.weights_changed()

    @property
    def fingerprint(self) -> str:
        """Digest of all that the bits of deterministic requests depend on."""
        with self._at_work() as engine:
            return engine.fingerprint

    @contextmanager
    def _at_work(self) -> Iterator[Engine]:
        """The engine, in the model while the block runs; a new one where the old does not fit."""
        with self._by_itself():
            if self._closed:
                raise refuse("generate", "closed", "that of a patched model")
            if self._engine is None or not self._engine.resume():
                self._drop()
                self._engine = Engine(self._model, config=self._config, grows=True)
            try:
                yield self._engine
            finally:
                if self._engine.has_unfinished():  # left over by an interrupt at a bad moment
                    self._drop()
                else:
                    self._engine.suspend()

    @contextmanager
    def _by_itself(self, engine: bool = True) -> Iterator[None]:
        """No other thread's call runs meanwhile; nothing of this thread's, if it is the engine's
        turn. Without ``engine`` transformers runs, and may call ``generate`` again."""
        me = threading.get_ident()
        if self._runs_in == me:
            raise RuntimeError(
                "generate of a patched model cannot be called from within itself (by a processor, "
                "criterion or streamer), nor the model be unpatched: use another model there"
            )
        with self._lock:
            self._runs_in = me if engine else None
            try:
                yield
            finally:
                self._runs_in = None

    def __call__(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        *,
        seed: Any = None,
        deterministic: Any = False,
        **kwargs: Any,
    ) -> Any:
        arguments = {**locals(), **kwargs}
        for name in ("self", "kwargs"):
            del arguments[name]
        if custom_generate is self._synonym:
            del arguments["custom_generate"]
        return self.serve(arguments)

    def serve(self, given: dict[str, Any]) -> Any:
        """The result of ``generate`` for arguments by name."""
        call = Call(self._model, self._original, given)
        if call.unserved:
            return self._elsewhere(call)
        with self._at_work() as engine:
            requests = self._requests(engine, call)
            self._run(engine, requests, call)
        return call.output([sequence for request in requests for sequence in request.sequences])

    def _elsewhere(self, call: Call) -> Any:
        """The model's own ``generate`` serves the call, if it can."""
        why = ", ".join(dict.fromkeys(call.unserved))
        if (asked := call.asks_for_more) is not None:
            raise NotImplementedError(
                f"{why} is not supported by tinyspec, and {asked} by nobody else"
            )
        with self._by_itself(engine=False):
            # Of what it calls in turn nothing is said.
            if why not in self._told and not self._elsewhere_now:
                self._told.add(why)
                logger.warning(
                    "generate: %s is not served by tinyspec; transformers' own runs", why
                )
            outer, self._elsewhere_now = self._elsewhere_now, True
            try:
                return self._original(**call.arguments)
            finally:
                self._elsewhere_now = outer

    @staticmethod
    def _requests(engine: Engine, call: Call) -> list[Request]:
        """Requests of the engine's, and pages for all that may run at once."""
        size = engine.config.page_size or 1
        pages = []
        for row, params in zip(call.rows, call.params, strict=True):
            alone = -(-(len(row) + params.max_new_tokens) // size)
            further = alone - len(row) // size  # completions share the prompt's full pages
            pages += [alone] + [further] * (params.num_return_sequences - 1)
        engine.reserve(sum(sorted(pages)[-engine.config.max_sequences :]))
        requests = engine.prepare([row.ids or [0] * len(row) for row in call.rows], call.params)
        for request, row in zip(requests, call.rows, strict=True):
            request.embeds, request.num_hidden = row.embeds, len(row) - len(row.ids)
            request.keeps_scores, request.keeps_logits = call.keeps
        return requests

    def _run(self, engine: Engine, requests: list[Request], call: Call) -> None:
        """Run requests to their end. Raises what a processor or a criterion raised."""
        sequences = [sequence for request in requests for sequence in request.sequences]
        places = {(s.request.request_id, s.index): n for n, s in enumerate(sequences)}
        streamers = call.streamers()
        with (
            engine.follow(requests, call.drafter() or self._drafter, not streamers) as events,
            nullcontext() if streamers else events.hold_state(),
        ):
            for event in events:
                place = places[event.request_id, event.index]
                if event.finish_reason == "abort":
                    failed = sequences[place]
                    raise failed.cause or RuntimeError(f"row {place}: {failed.error}")
                streamers.put(place, event.token_ids, event.finish_reason is not None, call.pad)
        streamers.end()


def own_generate(model: Any, before: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The ``generate`` that a model has of its own, or else its class's."""
    return before or type(model).generate.__get__(model)


def _signature(original: Callable[..., Any]) -> inspect.Signature:
    """The signature of a ``generate``, with what tinyspec adds to it."""
    signature = inspect.signature(original)
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None) for name in OURS]
    own = list(signature.parameters.values())
    place = len(own) - (own[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*own[:place], *added, *own[place:]])
