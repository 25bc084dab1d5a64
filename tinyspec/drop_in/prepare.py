"""Every request of a call, prepared by transformers itself.

The model's own ``generate`` prepares each prompt alone and without pads, through its
``custom_generate`` hook, and runs nothing: merging, defaults, checks, warnings, the order of
processors and the criteria are transformers'. Knows nothing of engines.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation import StopStringCriteria

from tinyspec.drop_in.prompts import Prompt
from tinyspec.drop_in.served import ADDED_ARGUMENTS, SERVED_FIELDS
from tinyspec.drop_in.settings import PreparedRequest
from tinyspec.errors import refuse

Generate = Callable[..., Any]
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
_PER_REQUEST |= {"generation_config", "prefix_allowed_tokens_fn"}


def per_request(arguments: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """``arguments`` of each of ``count`` requests. Lists deeper than transformers takes them hold
    one value for each.

    Raises ValueError naming the argument where there are not as many.
    """
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in arguments.items():
        values: Iterable[Any] = [value] * count
        if is_per_request(name, value):
            if name in SHARED_FIELDS:
                raise refuse(name, value, "one value for all requests of a call")
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


def prepare(
    generate: Generate, prompt: Prompt | None, device: torch.device, settings: dict[str, Any]
) -> PreparedRequest:
    """One request, prepared by a model's own ``generate``, which runs nothing.

    prompt: without pads; None where no prompt was given: ``generate`` then begins with the BOS
    token. settings: the arguments of the call for this request. Raises what ``generate`` raises for
    them, and RuntimeError where it does not call ``custom_generate`` as transformers 5 does.
    """
    prepared: dict[str, Any] = {}

    def hook(model: Any, input_ids: torch.Tensor, **model_kwargs: Any) -> torch.Tensor:
        prepared.update(model_kwargs, input_ids=input_ids)
        return input_ids

    inputs: dict[str, Any] = {}
    if prompt is not None:
        if prompt.embeds is not None:
            inputs["inputs_embeds"] = prompt.embeds[None]
        if prompt.ids or prompt.embeds is None:
            inputs["input_ids"] = torch.tensor([prompt.ids], dtype=torch.long, device=device)
        inputs["attention_mask"] = torch.ones(1, len(prompt), dtype=torch.long, device=device)
    generate(**inputs, **settings, custom_generate=hook)
    names = ("generation_config", "logits_processor", "stopping_criteria", "input_ids")
    if missing := [name for name in names if name not in prepared]:
        raise RuntimeError(
            f"the model's own generate passed no {', '.join(missing)} to custom_generate; tinyspec "
            f"cannot serve it with transformers {transformers.__version__}: unpatch the model"
        )
    config, processors, criteria, input_ids = (prepared[name] for name in names)
    user = settings.get("logits_processor")
    user = list(user) if isinstance(user, (list, tuple)) else []
    return PreparedRequest(config, list(processors), list(criteria), input_ids, user)


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


# Numbers that transformers' processors take from the length of the prompt.
_LENGTHS = {"prompt_length_to_skip", "min_length", "begin_index", "regulation_start", "max_length"}


def user_processors(processors: list[Any], made: list[Any]) -> list[Any]:
    """Those of ``processors`` that are the user's, where transformers makes ``made`` by itself.

    It makes none of a type that the user passes, but its warpers, which come last.
    """

    def numbers(processor: Any) -> dict[str, Any]:
        fields = vars(processor).items()
        return {k: v for k, v in fields if isinstance(v, (int, float)) and k not in _LENGTHS}

    found: set[int] = set()
    for one in made:
        alike = [p for p in processors if type(p) is type(one) and numbers(p) == numbers(one)]
        found |= {id(p) for p in alike[-1:]}
    return [p for p in processors if id(p) not in found]


@contextmanager
def log_lines_once() -> Iterator[None]:
    """Each line that transformers logs, once, while it prepares one request after the other."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        new = line not in seen
        seen.add(line)
        return new

    names = ("utils", "configuration_utils")
    loggers = [logging.getLogger(f"transformers.generation.{name}") for name in names]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)
