"""Every request of a call, prepared by transformers itself, and put into SamplingParams.

The model's own ``generate`` prepares each prompt alone and without pads, through its
``custom_generate`` hook, and runs nothing: merging, defaults, checks, warnings, the order of
processors and the criteria are transformers'. Knows nothing of engines and batches.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    logits_process,
)

from tinyspec.drop_in.prompts import Prompt
from tinyspec.drop_in.served import ADDED_ARGUMENTS, SERVED_FIELDS
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams

# Arguments that transformers takes as lists, with their depth: deeper lists hold one value for each
# request.
_LISTS = {
    *("eos_token_id", "stop_strings", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_eos_token_id", "exponential_decay_length_penalty"),
    *("logits_processor", "stopping_criteria"),
}
_LIST_DEPTHS = dict.fromkeys(_LISTS, 1) | {"bad_words_ids": 2, "sequence_bias": 3}
SHARED_FIELDS = {"output_scores", "output_logits", "return_dict_in_generate", "pad_token_id"}
_PER_REQUEST = SERVED_FIELDS | set(_LIST_DEPTHS) | set(ADDED_ARGUMENTS)
_PER_REQUEST |= {"prefix_allowed_tokens_fn"}

_LENGTHS = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
)
# These become parameters where transformers made them; all others are called as they are.
_PARAMETERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    *_LENGTHS,
)
# Where transformers made one of these, the order of all counts, and all that change or leave out
# logits are called.
_ORDERED = (
    logits_process.TopHLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
)
_PENALTY = logits_process.RepetitionPenaltyLogitsProcessor
# Of transformers' own processors these fit no other prompt of the same length.
OF_PROMPT = (
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)
# In fp32, temperatures beyond these give the same probabilities.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e30
_MAX_PENALTY = 1e30


def per_request(arguments: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """``arguments`` of each of ``count`` requests. Lists deeper than transformers takes them hold
    one value for each.

    Raises ValueError naming the argument where there are not as many.
    """
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in arguments.items():
        values: Iterable[Any] = [value] * count
        if is_per_request(name, value):
            values = value.tolist() if hasattr(value, "tolist") else list(value)
            if len(values) != count:
                allowed = f"{count}, one value for each prompt (or a single value for all)"
                raise refuse(f"len({name})", len(values), allowed)
        for settings, part in zip(each, values, strict=True):
            settings[name] = part
    return each


def is_per_request(name: str, value: Any) -> bool:
    """Whether an argument holds one value for each request."""
    if name not in _PER_REQUEST:
        return False
    if getattr(value, "ndim", 0) == 1 and name not in _LIST_DEPTHS:
        return True
    if name == "sequence_bias" and isinstance(value, (list, tuple)):
        return any(isinstance(part, dict) or part is None for part in value) or _depth(value) > 3
    return isinstance(value, (list, tuple)) and _depth(value) > _LIST_DEPTHS.get(name, 0)


def _depth(value: Any) -> int:
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + max(map(_depth, value), default=0)


@dataclass
class PreparedRequest:
    """What transformers' ``generate`` made of the arguments for one request.

    input_ids [1, L]: without what is given as embeddings. users: processors and criteria that are
    the user's.
    """

    config: GenerationConfig
    processors: list[Any]
    criteria: list[Any]
    input_ids: Tensor
    users: list[Any]

    @cached_property
    def eos(self) -> list[int]:
        """Token ids that end the request."""
        ids = [c.eos_token_id.tolist() for c in self.criteria if type(c) is EosTokenCriteria]
        return [token for some in ids for token in some]

    @property
    def fits_any_length(self) -> bool:
        """Whether ``params`` are those of prompts of any length: they count new tokens alone, and
        nothing is called."""
        config = self.config
        counted = config.max_new_tokens is not None
        counted &= config.min_new_tokens is not None or not config.min_length
        plain = all(type(p) in _PARAMETERS for p in self.processors)
        ends = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in self.criteria)
        return counted and plain and ends and not self.users

    @property
    def pad(self) -> int | None:
        """The pad token; as in transformers a stop token where none is set."""
        pad = self.config.pad_token_id
        return pad if pad is not None else next(iter(self.eos), None)

    def params(self, seed: int | None, deterministic: bool, vocab_size: int) -> SamplingParams:
        """The same in SamplingParams. Raises ValueError as these do."""
        config, length = self.config, self.input_ids.shape[1]
        if deterministic and any(type(c) is MaxTimeCriteria for c in self.criteria):
            raise refuse("max_time", config.max_time, "None with deterministic=True")
        made = [p for p in self.processors if not any(p is user for user in self.users)]
        ordered = any(isinstance(p, _ORDERED) for p in made)
        settings: dict[str, Any] = {}
        if config.do_sample and ordered:
            settings = {"temperature": 1.0}
        elif config.do_sample:
            temperature, top_p, top_k = float(config.temperature or 1), config.top_p, config.top_k
            settings = {
                "temperature": min(max(temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
                "top_k": None if top_k is None else int(top_k),
                "top_p": None if top_p is None or top_p >= 1 else float(top_p),
                "min_p": None if config.min_p is None else float(config.min_p),
            }
        left_out = {id(p) for p in made if type(p) in (_LENGTHS if ordered else _PARAMETERS)}
        called = [p for p in self.processors if id(p) not in left_out]
        penalty = 1.0
        if made and called and called[0] is made[0] and type(made[0]) is _PENALTY:
            penalty = float(called.pop(0).penalty)
        longest = min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria)
        most = max(math.ceil(longest - length), 1)
        least = math.ceil(max((config.min_length or 0) - length, config.min_new_tokens or 0))
        return SamplingParams(
            max_new_tokens=most,
            min_new_tokens=min(max(least, 0), most),
            repetition_penalty=min(penalty, _MAX_PENALTY),
            seed=seed,
            deterministic=deterministic,
            num_return_sequences=max(int(config.num_return_sequences), 1),
            eos_token_id=[token for token in self.eos if 0 <= token < vocab_size],
            logits_processors=[_marked(p) for p in called],
            stopping_criteria=[
                c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
            ],
            **settings,
        )


def _marked(processor: Any) -> Any:
    """A processor, marked as ``stateless`` if it is transformers' own: it may be called for tokens
    that are not committed. One of these asks the user's function."""
    kind = type(processor)
    own = kind.__module__ == logits_process.__name__
    if own and kind is not logits_process.PrefixConstrainedLogitsProcessor:
        processor = copy.copy(processor)
        processor.stateless = True
    return processor


def prepare(
    generate: Callable[..., Any],
    prompt: Prompt,
    device: torch.device,
    settings: dict[str, Any],
    silent: bool = False,
) -> PreparedRequest:
    """One request, prepared by a model's own ``generate``, which runs nothing.

    prompt: without pads. settings: the arguments of the call for this request. silent: without what
    transformers says of them. Raises what ``generate`` raises for them, and RuntimeError where it
    does not call ``custom_generate`` as transformers 5 does.
    """
    prepared: dict[str, Any] = {}

    def hook(model: Any, input_ids: Tensor, **model_kwargs: Any) -> Tensor:
        prepared.update(model_kwargs, input_ids=input_ids)
        return input_ids

    mask = torch.ones(1, len(prompt), dtype=torch.long, device=device)
    inputs: dict[str, Any] = {"attention_mask": mask}
    if prompt.embeds is None:
        inputs["input_ids"] = torch.tensor([prompt.ids], dtype=torch.long, device=device)
    else:
        inputs["inputs_embeds"] = prompt.embeds[None]
    with _silence() if silent else nullcontext():
        generate(**inputs, **settings, custom_generate=hook)
    names = ("generation_config", "logits_processor", "stopping_criteria", "input_ids")
    if missing := [name for name in names if name not in prepared]:
        raise RuntimeError(
            f"the model's own generate passed no {', '.join(missing)} to custom_generate; tinyspec "
            f"cannot serve it with transformers {transformers.__version__}: unpatch the model"
        )
    config, processors, criteria, input_ids = (prepared[name] for name in names)
    given = (settings.get(name) for name in ("logits_processor", "stopping_criteria"))
    users = [one for some in given if isinstance(some, (list, tuple)) for one in some]
    return PreparedRequest(config, list(processors), list(criteria), input_ids, users)


@contextmanager
def _silence() -> Iterator[None]:
    """Without warnings and lines in the log of transformers' generation."""
    logger = logging.getLogger("transformers.generation")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def add_stop_strings(settings: dict[str, Any], default: GenerationConfig, tokenizer: Any) -> None:
    """Replace stop strings by their criterion: ``generate`` passes no tokenizer to its hook.

    default: the model's config. Without a tokenizer transformers refuses stop strings itself.
    """
    config: Any = settings.get("generation_config")
    given, inherited = (getattr(c, "stop_strings", None) for c in (config, default))
    strings = settings.get("stop_strings", inherited if given is None else given)
    if tokenizer is None or strings is None:
        return
    if given is not None:
        config = settings["generation_config"] = copy.deepcopy(config)
        config.stop_strings = None
    if "stop_strings" in settings or inherited is not None:
        settings["stop_strings"] = None
    criteria = list(settings.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer, strings))
    settings["stopping_criteria"] = criteria
