"""The ``generate`` of one patched model, and the engine behind it.

Knows when calls run, and nothing of their arguments.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.drop_in import continuous
from tinyspec.drop_in.call import Call
from tinyspec.drop_in.original import ServedMethod, own_method, served_signature
from tinyspec.drop_in.requests import new_requests, run
from tinyspec.drop_in.seeds import Defaults, RowSeeds
from tinyspec.engine.drafter import make_drafter
from tinyspec.engine.engine import Engine
from tinyspec.engine.interrupts import at_once, between_steps, flush
from tinyspec.errors import UnsupportedModelError
from tinyspec.scheduler.passes import EngineStats

logger = logging.getLogger("tinyspec")
# How often a call that waits for another thread's looks whether Ctrl-C came.
SECONDS_PER_LOOK = 0.1


class PatchedGenerate:
    """``model.generate`` of a patched model.

    custom_generate: the public function of this name, which means no other ``generate`` than this.
    defaults: of calls that do not say otherwise. releases: whether to free pages after each.
    ``seeds``: of the rows of the latest call.

    Raises RuntimeError where transformers' ``generate`` lacks what tinyspec uses of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        custom_generate: Callable[..., Any] | None = None,
        defaults: Defaults | None = None,
        releases: bool = False,
    ):
        # Of the class, with self: what the arguments by position are called.
        self._parameters = inspect.signature(GenerationMixin.generate)
        if "custom_generate" not in self._parameters.parameters:
            raise RuntimeError(
                f"generate of transformers {transformers.__version__} has no argument "
                "custom_generate, which tinyspec needs; install a transformers that has it"
            )
        self._model = model
        self._custom_generate = custom_generate
        self._config = config or EngineConfig()
        self._defaults, self._row_seeds = defaults or Defaults(), RowSeeds()
        self._releases = releases
        self.seeds: list[int | None] = []
        self._before = vars(model).get("generate")
        self._original: Callable[..., Any] = getattr(model, "generate")  # noqa: B009
        self._lock = threading.RLock()
        self._engine_thread: int | None = None
        self._logged: set[str] = set()
        self._closed = self._in_original = False
        self._drafter = make_drafter(self._config.drafter, model)
        if isinstance(self._before, PatchedGenerate):
            raise ValueError(
                "model is not allowed: it is patched; call tinyspec.unpatch(model) first"
            )
        self._engine: Engine | None = self._new_engine()
        batch = ServedMethod(model, "generate_batch", self.generate_batch)
        # The last is given back last, as the others are found through it.
        self._methods: dict[str, Any] = {"generate_batch": batch, "generate": self}
        self._own = {name: vars(model).get(name) for name in self._methods}
        self.__doc__ = self._original.__doc__
        self.__name__ = "generate"
        self.__signature__ = served_signature(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return own_method, (self._model, "generate", self._before)

    def put_in(self) -> None:
        """Let the model's methods be these."""
        vars(self._model).update(self._methods)

    def close(self) -> None:
        """Close the engine and give the model its own methods back; again, what is left to do
        where that was cut off."""
        table = vars(self._model)
        with self._locked():
            for name, served in self._methods.items():
                if table.get(name) is served:
                    own = self._own[name]
                    table.pop(name) if own is None else table.update({name: own})
            self._close_engine()
            self._closed = True

    def _new_engine(self) -> Engine:
        return Engine(self._model, config=self._config, grows=True)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def release(self) -> None:
        """Free the page pool's memory; the next call allocates it again."""
        with self._serving() as engine:
            engine.release()

    def stats(self) -> EngineStats:
        """Sums over all passes so far."""
        return EngineStats() if self._engine is None else self._engine.stats()

    def weights_changed(self) -> None:
        """Say that weights were written in a way that leaves no trace (through ``.data``)."""
        with self._serving() as engine:
            engine.weights_changed()

    @property
    def fingerprint(self) -> str:
        """Digest of all that the bits of deterministic requests depend on."""
        with self._serving() as engine:
            return engine.fingerprint

    @contextmanager
    def _serving(self) -> Iterator[Engine]:
        """The engine, for one call; another one where the model has moved to another device."""
        with self._locked():
            engine = self._engine
            if self._closed or (engine is not None and engine.closed is not None):
                raise RuntimeError("this model was unpatched; call tinyspec.patch(model) again")
            if engine is None or engine.runner.device != self._model.device:
                self._close_engine()
                engine = self._engine = self._new_engine()
            try:
                yield engine
            finally:
                if engine.has_unfinished():  # after an interrupt between two steps
                    self._close_engine()
                else:
                    if self._releases:
                        engine.release()
                    engine.forget_plain()

    @contextmanager
    def _locked(self, engine: bool = True) -> Iterator[None]:
        """Keeps other threads' calls waiting and Ctrl-C until a step has ended, and refuses calls
        from within the engine's own. Without ``engine`` transformers runs, and may call
        ``generate`` again."""
        if self._engine is not None:  # where the lock is held by a thread that is not here
            self._engine.turns.check_process()
        thread = threading.get_ident()
        if self._engine_thread == thread:
            raise RuntimeError(
                "generate or unpatch was called from within itself (by a logits processor, "
                "criterion or streamer of the same model); use another model there"
            )
        with between_steps():
            while not self._lock.acquire(timeout=SECONDS_PER_LOOK):
                flush()
            try:
                self._engine_thread = thread if engine else None
                yield
            finally:
                self._engine_thread = None
                self._lock.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._parameters.bind(self._model, *args, **kwargs)
        arguments = dict(zip(self._parameters.parameters, bound.args, strict=False)) | bound.kwargs
        del arguments["self"]
        if arguments.get("custom_generate") is self._custom_generate:
            arguments.pop("custom_generate", None)
        return self.serve(arguments)

    def serve(self, arguments: dict[str, Any]) -> Any:
        """The result of ``generate`` for arguments by name."""
        seeds = self._defaults, self._row_seeds
        call = Call(self._model, self._original, arguments, *seeds)
        if call.unserved:
            return self._call_original(call)
        try:
            with self._serving() as engine:
                requests = new_requests(engine, call)
                if not call.unserved:
                    run(engine, requests, call, call.drafter() or self._drafter)
        except UnsupportedModelError as error:  # the model has changed since the last call
            call.unserved.append(f"the model as it is now ({error})")
        if call.unserved:
            return self._call_original(call)
        self.seeds = call.seeds
        if call.config.return_dict_in_generate and call.config.use_cache is not False:
            self._log_once("generate: past_key_values of returned dicts are None")
        return call.output([sequence for request in requests for sequence in request.sequences])

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **settings: Any,
    ) -> dict[str, Any]:
        """A ``GenerationOutput`` of each prompt, by id, in the order of the prompts, with the
        tokens that ``generate`` gives the same rows.

        settings: as ``generate`` takes them, ``seed`` and ``deterministic`` included. Of a
        continuous_batching_config count return_logprobs and seed (a base). There is no manager to
        keep or to warm up. Raises what ``generate`` raises, and NotImplementedError for what
        tinyspec does not serve.
        """
        arguments = continuous.arguments_of(self._model, inputs, generation_config, settings)
        if not arguments["input_ids"]:
            return {}
        base, defaults = getattr(continuous_batching_config, "seed", None), self._defaults
        defaults = defaults if base is None else replace(defaults, seed=base)
        call = Call(self._model, self._original, arguments, defaults, self._row_seeds)
        continuous.refuse_unserved(call)
        if getattr(continuous_batching_config, "return_logprobs", False):
            call.params = [params.resolve(logprobs=True) for params in call.params]
        drafter = call.drafter() or self._drafter
        with self._serving() as engine:
            requests = new_requests(engine, call)
            given = engine, requests, call, drafter, record_timestamps, progress_bar
            outputs: dict[str, Any] = continuous.run(*given)
        return outputs

    def _call_original(self, call: Call) -> Any:
        """The model's own ``generate`` serves the call, if it can."""
        unserved = ", ".join(dict.fromkeys(call.unserved))
        if call.tinyspec_only is not None:
            raise NotImplementedError(
                f"{unserved} is not supported by tinyspec, and {call.tinyspec_only} is not "
                "supported by transformers; leave out one of them"
            )
        with self._locked(engine=False):
            # Calls that transformers makes in turn are not logged.
            if not self._in_original:
                self._log_once(
                    f"generate: {unserved} is not served by tinyspec; transformers' own generate "
                    "runs"
                )
            outer, self._in_original = self._in_original, True
            try:
                with at_once():
                    return self._original(**call.transformers_arguments)
            finally:
                self._in_original = outer

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning(line)
