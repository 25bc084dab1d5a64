"""The drop-in: ``model.generate`` on tinyspec's engine, for code that calls transformers' own."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import MaxLengthCriteria

from tinyspec.config import EngineConfig
from tinyspec.drop_in.call import Call, RowSeeds
from tinyspec.drop_in.forward import PatchedForward, plain_forwards
from tinyspec.drop_in.prepare import prepare
from tinyspec.drop_in.prompts import Prompt
from tinyspec.drop_in.run import batch_arguments, batch_outputs, run
from tinyspec.drop_in.served import ADDED_ARGUMENTS, DICT_FIELDS, PROMPT_ARGUMENTS
from tinyspec.engine.engine import Engine
from tinyspec.errors import UnsupportedModelError
from tinyspec.model.supported import CACHE
from tinyspec.model.wrappers import Method, autocast_of, unwrap
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.passes import EngineStats

logger = logging.getLogger("tinyspec")
# Of the class, with self: what the arguments by position are called.
_SIGNATURE = inspect.signature(GenerationMixin.generate)
# Numbers that transformers' processors take from the length of the prompt.
_LENGTHS = {"prompt_length_to_skip", "min_length", "begin_index", "regulation_start", "max_length"}


def patch(
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    deterministic: bool = False,
    seed: int | None = None,
    release: bool = False,
    forward: bool = False,
) -> None:
    """Let tinyspec serve ``model.generate``; everything else of the model stays as it is.

    model: as for an Engine; in a wrapper, the model inside is patched, and its ``generate`` is the
    wrapper's.

    ``generate`` keeps its arguments, defaults, results and errors. Besides, every sampling
    parameter may be a list of one value per prompt, prompts may be lists of different lengths, and
    there are ``seed`` and ``deterministic`` (scalars or lists), which may also stand in a
    ``GenerationConfig``, the call's or the model's. A call that tinyspec does not serve goes to the
    model's own ``generate``, with a line in the log; together with what only tinyspec has it raises
    NotImplementedError.

    ``generate_batch`` is served too, with the tokens of ``generate``; what tinyspec does not serve
    it refuses. Managers of continuous batching stay transformers' own.

    deterministic, seed: of calls that do not say otherwise. A seed that is an argument of
    ``generate`` is every row's; one that stands here or in a config is a base: a row's own is mixed
    from it, the row's prompt, and how many rows with this prompt were sampled before since
    ``patch`` or since another base. So equal prompts have different samples, which repeat when the
    script is run again, in batches of any size. A run that is resumed goes on from
    ``model.generate.reseed(base)``, as did the first run at that place, say with a base of seed and
    step. With several ranks of torch.distributed all rows of all ranks count, so each rank must
    call ``generate`` as often as the others, as FSDP needs anyway; one that samples alone, by no
    argument ``seed``, waits for them and raises RuntimeError at the process group's timeout.

    forward: let it serve ``model(...)`` as well, as in a block of ``tinyspec.canonical(model)``.

    A call under ``torch.autocast``, or of a model whose forward turns it on (after accelerate's
    ``prepare``, before or after this), is served in that precision.

    release: free the page pool's memory after each call, for a trainer that needs it; the next call
    allocates it anew, and no prompt is found in the prefix cache.

    ``model.generate`` also has ``release()``, ``stats()``, ``weights_changed()``,
    ``reseed(base)``, ``fingerprint`` and ``seeds``, those of the rows of the latest call, which a
    returned dict has as an attribute.
    Raises UnsupportedModelError naming what is in the way, and ValueError naming a bad value or if
    the model is patched already.
    """
    if isinstance(vars(unwrap(model)).get("generate"), PatchedGenerate):
        by = "it is patched, by tinyspec.patch or by patch_trainer (TRL's)"
        raise ValueError(f"model is not allowed: {by}; call tinyspec.unpatch(model) first")
    defaults = SamplingParams(deterministic=deterministic, seed=seed)
    for method in PatchedGenerate(model, config, defaults, release, forward).methods:
        method.put_in()


def unpatch(model: PreTrainedModel) -> None:
    """Give ``model`` its own ``generate`` back; calls of it that are under way go on to their end.
    A model that is not patched is left alone; engines that serve it go on."""
    patched_generate = vars(unwrap(model)).get("generate")
    if isinstance(patched_generate, PatchedGenerate):
        patched_generate.close()


class PatchedGenerate(Method):
    """``model.generate`` of a patched model, and its engines: one by the dtype of autocast.

    defaults: of calls that do not say otherwise. releases: whether to free pages after each.
    model, wrapper: in wrappers or itself. ``seeds``: of the rows of the latest call. methods: all
    that it serves of the model, itself among them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        defaults: SamplingParams | None = None,
        releases: bool = False,
        forward: bool = False,
    ):
        self.wrapper, model = model, unwrap(model)
        super().__init__(model, "generate", self.serve)
        self._config = config or EngineConfig()
        self._defaults, self._row_seeds = defaults or SamplingParams(), RowSeeds()
        self._releases = releases
        self.seeds: list[int | None] = []
        self._logged: set[str] = set()
        # Guards those below: the calls that the engine serves now, and whether others may come.
        self._lock = threading.Lock()
        self._calls, self._closed = 0, False
        self._engines: dict[torch.dtype | None, Engine] = {}
        self._engine = self._made()  # of the latest call
        self.methods: list[Method] = [Method(model, "generate_batch", self.generate_batch), self]
        if forward:
            self.methods.append(PatchedForward(model, self.serving))

    def _made(self) -> Engine:
        """An engine for calls as they are made now."""
        engine = Engine(self.wrapper, config=self._config, grows=True)
        return self._engines.setdefault(engine.autocast, engine)

    def _close(self) -> None:
        """All engines."""
        while self._engines:
            self._engines.popitem()[1].close()

    def add(self, method: Method) -> None:
        """Put in one more method, until the model gets its own back."""
        self.methods.append(method)
        method.put_in()

    def close(self) -> None:
        """Give the model its own methods back; the engine is closed once it serves no call."""
        self._engine.driver.check_process()  # locks may be held by threads that are not there
        for method in reversed(self.methods):
            method.take_out()
        with self._lock:
            self._closed = True
            if not self._calls:
                self._close()

    def release(self) -> None:
        """Free the page pool's memory; the next call allocates it again."""
        with self.serving():
            for engine in list(self._engines.values()):
                engine.release()

    def reseed(self, base: int | None) -> None:
        """Another base of seeds in place of that of ``patch``; the rows of each prompt are counted
        anew, also where the base is the same."""
        self._defaults, self._row_seeds = replace(self._defaults, seed=base), RowSeeds()

    def stats(self) -> EngineStats:
        """Sums over all passes so far, in the precision of the latest call."""
        return self._engine.stats()

    def weights_changed(self) -> None:
        """Say that weights were written in a way that leaves no trace (through ``.data``)."""
        with self.serving():
            for engine in list(self._engines.values()):
                engine.weights_changed()

    @property
    def fingerprint(self) -> str:
        """Digest of all that the bits of deterministic requests depend on that are made now."""
        with self.serving() as engine:
            return engine.fingerprint

    @contextmanager
    def serving(self, called: Any = None) -> Iterator[Engine]:
        """The engine, for one call of several that threads may have under way; another one where
        the model has moved to another device, or the call is under another autocast. called: the
        model, where not in its wrappers."""
        self._engine.driver.check_process()
        with self._lock:
            if self._closed:
                raise RuntimeError("this model was unpatched; call tinyspec.patch(model) again")
            device, engines = self._model.device, list(self._engines.values())
            moved = any(e.runner.device != device or e.closed is not None for e in engines)
            if moved and not self._calls:
                self._close()
            autocast = autocast_of(self.wrapper if called is None else called, device.type)
            engine = self._engine = self._engines.get(autocast) or self._made()
            self._calls += 1
        try:
            yield engine
        finally:
            try:  # plain outputs must not depend on earlier calls
                if not engine.driver.in_turn:  # the call was refused there
                    engine.end_call(self._releases)
            finally:
                with self._lock:
                    self._calls -= 1
                    if self._closed and not self._calls:
                        self._close()

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        """The result of ``generate``."""
        arguments = _SIGNATURE.bind(self._model, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        del arguments["self"]
        if self._config.drafts_by_head:  # transformers serves it for some models alone
            arguments.pop("use_mtp", None)
        if arguments.get("custom_generate") is generate:  # no other than this
            del arguments["custom_generate"]
        seeds = self._defaults, self._row_seeds
        call = Call(self._model, self.original, arguments, *seeds)
        if not call.unserved:
            try:
                with self.serving() as engine:
                    sequences = run(engine, call, call.drafter() or engine.drafter)
            except UnsupportedModelError as error:  # the model has changed since the last call
                call.unserved.append(f"the model as it is now ({error})")
        if call.unserved:
            return self._call_original(call)
        self.seeds = call.seeds
        if call.config.return_dict_in_generate and call.config.use_cache is not False:
            self._log_once(f"generate: {CACHE} of returned dicts is None")
        return call.output(sequences)

    def _call_original(self, call: Call) -> Any:
        """The model's own ``generate`` serves the call, if it can."""
        unserved = ", ".join(dict.fromkeys(call.unserved))
        if call.tinyspec_only is not None:
            raise NotImplementedError(
                f"{unserved} is not supported by tinyspec, and {call.tinyspec_only} is not "
                "supported by transformers; leave out one of them"
            )
        self._log_once(
            f"generate: {unserved} is not served by tinyspec; transformers' own generate runs"
        )
        given = {n: v for n, v in call.arguments.items() if n not in ADDED_ARGUMENTS}
        with plain_forwards():
            return self.original(**given)

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning(line)

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
        keep or to warm up, and no bar. Raises what ``generate`` raises, and NotImplementedError for
        what tinyspec does not serve, as times of tokens.
        """
        if len(inputs) == 0:
            return {}
        arguments = batch_arguments(inputs, generation_config, settings)
        base, defaults = getattr(continuous_batching_config, "seed", None), self._defaults
        defaults = defaults if base is None else replace(defaults, seed=base)
        call = Call(self._model, self.original, arguments, defaults, self._row_seeds)
        call.unserved += ["record_timestamps"] if record_timestamps else []
        if getattr(continuous_batching_config, "return_logprobs", False):
            call.params = [params.resolve(logprobs=True) for params in call.params]
        begun, sequences = time.perf_counter(), []
        if not call.unserved:
            with self.serving() as engine:
                sequences = run(engine, call, call.drafter() or engine.drafter)
        if call.unserved:  # rows of code for the whole batch may not all fit, which ``run`` finds
            unserved = ", ".join(dict.fromkeys(call.unserved))
            raise NotImplementedError(
                f"{unserved} is not served by tinyspec's generate_batch; call model.generate"
            )
        return batch_outputs(call, sequences, begun)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list[Any],
    stopping_criteria: list[Any],
    generation_config: GenerationConfig,
    seed: Any = None,
    deterministic: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=tinyspec.generate)``, patched or not.

    transformers has prepared the arguments for the batch by then: ``max_length`` counts padding,
    only ``seed`` and ``deterministic`` may have a value per request, and a streamer is not passed
    on. A model that is not patched gets an engine for this call alone.
    """
    arguments = _arguments(input_ids, generation_config, model_kwargs)
    # New tokens are counted, and what has become a stopping criterion is left out.
    config, length = copy.deepcopy(generation_config), input_ids.shape[1]
    if config.min_new_tokens is None:
        config.min_new_tokens = max((config.min_length or 0) - length, 0) or None
    longest = config.max_length
    config.max_new_tokens = longest - length
    config.max_length = config.min_length = config.stop_strings = config.max_time = None
    with closing(PatchedGenerate(model)) as patched_generate:
        # What transformers makes of the config a second time is left out of the arguments.
        original, settings = patched_generate.original, {"generation_config": config}
        made = prepare(original, Prompt([0]), model.device, settings).processors
        criteria = [
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, MaxLengthCriteria) or criterion.max_length != longest
        ]
        arguments |= {
            "generation_config": config,
            "logits_processor": _users(logits_processor, made),
            "stopping_criteria": criteria,
            "seed": seed,
            "deterministic": deterministic,
        }
        return patched_generate(**arguments)


def _arguments(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The prompts and what else goes to the model, without what transformers adds to it: an empty
    cache, positions, and copies of every prompt, one for each completion or beam."""
    added = {"use_cache", "logits_to_keep", *DICT_FIELDS}  # the last stand in the config as well
    cache, positions = model_kwargs.get(CACHE), model_kwargs.get("position_ids")
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    if mask is None:  # transformers leaves out a mask of ones
        like = input_ids if embeds is None else embeds[..., 0]
        mask = torch.ones_like(like, dtype=torch.long)
    if cache is not None and cache.get_seq_length() == 0:
        added.add(CACHE)
    if positions is not None and ((positions == mask.cumsum(-1) - 1) | (mask == 0)).all():
        added.add("position_ids")
    arguments = {name: value for name, value in model_kwargs.items() if name not in added}
    arguments["attention_mask"] = mask
    if embeds is None:
        arguments["input_ids"] = input_ids
    copies = max(config.num_return_sequences, config.num_beams, 1)
    for name in {*PROMPT_ARGUMENTS, "position_ids"} & arguments.keys():
        arguments[name] = arguments[name][::copies]
    return arguments


def _users(processors: list[Any], made: list[Any]) -> list[Any]:
    """Those of ``processors`` that are the user's, where transformers makes ``made`` by itself: it
    makes none of a type that the user passes, but its warpers, which come last."""

    def numbers(processor: Any) -> dict[str, Any]:
        fields = vars(processor).items()
        return {k: v for k, v in fields if isinstance(v, (int, float)) and k not in _LENGTHS}

    left = list(processors)
    for one in made:
        alike = [p for p in left if type(p) is type(one) and numbers(p) == numbers(one)]
        left = [p for p in left if p not in alike[-1:]]
    return left
