"""``model.generate`` of a patched model: for old code transformers' own, on tinyspec's engine, and
with parameters, seeds and ``deterministic`` for every request by itself.

A patched model is its own self whenever no call is running; only then are the engine's modules in.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
)

from tinyspec.config import EngineConfig
from tinyspec.drafter import make_drafter
from tinyspec.engine import Engine
from tinyspec.hf_call import OURS, Call
from tinyspec.hf_prepare import prepare
from tinyspec.hf_rows import Row
from tinyspec.passes import EngineStats
from tinyspec.request import Request

logger = logging.getLogger("tinyspec")


def patch(model: PreTrainedModel, config: EngineConfig | None = None) -> None:
    """Let tinyspec serve ``model.generate``; everything else of the model stays as it is.

    ``generate`` keeps the arguments, defaults, results and errors that it has. Besides, every
    sampling parameter may be a list of one value per prompt, prompts may be lists of different
    lengths, and there are ``seed`` and ``deterministic`` (scalars or lists). What tinyspec does not
    serve goes to the model's own ``generate``, with a line in the log; together with what only
    tinyspec has it raises NotImplementedError.

    ``model.generate`` has ``release()``, ``stats()``, ``weights_changed()`` and ``fingerprint``
    besides. Raises UnsupportedModelError naming what is in the way, and ValueError if the model is
    patched already or served by an Engine.
    """
    model.__dict__["generate"] = DropIn(model, config)


def unpatch(model: PreTrainedModel) -> None:
    """Give ``model`` its own ``generate`` back; a model that is not patched is left alone."""
    door = vars(model).get("generate")
    if isinstance(door, DropIn):
        door.close()


class DropIn:
    """The ``generate`` of one patched model, and the engine behind it."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig | None = None):
        self._model = model
        self._config = config or EngineConfig()
        self._before = vars(model).get("generate")
        self._original: Callable[..., Any] = getattr(model, "generate")  # noqa: B009
        self._lock = threading.Lock()
        self._runs_in: int | None = None
        self._told: set[str] = set()
        self._drafter = make_drafter(self._config.drafter, model)
        self._engine: Engine | None = Engine(model, config=self._config, grows=True)
        self._engine.suspend()
        self.__doc__ = patch.__doc__
        self.__name__ = "generate"
        self.__signature__ = _signature(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return _own, (self._model, self._before)

    def close(self) -> None:
        """Close the engine and give the model its own ``generate`` back."""
        if self._model.__dict__.get("generate") is self:
            del self._model.__dict__["generate"]
            if self._before is not None:
                self._model.__dict__["generate"] = self._before
        self._drop()

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
            if self._engine is None or not self._engine.resume():
                self._drop()
                self._engine = Engine(self._model, config=self._config, grows=True)
            try:
                yield self._engine
            finally:
                self._engine.suspend()

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """No other call runs meanwhile."""
        if self._runs_in == threading.get_ident():
            raise RuntimeError(
                "generate of a patched model cannot be called from within itself (by a processor, "
                "a criterion or a streamer): use another model there, or tinyspec.unpatch(model)"
            )
        with self._lock:
            self._runs_in = threading.get_ident()
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
        if custom_generate is generate:
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
        if why not in self._told:
            self._told.add(why)
            logger.warning("generate: %s is not served by tinyspec; transformers' own runs", why)
        with self._by_itself():
            return self._original(**call.arguments)

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
        with engine.follow(requests, call.drafter() or self._drafter) as events:
            for event in events:
                place = places[event.request_id, event.index]
                if event.finish_reason == "abort":
                    failed = sequences[place]
                    raise failed.cause or RuntimeError(f"row {place}: {failed.error}")
                streamers.put(place, event.token_ids, event.finish_reason is not None, call.pad)
        streamers.end()


def _own(model: Any, before: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The ``generate`` that a model has of its own, or else its class's."""
    return before or type(model).generate.__get__(model)


def _signature(original: Callable[..., Any]) -> inspect.Signature:
    """The signature of a ``generate``, with what tinyspec adds to it."""
    signature = inspect.signature(original)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in OURS]
    own = list(signature.parameters.values())
    place = len(own) - (own[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*own[:place], *added, *own[place:]])


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list[Any],
    stopping_criteria: list[Any],
    generation_config: GenerationConfig,
    seed: Any = None,
    deterministic: Any = False,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=tinyspec.generate)``, patched or not.

    transformers has prepared the arguments by then, for the batch as it is: ``max_length`` counts
    padding, there are no values per request but ``seed`` and ``deterministic``, and a streamer is
    not handed on. A model that is not patched gets an engine for this call alone.

    Raises NotImplementedError naming what is not served.
    """
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in logits_processor):
        raise NotImplementedError(
            "prefix_allowed_tokens_fn through custom_generate; use tinyspec.patch(model)"
        )
    past = model_kwargs.pop("past_key_values", None)
    if past is not None and past.get_seq_length() > 0:
        raise NotImplementedError("past_key_values is not supported by tinyspec")
    for name in ("use_cache", "logits_to_keep"):
        model_kwargs.pop(name, None)
    config = copy.deepcopy(generation_config)
    length = input_ids.shape[1]
    if config.min_new_tokens is None:
        config.min_new_tokens = max((config.min_length or 0) - length, 0) or None
    config.max_new_tokens = config.max_length - length
    config.max_length = config.min_length = config.stop_strings = config.max_time = None
    # Of the processors those are left out that transformers will make of the config once more.
    made = prepare(_own(model), Row([0]), model.device, {"generation_config": config})
    kinds = {type(processor) for processor in made.processors}
    given = {
        "input_ids": input_ids,
        **model_kwargs,
        "generation_config": config,
        "logits_processor": [p for p in logits_processor if type(p) not in kinds],
        "stopping_criteria": [
            c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        ],
        "seed": seed,
        "deterministic": deterministic,
    }
    # transformers has written every prompt down once for each of its completions.
    copies = config.num_return_sequences
    if copies > 1:
        for name, value in given.items():
            if isinstance(value, Tensor):
                given[name] = value[::copies]
    door = vars(model).get("generate")
    if isinstance(door, DropIn):
        return door.serve(given)
    door = DropIn(model)
    try:
        return door.serve(given)
    finally:
        door.close()
